"""Scripts of tests as processes that have imported MXNet or torch already: fork_server/."""

from __future__ import annotations

import functools
import os
import socket
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from typing import List

from fork_server import needs
from processes import HELPERS, QUICK_IMPORT, ROOT, clean_environment

OPTIONS = "-ISu"
FOLDER = HELPERS / "fork_server"
# What is likely to be imported, by what a script names.
LIBRARIES = {
    "torch": ("torch", "torch._dynamo", "torch.testing", "torch.distributed.tensor", "torch.distributed.run",
              "sklearn.datasets"),
    "mxnet": ("mxnet", "mxnet.gluon"),
}


def command(script: str, *arguments: str) -> List[str]:
    """Of a process that runs the script of P3's tests; as `python script arguments`, but for the imports' time: returns
    when the server has imported what is needed."""
    needed = needs.library([script])
    plain = [sys.executable, script, *arguments]
    if needed is None or find_spec(needed) is None or not hasattr(os, "pidfd_open"):
        return plain
    _wait_for_imports(needed)
    return [sys.executable, OPTIONS, str(FOLDER / "ask.py"), os.path.join(_servers(), needed), *plain]


def started(command: List[str]) -> List[str]:
    """The script and its arguments, for a launcher that starts Python itself."""
    return command[5:] if command[1] == OPTIONS else command[1:]


def environment() -> dict:
    """Of what is forked, and of processes whose own are, whoever starts them: quick_import/sitecustomize.py. One OpenMP
    thread, as `p3 run` sets it: the machines that test have few cores."""
    return {**_environment(), "P3S_FORK_SERVERS": _servers()}


def _environment():
    paths = os.pathsep.join([QUICK_IMPORT, str(HELPERS), str(ROOT)])
    return clean_environment(OMP_NUM_THREADS="1", PYTHONPATH=paths)


@functools.lru_cache(maxsize=None)
def _wait_for_imports(library: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(100)
        connection.connect(os.path.join(_servers(), library))
        connection.send(b"nothing to run")
        connection.recv(1)  # it closes the connection


@functools.lru_cache(maxsize=None)
def _servers() -> str:
    """The folder of their sockets, each named by its library. They end with this process."""
    folder = tempfile.TemporaryDirectory(prefix="p3-tests-")
    for library in filter(find_spec, LIBRARIES):
        server = subprocess.Popen(
            [sys.executable, str(FOLDER / "serve.py"), os.path.join(folder.name, library), *LIBRARIES[library]],
            env=_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert server.stdout.readline() == b"ready\n", "the fork server of %s has not started" % library
        _kept.append((folder, server))
    return folder.name


_kept: list = []
