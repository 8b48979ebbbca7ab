"""What a worker gets of a snapshot whose job had another number of workers. Pure; snapshots.py reads the files.

What all workers have in common does not depend on their number: weights, the optimizer, the step. Of what was a
worker's own, a rank that the job had, and has, goes on with its own part. One that is new begins with worker 0's, as
that has whatever the workers have in common: a learning rate schedule, the place in the data, statistics to evaluate
with. What compression has left out is still owed to the weights, and no value is lost: new ranks have none, and ranks
that are gone leave theirs to the others. Whoever encodes for all workers of its machine takes what they would.
"""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Optional


def part_rank(rank: int, before: int) -> int:
    """Whose part a worker gets; `before`: how many workers the snapshot's job had."""
    return rank if rank < before else 0


def takes_over_from(rank: int, before: int, now: int) -> range:
    """Whose residuals a worker adds up, in this order, for each rank whose gradients it encodes: that rank's, and those
    of ranks that are gone, dealt out."""
    return range(rank, before, now)


def what_changes(before: int, now: int) -> str:
    """For the log."""
    if now < before:
        return (
            "ranks from %d on are gone: what compression had left out there goes to the others, and their states and "
            "running statistics are dropped" % now
        )
    return (
        "ranks from %d on are new: they begin with worker 0's state and running statistics, and compression has left "
        "out nothing there" % before
    )


class _RoundAndState(NamedTuple):
    round: int
    state: Any


class Resumed(_RoundAndState):
    """What resume() returns: (round of the snapshot, what this worker gave with it); the round is 0 if there is none.

    workers     how many workers the snapshot's job had, 0 if there is none
    from_rank   whose state it is: this worker's rank, or 0 if that job had no such rank
    """

    workers: int = 0
    from_rank: int = 0
    _states: Optional[Callable[[int], Any]] = None

    def __new__(
        cls, round: int, state: Any, workers: int = 0, from_rank: int = 0, states: Optional[Callable] = None
    ) -> Resumed:
        """`states` gives the state of any rank of that job; it may read files."""
        made = super().__new__(cls, round, state)
        made.workers, made.from_rank, made._states = workers, from_rank, states
        return made

    def state_of(self, rank: int) -> Any:
        """What the worker of that rank gave, for a script that merges the states of ranks that are gone.

        Reads the snapshot, which is there until the job has taken others: call it before the first step. ValueError if
        that job had no such rank, or its part is damaged.
        """
        if not 0 <= rank < self.workers:
            raise ValueError("the snapshot is of a job with %d workers: it has no rank %r" % (self.workers, rank))
        return self._states(rank)

    def map(self, change: Callable[[Any], Any]) -> Resumed:
        """The same with every state changed so."""
        of_rank = self._states
        states = None if of_rank is None else lambda rank: change(of_rank(rank))
        return Resumed(self.round, change(self.state), self.workers, self.from_rank, states)
