"""What `p3` does as the first process of a container, which the kernel treats unlike any other.

Signals pass such a process by unless it handles them: a server would ignore SIGTERM until it is killed 30 s later. And
orphans become its children, which nobody would wait for. So it starts the real `p3` as its child, passes signals on,
waits for whatever ends, and ends as that child does; whereupon the kernel ends what is left in the container.
"""

from __future__ import annotations

import os
import signal
import sys

_PASSED_ON = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2,
              signal.SIGCONT, signal.SIGWINCH}  # fmt: skip


def stand_aside() -> None:
    """Returns in the child. Call it before there are threads, where os.getpid() == 1."""
    waited_for = _PASSED_ON | {signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited_for)  # a blocked signal is kept, also for this process
    child = os.fork()
    if child:
        _watch(child, waited_for)
    _take_terminal()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _watch(child: int, waited_for: set) -> None:
    while True:
        number = signal.sigwait(waited_for)
        if number == signal.SIGCHLD:
            _reap(child)
        else:
            os.kill(child, number)  # it has not been waited for, so the number is still its own


def _reap(child: int) -> None:
    """Waits for all that have ended; does not return if the child has."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        if pid == child:
            os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))


def _take_terminal() -> None:
    """A group of its own, in front if there is a terminal: Ctrl-C must reach the child once, not from both."""
    os.setpgid(0, 0)
    if sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty():
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
        os.tcsetpgrp(sys.stdin.fileno(), os.getpid())
