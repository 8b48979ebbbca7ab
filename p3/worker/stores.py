"""The stores of a session: their numbers, and how the workers of a job have done with one together.

Each worker says that it has done with a store (`release`), and all hear of that (`releasing`). When the last one has,
nothing of the store is under way any more; then the servers drop it, with its keys and options, and all workers are
told that it is gone (`released`). Its number is free again.
"""

from __future__ import annotations

import heapq
from typing import Any, Callable, Dict, List, Sequence, Set

from p3.worker.key import Key, Name
from p3.worker.keys import Keys
from p3.worker.links.link import Link


OF_A_MOMENT = "what all get at this moment"  # a store that is made and released by one call


class Stores:
    """Of one session, whose lock guards it."""

    def __init__(self, session, link: Link, keys: Keys, forget: Sequence[Callable[[int], None]]) -> None:
        """Each of `forget` is called with the number of a store that is gone, and the lock held."""
        self._session, self._link, self._keys, self._forget = session, link, keys, forget
        # Of each store that was made, what the script calls a key -> the Key that stands for it; whoever makes the
        # store notes them. They stay when the script drops the store: see p3/frontend/serving.py.
        self.keys_by_name: List[Dict[Name, Key]] = []
        self.norms: Dict[int, Any] = {}  # by store: what tells the norm of its sums to the script; noted as those are
        self._free: List[int] = []  # numbers of stores that were released; a heap
        self._of: Dict[int, str] = {}  # what each is for, in the order of making
        # In a process that has entered a running job: those that the others have, and this one has not made yet; and
        # those that it has made on trial, which the others make now, too.
        self._others: List[List] = []
        self._fresh: Set[int] = set()
        self._asked: Set[int] = set()  # by this worker, and not gone
        self._workers: Dict[int, Set[int]] = {}  # by store: who has done with it
        session.handle("releasing", self._on_releasing)
        session.handle("released", self._on_released)

    def new(self, of: str) -> int:
        """See Session.new_store."""
        with self._session.changed:
            others = next((one for one in self._others if one[1] == of), None)
            if others is not None:
                self._others.remove(others)
                number = others[0]
            else:
                number = self._next(of)
            self._of[number] = of
            return number

    def _next(self, of: str) -> int:
        if self._session.entrance.is_on_trial:
            if of != OF_A_MOMENT:
                which = " of " + of if of else ""
                raise ValueError("%s: this process has joined a running job, whose workers have no other store%s: its "
                                 "script is another one" % (self._session.label, which))  # fmt: skip
            self._fresh.add(self._free[0] if self._free else len(self.keys_by_name))
        if self._free:
            return heapq.heappop(self._free)
        self.keys_by_name.append({})
        return len(self.keys_by_name) - 1

    def is_fresh(self, store: int) -> bool:
        """Whether it is one that all make at this moment, of which the job has no key yet."""
        return store in self._fresh

    def state(self) -> dict:
        """For a process that enters the job."""
        with self._session.changed:
            stores = [[number, of] for number, of in self._of.items()] + self._others
            return {"made": len(self.keys_by_name), "free": list(self._free), "stores": stores}

    def follow(self, state: dict) -> None:
        """In such a process, before it makes any: what state() has said on the first worker."""
        self.keys_by_name = [{} for _ in range(state["made"])]
        self._free, self._others = list(state["free"]), list(state["stores"])

    def release(self, store: int) -> None:
        """See Session.release."""
        session = self._session
        if store not in self._asked:  # a second call waits on
            if store in self._of and not self.is_fresh(store):
                session.entrance.require_no_push("the release of store %d" % store)
            if any(self._is_captured(key) for key in self._keys.of(store)):
                session.snapshots.finish()
            what = "for the keys of store %d to be agreed and their rows to rest, before it is released" % store
            session.wait_until(lambda: self._keys.are_settled(store), what)
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
        is_idle, low_rank = self._session.core.is_idle, self._session.low_rank
        busy = next((key for key in self._keys.of(store) if not is_idle(key.handle) or low_rank.is_busy(key)), None)
        if busy is not None:
            raise ValueError(
                "%s: store %d cannot be released: key %r has operations under way; wait for them first"
                % (self._session.label, store, busy.name)
            )

    def _what_is_missing(self, store: int) -> str:
        ranks = set(self._session.members) - self._workers.get(store, set())
        if not ranks:
            return "for the servers to drop store %d" % store
        labels = ", ".join(self._link.label_of(rank) for rank in sorted(ranks))
        return "for %s to release store %d as well: every worker must at the same point" % (labels, store)

    def _on_releasing(self, message: dict) -> None:
        self._workers.setdefault(message["store"], set()).add(message["worker"])

    def _on_released(self, message: dict) -> None:
        store = message["store"]
        for forget in self._forget:
            forget(store)
        self._asked.discard(store)
        self._fresh.discard(store)
        self._of.pop(store, None)
        self._others = [one for one in self._others if one[0] != store]
        self.norms.pop(store, None)
        del self._workers[store]
        if store < len(self.keys_by_name):  # its number is one of new()
            self.keys_by_name[store] = {}
            heapq.heappush(self._free, store)
