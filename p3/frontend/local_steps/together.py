"""What workers that train by themselves do together: each hears a number of all others, and none fails alone.

Else who has failed would go on, or end, and the others would wait for it in their next exchange, until a time-out.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import numpy as np

from p3._core import P3Error
from p3.frontend import waiting
from p3.plan.strategy import Strategy
from p3.worker.session import Session


class Together:
    """Over a store of small keys. Each of these is called on every worker at the same point, and waits for all of them;
    TimeoutError after P3_WAIT_TIMEOUT_S. Threads: the script's."""

    def __init__(self, session: Session, strategy: Optional[Strategy]) -> None:
        self._session, self.store = session, session.new_store(strategy)
        self._numbers = session.declare("numbers", (2, session.num_workers), "int64", self.store)  # and who gives one
        waiting.from_rank_0(session, self._numbers, np.zeros((2, session.num_workers), np.int64))

    def numbers(self, own: int, what: str) -> Dict[int, int]:
        """Of all workers that have not departed, by rank. `what` is waited for, in words."""
        self._session.send_kept()
        sent = np.zeros((2, self._session.num_workers), np.int64)
        sent[:, self._session.rank] = own, 1
        total = np.empty_like(sent)
        self._session.wait([self._session.pushpull(self._numbers, sent, total)], what)
        return {rank: number for rank, (number, gives) in enumerate(total.T.tolist()) if gives}

    def another(self, own: int, what: str) -> Optional[Tuple[int, int]]:
        """The first worker that has another number, and that; None: all have the same. So all hear of a difference."""
        numbers = self.numbers(own, what)
        return next(((rank, number) for rank, number in numbers.items() if number != own), None)

    @contextlib.contextmanager
    def failing(self, of: str, undo: Callable[[], Any] = lambda: None) -> Iterator[None]:
        """Around what each worker does by itself in a call of the script, `of`: if it fails on one, it fails on all,
        with ValueError where it would not have. `undo` is called before, on all as well."""
        try:
            yield
        except (P3Error, TimeoutError):  # the others learn of these themselves
            raise
        except Exception:
            self._failed(of, True)
            undo()
            raise
        failed = self._failed(of, False)
        if failed:
            undo()
            raise ValueError("%s: %s has failed on worker %s, as the error there says, and so on all"
                             % (self._session.label, of, ", ".join(map(str, failed))))  # fmt: skip

    def _failed(self, of: str, here: bool) -> List[int]:
        numbers = self.numbers(int(here), "for other workers in %s" % of)
        return [rank for rank, number in numbers.items() if number]
