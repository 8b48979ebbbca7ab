"""How the workers of a job have done with a store together: its keys and options go, and its number is free again.

Each worker says that it has done with it (`release`), and all hear of that (`releasing`). When the last one has,
nothing of the store is under way any more; then the servers drop it, and all workers are told that it is gone
(`released`).
"""

from __future__ import annotations

from typing import Callable, Dict, Sequence, Set

from p3.worker.key import Key
from p3.worker.links.link import Link


class Releases:
    """Of one session, whose lock guards it."""

    def __init__(
        self, session, link: Link, keys: Callable[[int], Sequence[Key]], forget: Callable[[int], None]
    ) -> None:
        """`keys` of a store that are declared here. `forget(store)` is called when it is gone, with the lock held."""
        self._session, self._link = session, link
        self._keys, self._forget = keys, forget
        self._asked: Set[int] = set()  # by this worker, and not gone
        self._workers: Dict[int, Set[int]] = {}  # by store: who has done with it
        session.handle("releasing", self._on_releasing)
        session.handle("released", self._on_released)

    def release(self, store: int, is_settled: Callable[[], bool]) -> None:
        """See Session.release. `is_settled`: all keys are agreed, and no rows move."""
        session = self._session
        if self._link.replaces_workers:
            raise ValueError(
                "%s: store %d cannot be released where a lost worker is replaced (P3_ON_WORKER_LOSS=wait): its "
                "successor must find the keys that it had" % (session.label, store)
            )
        if store not in self._asked:  # a second call waits on
            if any(self._is_captured(key) for key in self._keys(store)):
                session.snapshots.finish()
            what = "for the keys of store %d to be agreed and their rows to rest, before it is released" % store
            session.wait_until(is_settled, what)
            self._require_idle(store)
            with session.changed:
                self._asked.add(store)
            self._link.send({"kind": "release", "store": store})
        session.wait_until(lambda: store not in self._asked, lambda: self._what_is_missing(store))

    def _is_captured(self, key: Key) -> bool:
        """Or is just being: a snapshot may have copies of it."""
        core = self._session.core
        return core.captured_plan(key.handle) is not None or not core.is_idle(key.handle)

    def _require_idle(self, store: int) -> None:
        busy = next((key for key in self._keys(store) if not self._session.core.is_idle(key.handle)), None)
        if busy is not None:
            raise ValueError(
                "%s: store %d cannot be released: key %r has operations under way; wait for them first"
                % (self._session.label, store, busy.name)
            )

    def _what_is_missing(self, store: int) -> str:
        ranks = set(range(self._session.num_workers)) - self._workers.get(store, set())
        if not ranks:
            return "for the servers to drop store %d" % store
        labels = ", ".join(self._link.label_of(rank) for rank in sorted(ranks))
        return "for %s to release store %d as well: every worker must at the same point" % (labels, store)

    def _on_releasing(self, message: dict) -> None:
        self._workers.setdefault(message["store"], set()).add(message["worker"])

    def _on_released(self, message: dict) -> None:
        store = message["store"]
        self._forget(store)
        self._asked.discard(store)
        del self._workers[store]
