"""How many workers take each step: what a worker that has no batches left follows the others by.

A small key that has a round in each step, whose sum is how many workers took it; so a worker in join() learns that
nobody does any more.
"""

from __future__ import annotations

from typing import Any, Callable, Iterable, List

import numpy as np

from p3.frontend import waiting
from p3.frontend.rounds import KeyRounds
from p3.worker.session import Session

LAST = -(1 << 19)  # behind every gradient


class Steps:
    """Threads: the script's."""

    def __init__(self, session: Session, store: int) -> None:
        """On every worker at the same point; waits for them. `store`: not that of the gradients."""
        self._session = session
        self._key = session.declare("steps", (1,), "float32", store)
        self._one, self._sum = np.ones(1, np.float32), np.zeros(1, np.float32)
        waiting.from_rank_0(session, self._key, self._sum)
        self._counting: List[Any] = []  # rounds under way

    def count(self, lr: float, wd: float) -> None:
        """This worker has ended a step. The servers compare its learning rate and weight decay, whoever updates: else
        workers whose schedules look at a loss of their own would drift apart."""
        operation = self._session.pushpull(self._key, self._one, self._sum, LAST, lr, wd)
        self._counting = [*(one for one in self._counting if not one.done), operation]

    def finish(self) -> None:
        """Until all steps have been counted."""
        self._session.wait(self._counting)
        self._counting = []

    def serve_others(self, rounds: Iterable[KeyRounds], follow: Callable[[], None]) -> None:
        """join(): takes part in the others' steps without a gradient, until every worker is here. All of the `rounds`
        have one in each step; `follow` takes their results over."""
        rounds = list(rounds)
        while True:
            for one in rounds:
                one.skip()
                one.end_step()
            if not self._does_anyone_step():
                break
            follow()
        for one in rounds:
            one.take_last()
        for one in rounds:
            one.land()

    def _does_anyone_step(self) -> bool:
        operation = self._session.skip(self._key, self._sum, LAST)
        waiting.wait(self._session, operation)  # the others may take their time; a failure ends the wait
        return operation.updated
