"""How the scripts of jobs whose servers are struck wait for those that come back."""

from __future__ import annotations

import time
from typing import Any, Callable

import numpy as np

from p3.worker.key import Key
from p3.worker.session import Session

_ROUND_S = 60.0


def key_of_marks(session: Session) -> Key:
    """By which all workers agree whether there is to be another mark; on every worker, before anybody is struck."""
    key = session.declare("marks", (1,), "int64", session.new_store())
    session.init(key, np.zeros(1, np.int64) if session.is_first else None, np.zeros(1, np.int64)).wait(_ROUND_S)
    return key


def until_all_are_back(
    session: Session, key: Key, mark: Callable[[], Any], lacks_one: Callable[[], bool], wait_s: float
) -> None:
    """Between two rounds: marks, one after the other, as long as a worker lacks a server. TimeoutError behind
    `wait_s`."""
    lacking, deadline = np.ones(1, np.int64), time.monotonic() + wait_s
    while lacking[0]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"a server was not back within {wait_s:g} s")
        mark()
        session.pushpull(key, np.full(1, lacks_one(), np.int64), lacking).wait(_ROUND_S)
