"""Scripts of tests as processes that have imported MXNet or torch already: fork_server/."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from typing import List

from processes import HELPERS, QUICK_IMPORT, ROOT, clean_environment

OPTIONS = "-ISu"
FOLDER = HELPERS / "fork_server"
# What a test's script is likely to import, by what it names first.
LIBRARIES = {
    "torch": ("torch", "torch._dynamo", "torch.testing", "torch.distributed.tensor"),
    "mxnet": ("mxnet", "mxnet.gluon"),
}


def command(script: str, *arguments: str) -> List[str]:
    """Of a process that runs the script of P3's tests; as `python script arguments`, but for the imports' time."""
    with open(script) as file:
        text = file.read()
    needed = [name for name in LIBRARIES if re.search(r"^\s*(import|from) (p3\.)?%s\b" % name, text, re.MULTILINE)]
    plain = [sys.executable, script, *arguments]
    if len(needed) != 1 or find_spec(needed[0]) is None or not hasattr(os, "pidfd_open"):
        return plain
    return [sys.executable, OPTIONS, str(FOLDER / "ask.py"), _server(needed[0]), *plain]


def started(command: List[str]) -> List[str]:
    """The script and its arguments, for a launcher that starts Python itself."""
    return command[5:] if command[1] == OPTIONS else command[1:]


def environment() -> dict:
    """Of the servers, and of what they fork. One OpenMP thread, as `p3 run` sets it: the machines that test have few
    cores."""
    paths = os.pathsep.join([QUICK_IMPORT, str(HELPERS), str(ROOT)])
    return clean_environment(OMP_NUM_THREADS="1", PYTHONPATH=paths)


@functools.lru_cache(maxsize=None)
def _server(library: str) -> str:
    """The path of its socket. It ends with this process."""
    folder = tempfile.TemporaryDirectory(prefix="p3-tests-")
    path = os.path.join(folder.name, "socket")
    server = subprocess.Popen(
        [sys.executable, str(FOLDER / "serve.py"), path, *LIBRARIES[library]],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert server.stdout.readline() == b"ready\n", "the fork server of %s has not started" % library
    _kept.append((folder, server))
    return path


_kept: list = []
