"""The sessions that are open in this process: the one that its stores share, and what becomes of all when it ends.

At exit each is closed. A script that dies of an exception is the job's failure, not a goodbye: the other nodes get its
last line. A forked child is no part of the job, which goes on in the parent alone.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import Any, Callable, List, Optional

_current: Optional[Any] = None  # of class Session, as all here
_open: List[Any] = []  # also those that are not current
_hooks_are_set = False
_lock = threading.Lock()


def current(open_session: Callable[[], Any]) -> Any:
    """The process's session, opened by the first call."""
    global _current
    with _lock:
        if _current is None:
            _current = open_session()
        return _current


def opened() -> Optional[Any]:
    """The process's session, or another one that is open, or None; opens none."""
    return next((session for session in (_current, *_open) if session is not None), None)


def add(session: Any) -> None:
    global _hooks_are_set
    if not _hooks_are_set:
        _hooks_are_set = True
        atexit.register(_close_all)
        os.register_at_fork(after_in_child=_abandon_all)
        _report_uncaught_exceptions()
    _open.append(session)


def remove(session: Any) -> None:
    global _current
    if session in _open:
        _open.remove(session)
    if _current is session:
        _current = None


def describe(exception_type, exception) -> str:
    """What the other nodes are told of the exception of which a script has died."""
    lines = str(exception).strip().splitlines()
    return "the script ended with %s%s" % (exception_type.__name__, ": " + lines[0] if lines else "")


def _close_all() -> None:
    for session in list(_open):
        session.close()


def _abandon_all() -> None:
    global _lock
    _lock = threading.Lock()
    for session in _open:
        session.abandon_after_fork()
    _open.clear()  # and _current stays: a store made before the fork must say why it is dead


def _report_uncaught_exceptions() -> None:
    previous = sys.excepthook

    def report(exception_type, exception, traceback):
        previous(exception_type, exception, traceback)
        if not hasattr(sys, "ps1") and not sys.flags.interactive:  # at a prompt, the process lives on
            for session in list(_open):
                session.fail(describe(exception_type, exception))

    sys.excepthook = report
