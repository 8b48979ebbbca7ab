#!/bin/sh
# Installs P3 with MXNet for CPU in ~/p3 of this host:  install.sh REPOSITORY [REVISION]
# Run it in the same way on every host. If run again, it checks out that revision and reinstalls.
# MXNET=mxnet-cu112 (or mxnet-cu117) installs MXNet for GPUs instead.
set -eu
if [ $# -lt 1 ] || [ $# -gt 2 ]; then
    echo "usage: install.sh REPOSITORY [REVISION]" >&2
    exit 2
fi
repository=$1
revision=${2:-HEAD}
folder=$HOME/p3

[ -d "$folder/.git" ] || git clone --quiet "$repository" "$folder"
cd "$folder"
git fetch --quiet "$repository" "$revision"
git checkout --quiet --detach FETCH_HEAD
[ -x .venv/bin/pip ] || tools/make-venv .venv
# Editable: P3 is then the same from any folder, and results name the commit.
.venv/bin/pip install --quiet --no-build-isolation -e ".[${MXNET:-mxnet},lab]"
echo "$(hostname): $(.venv/bin/p3 --version), commit $(git rev-parse --short HEAD)"
