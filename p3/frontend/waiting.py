"""How a script waits for its job: it can be interrupted meanwhile, and a failure of the job ends the wait."""

from __future__ import annotations

import math
import time
from typing import Any, Optional, Tuple

import numpy as np

from p3._core import Completions, P3Error
from p3.worker.control import Patience
from p3.worker.key import Key
from p3.worker.session import Session

_LOOK_UP_S = 0.5  # so often a script that waits can be interrupted


def wait(session: Session, operation: Any, timeout_s: float = math.inf) -> bool:
    """Until the operation is done; False if nothing has moved for that time. P3Error if the job fails meanwhile."""
    patience = Patience(session, timeout_s)
    while True:
        failure = None
        try:
            operation.wait(_LOOK_UP_S)
            return True
        except TimeoutError:
            pass
        except P3Error as error:
            failure = error
        session.check()  # which also notes that the script knows; outside, or errors would be chained
        if failure is not None:
            raise failure
        deadline = patience.deadline
        if patience.left_s() <= 0:
            return False
        if patience.deadline > deadline and session.entrance.is_on_trial:
            session.tell_progress()  # the others wait for this one


def on_training_thread(session: Session, key: Key, operation: Any, what: str) -> None:
    """Until the key's operation is done; the trace, and who watches, see how long that was. P3Error as wait();
    TimeoutError after P3_WAIT_TIMEOUT_S, which says `what` was waited for."""
    if operation.done:
        session.check()
        return
    began = time.monotonic_ns()
    or_time_out(session, operation, what)
    session.mark_stall(key, began, time.monotonic_ns())


def or_time_out(session: Session, operation: Any, what: str) -> None:
    """The same, where nobody wants to see it."""
    session.flush()
    if not wait(session, operation, session.wait_timeout_s):
        raise TimeoutError(
            "%s: waited %g s for %s; another worker is slow or stuck (P3_WAIT_TIMEOUT_S)"
            % (session.label, session.wait_timeout_s, what)
        )


def next_of(session: Session, completions: Completions, timeout_s: float = math.inf) -> Optional[Tuple[int, bool]]:
    """The next operation that completes: its token, and whether it has updated its key. None and P3Error as wait()."""
    patience = Patience(session, timeout_s)
    while True:
        completed = completions.next(_LOOK_UP_S)
        session.check()  # what a failure has ended is not completed
        if completed is not None:
            return completed
        if patience.left_s() <= 0:
            return None


def from_rank_0(session: Session, key: Key, value: np.ndarray) -> np.ndarray:
    """Rank 0's `value`, on every worker at the same point: the key's first value, or another one. Waits for it."""
    landing = np.empty_like(value)
    session.wait([session.init(key, value if session.is_first else None, landing)])
    return landing
