"""join() where each key has rounds of its own: a worker that has taken its last step serves the others' until all have.

It takes part in each round of each key with a skip: a push without a gradient. The new value lands as in any other
round, and the key is skipped again. Once all workers skip a round of a key, it completes without a new value: no worker
will push that key any more. So nobody counts steps, and the servers know of no joined workers, only of skips.

Keys may count as a step together: when the rounds of all have landed, they are followed in their order. For a small
key's result may land before that of a large one, and the next step's before this one's.

Where the servers tell norms (norms.py), the keys of a store are skipped together, with the round of its norm: for there
who steps has a round of each key in each step, which may be a skip as well. So it is the norm's round that tells the
end: all may skip all keys in a step, as when all layers are frozen, and there is another one behind it.

All workers must serve the same keys, or they would wait for each other: those of every store that this process has
made. Which of them a script still holds, and when Python takes the others away, is each worker's own affair.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterable

from p3._core import Completions
from p3.frontend import waiting
from p3.worker.session import Session


class Served:
    """The keys of one store. A front end says what becomes of their results, by default nothing."""

    def __init__(self, keys: Iterable[Any], step: Iterable[Any] = (), norm: Any = None) -> None:
        """`step`: those of the keys that are followed together. `norm`: whose round completes that of all keys, or
        None. Keys and norm have `skip(completions, token)`, which begins a round."""
        self.norm = norm
        self.rounds = [*keys, norm] if norm is not None else list(keys)
        self.step = set(self.rounds if norm is not None else step)

    def landed(self, key: Any) -> None:
        """Another worker has pushed the key."""

    def follow(self, key: Any) -> None:
        """Takes its result over; behind landed(), and of a step when all of it has."""

    def end_step(self, is_changed: bool) -> None:
        """Behind those of a step. `is_changed`: another worker has pushed any key in it."""

    def take_last(self, key: Any) -> None:
        """No worker pushes the key any more; `landed` was what all end with."""


def serve_others(session: Session, stores: Iterable[Served], settle: Callable[[], None]) -> None:
    """Returns when every worker is here. `stores`: all that were made, in their order. `settle()` comes before each
    skip."""
    session.joins.begin()
    rounds = [(store, one) for store in stores for one in store.rounds]
    of_steps: Dict[Served, Dict[int, bool]] = {store: {} for store, _ in rounds}  # landed, and whether updated
    completions = Completions()

    def skip(numbers: Iterable[int]) -> None:
        settle()
        for number in numbers:
            store, one = rounds[number]
            one.skip(completions, number)

    skip(range(len(rounds)))
    left = len(rounds)
    while left:
        number, updated = waiting.next_of(session, completions)
        store, one = rounds[number]
        if updated and one is not store.norm:
            store.landed(one)
        if not updated and store.norm is None:
            left -= 1
            store.take_last(one)
            continue
        if one not in store.step:
            store.follow(one)
            skip([number])
            continue
        of_step = of_steps[store]
        of_step[number] = updated
        if len(of_step) < len(store.step):
            continue
        of_steps[store], numbers = {}, sorted(of_step)
        pushed = [rounds[each][1] for each in numbers if of_step[each] and rounds[each][1] is not store.norm]
        for key in pushed:
            store.follow(key)
        store.end_step(bool(pushed))
        if store.norm is None or of_step[numbers[-1]]:  # the norm's
            skip(numbers)
        else:
            left -= len(numbers)
    session.joins.end()
