"""What weigh() is given, and what workers tell each other of it with a step's count (p3/frontend/steps.py)."""

from __future__ import annotations

import math
import numbers
from typing import Any, Optional, Tuple

from p3.frontend.steps import Count
from p3.worker.session import Session


def checked(samples: Any) -> float:
    """A number, or a tensor or array of one. ValueError if it is none, or negative."""
    number = samples
    if hasattr(samples, "item"):
        try:
            number = samples.item()
        except (RuntimeError, TypeError, ValueError):  # of more elements
            pass
    is_number = isinstance(number, numbers.Real) and not isinstance(number, bool)
    if not is_number or not math.isfinite(number) or number < 0:
        raise ValueError("weigh(%r): it takes how many samples or tokens this worker has, a number from 0 on"
                         % (samples,))  # fmt: skip
    return float(number)


def told(samples: Optional[float]) -> Tuple[float, float]:
    """What a worker tells of it, to be added up: the samples, and whether there is such a number."""
    return (0.0, 0.0) if samples is None else (samples, 1.0)


def require_told_by_all(session: Session, count: Count, of: str, when: str) -> None:
    """ValueError if some of the workers that are counted have called weigh(), and others have not. `of`: what they
    take part in; `when`: to call it."""
    _, weighing, *_ = count.told
    if weighing not in (0, count.workers):
        raise ValueError("%s: weigh() was called by %d of the %d workers that take %s: call it on every worker %s"
                         % (session.label, weighing, count.workers, of, when))  # fmt: skip


def share(session: Session, own: float, total: float, workers: int) -> float:
    """By which a worker's part is multiplied in a mean over so many workers, all of which together have `total`: 1 if
    they have the same number. 0: nothing of it counts. ValueError if there is no such number."""
    if own == 0:
        return 0.0
    factor = own * workers / total
    if not math.isfinite(factor):
        raise ValueError("%s: weigh(%r): all workers together have %r, which is too large"
                         % (session.label, own, total))  # fmt: skip
    return factor
