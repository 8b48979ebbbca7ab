"""How many workers take each step: what a worker that has no batches left follows the others by.

A small key that has a round in each step, whose sum is how many workers took it; so a worker in join() learns that
nobody does any more. A front end may have each worker tell the others some numbers with it, of which all learn the sum.
"""

from __future__ import annotations

from typing import Any, Callable, Iterable, List, Sequence

import numpy as np

from p3.frontend import waiting
from p3.frontend.rounds import KeyRounds
from p3.worker.session import Session

LAST = -(1 << 19)  # behind every gradient
FIRST = 1 << 19  # before every one


class Count:
    """One step's. Until it is there, nobody knows how many others take the step, nor what they tell."""

    def __init__(self, operation: Any, sums: np.ndarray) -> None:
        self.operation, self._sums = operation, sums

    @property
    def workers(self) -> int:
        """That take the step. Those in join() do not."""
        return int(self._sums[0])

    @property
    def told(self) -> List[float]:
        """The sums of what they have told with it."""
        return self._sums[1:].tolist()


class Steps:
    """Threads: the script's."""

    def __init__(self, session: Session, store: int, tells: int = 0, name: str = "steps") -> None:
        """On every worker at the same point; waits for them. `store`: not that of the gradients. `tells`: how many
        numbers each worker tells with a step."""
        self._session, self._tells = session, tells
        self._key = session.declare(name, (1 + tells,), "float64", store)
        waiting.from_rank_0(session, self._key, np.zeros(1 + tells))
        self._counting: List[Count] = []  # under way

    def count(
        self, lr: float, wd: float, tells: Sequence[float] = (), priority: int = LAST, rescale: float = 1.0
    ) -> Count:
        """This worker takes a step: once in each. The servers compare its learning rate, weight decay and `rescale`,
        whoever updates: else workers whose schedules look at a loss of their own would drift apart."""
        own = np.array([1.0, *tells])
        sums = np.empty_like(own)
        return self._begun(Count(self._session.pushpull(self._key, own, sums, priority, lr, wd, rescale), sums))

    def _begun(self, count: Count) -> Count:
        self._counting = [*(one for one in self._counting if not one.operation.done), count]
        return count

    def skip(self) -> Count:
        """This worker takes no step, which others may; in join()."""
        sums = np.zeros(1 + self._tells)
        return self._begun(Count(self._session.skip(self._key, sums, LAST), sums))

    def wait(self, count: Count) -> None:
        """Until all workers have counted that step. TimeoutError after P3_WAIT_TIMEOUT_S."""
        waiting.on_training_thread(self._session, self._key, count.operation, "what all workers tell of their step")

    def finish(self) -> None:
        """Until all steps have been counted."""
        self._session.wait([one.operation for one in self._counting])
        self._counting = []

    def serve_others(
        self, rounds: Iterable[KeyRounds], follow: Callable[[Count], None], skip_more: Callable[[], None] = lambda: None
    ) -> None:
        """join(): takes part in the others' steps without a gradient, until every worker is here. All of the `rounds`
        have one in each step; `skip_more` begins what else has; `follow` takes their results over."""
        rounds = list(rounds)
        self._session.joins.begin()  # no snapshot has a part of this worker until all are here
        while True:
            for one in rounds:
                one.skip()
                one.end_step()
            skip_more()
            count = self.skip()
            waiting.wait(self._session, count.operation)  # others may take their time; a failure ends the wait
            if not count.operation.updated:
                break
            follow(count)
        self._session.joins.end()
        for one in rounds:
            one.take_last()
        for one in rounds:
            one.land()
