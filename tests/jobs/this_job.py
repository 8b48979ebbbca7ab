"""The other processes of the job that a script is a worker of."""

import contextlib
import os
import signal
from pathlib import Path


def server():
    ours = b"DMLC_PS_ROOT_PORT=" + os.environ["DMLC_PS_ROOT_PORT"].encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if ours in variables and b"DMLC_ROLE=server" in variables:
            return int(folder.name)
    raise LookupError("no server of this job was found")


@contextlib.contextmanager
def frozen_server():
    """The only server stands still within it."""
    process = server()
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process, signal.SIGCONT)
