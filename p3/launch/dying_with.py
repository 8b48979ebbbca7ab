"""Runs a command in place of this process, that dies with the one that started it: python dying_with.py PID COMMAND...

PID is of who starts it. It is what stands between `p3 run` and each worker of this host, and imports next to nothing:
every worker waits for it.
"""

import sys

if __name__ == "__main__":
    del sys.path[0]  # this folder, whose modules are none of Python's

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
IS_ALONE = "the process that started it has already ended"


def die_with(parent: int) -> bool:
    """SIGKILL for this process when its parent dies, however that dies. It survives the exec of a command. False: the
    parent is another one, so that has died already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    return os.getppid() == parent


def cannot_run(command: str, error: OSError) -> str:
    """In words for who has written it."""
    said = "cannot run %r: %s" % (command, error.strerror)
    if os.sep in command or not os.path.isfile(command):
        return said
    here = "python " if command.endswith(".py") else "./"
    return said + " (commands are looked for in PATH). It is a file here: write `%s%s`" % (here, command)


def main(parent: str, *command: str) -> str:
    """What went wrong; else it does not return."""
    if not die_with(int(parent)):
        return "p3: worker: " + IS_ALONE
    try:
        os.execvp(command[0], command)
    except OSError as error:
        return "p3: worker: " + cannot_run(command[0], error)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
