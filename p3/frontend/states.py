"""An optimizer's state on the servers, of many keys at once: arrays by their part. The front end knows their names."""

from __future__ import annotations

from typing import Any, Iterable, Iterator, Tuple

from p3.worker.key import Key
from p3.worker.session import Session

Part = Tuple[Key, int, Any]  # a key, which part of its state, and an array of it


def fetch(session: Session, parts: Iterable[Part]) -> None:
    """Fills the arrays, as after this worker's last rounds of the keys. Waits for it; any worker may call it alone."""
    session.wait([session.fetch(key, array, part) for key, part, array in parts])


def has_a_say(session: Session, key: Key) -> bool:
    """Whether what this worker gives becomes the key's state: rank 0's does, and where each worker updates its own."""
    return session.is_first or session.updates_here(key)


def give(session: Session, parts: Iterable[Tuple[Key, int, Any, int]]) -> None:
    """Makes these arrays the keys' states before their next round, where this worker has_a_say(). Waits for it.

    The last number is how many updates are in it, which counts for keys with staleness: there the servers count.
    """
    operations = []
    for key, part, array, updates in parts:
        operations.append(session.store(key, array, part, updates=updates if key.staleness > 0 else 0))
    session.wait(operations)


def between_barriers(session: Session, of: str) -> Iterator[None]:
    """`for _ in between_barriers(...)`: give(), on every worker. What any saves before its call is what was there, and
    after it the new. Again if a worker has departed meanwhile: who gives may not have come to its end, and another one
    does so then. `of`: the script's call."""
    before, members = None, session.barrier(of)
    while members != before:
        yield
        before, members = members, session.barrier(of)
