"""The processes of the job that a script is a worker of."""

import contextlib
import os
import signal
import time
from pathlib import Path

from turns import Turns


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


def _all_threads_stopped(process):
    states = [(folder / "stat").read_text() for folder in Path("/proc/%d/task" % process).iterdir()]
    return all(state.rpartition(")")[2].split()[0] == "T" for state in states)


@contextlib.contextmanager
def frozen_server():
    """The only server stands still within it."""
    process = server()
    os.kill(process, signal.SIGSTOP)
    deadline = time.monotonic() + 20
    while not _all_threads_stopped(process):  # each goes on until the kernel has told it
        assert time.monotonic() < deadline, "the server runs on"
        time.sleep(0.001)
    try:
        yield
    finally:
        os.kill(process, signal.SIGCONT)


def die_once(session, folder):
    """SIGKILL for this process, behind the snapshot under way; but not again, as `folder` then tells."""
    marker = Path(folder, "died")
    if not marker.exists():
        marker.touch()
        session.snapshots.finish()
        os.kill(os.getpid(), signal.SIGKILL)


def die_giving(session, folder, last=2):
    """Worker 0 dies when it is to give the servers a state, and the others have come to the `last` barrier from here
    on, as in the load of one."""
    turns, barrier, entered = Turns(folder), session.barrier, []

    def dies(*_arguments, **_keywords):
        for rank in range(1, session.num_workers):
            turns.wait("worker %d waits for all" % rank)
        os.kill(os.getpid(), signal.SIGKILL)

    def told(*arguments):
        entered.append(arguments)
        if len(entered) == last:
            turns.come("worker %d waits for all" % session.rank)
        return barrier(*arguments)

    if session.rank == 0:
        session.store = dies
    else:
        session.barrier = told
