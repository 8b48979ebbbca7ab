"""Open MPI's mpirun and MPICH's mpiexec, as Debian has them, on hosts that all are this machine.

They reach other hosts by a command of their user's choice: here one that runs there what it is given, right here.
"""

import os
import re
import shutil
import subprocess

import pytest

KINDS = ("openmpi", "mpich")
ENVIRONMENT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}  # Open MPI asks for both
_REMOTE_SHELL = """#!/bin/sh
[ "$1" != -x ] || shift  # ssh's, from MPICH
export TMPDIR="$0.$1"  # a host's own: daemons of Open MPI that share one get into each other's way
mkdir -p "$TMPDIR"
shift
exec sh -c "$*"
"""


def launcher(kind, folder, hosts, each):
    """The beginning of a command that starts so many processes on each of these hosts, with ENVIRONMENT. Skips the test
    without that kind."""
    program = _program(kind)
    shell = folder / "remote_shell"
    shell.write_text(_REMOTE_SHELL)
    shell.chmod(0o755)
    if kind == "openmpi":
        places = ",".join("%s:%d" % (host, each) for host in hosts)
        options = ["--host", places, "--mca", "plm_rsh_agent", str(shell), "--bind-to", "none"]
    else:
        options = ["-launcher-exec", str(shell), "-hosts", ",".join(hosts), "-ppn", str(each)]
    return [program, *options, "-n", str(each * len(hosts))]


def _program(kind):
    """Its path, if it is of that kind: both call theirs mpirun and mpiexec."""
    for name in {"openmpi": ("mpirun.openmpi", "mpirun"), "mpich": ("mpiexec.hydra", "mpiexec.mpich")}[kind]:
        path = shutil.which(name)
        if path is not None:
            says = subprocess.check_output([path, "--version"], env={**os.environ, **ENVIRONMENT}, text=True)
            if re.search({"openmpi": "Open MPI|OpenRTE", "mpich": "HYDRA"}[kind], says):
                return path
    pytest.skip("no %s here; sudo tools/needs all installs it" % {"openmpi": "Open MPI", "mpich": "MPICH"}[kind])
