"""The keys of a session: those that this worker has declared, and those that the job has agreed on.

A declaration is announced to the scheduler, which compares it with the others' and tells all what is agreed (`agreed`),
and later what replaces it (`repartitioned`).
"""

from __future__ import annotations

from typing import Callable, Dict, List, Optional

from p3.worker.declarations import Declarations
from p3.worker.key import NORM, Agreed, Identity, Key, Name, require_same
from p3.worker.links.link import Link
from p3.worker.repartition import Repartition
from p3.worker.store_options import StoreOptions


class Keys:
    """Of one session, whose lock guards it."""

    def __init__(self, session, link: Link, options: StoreOptions, repartition: Repartition) -> None:
        self._session, self._link = session, link
        self._options, self._repartition = options, repartition
        self._declarations = Declarations(session, link, options)
        self._declared: Dict[Identity, Key] = {}
        self.agreed: Dict[Identity, Agreed] = {}  # also of keys not yet declared here
        session.handle("agreed", self._on_agreed)
        session.handle("repartitioned", self._on_repartitioned)

    def __bool__(self) -> bool:
        """Whether any was declared."""
        return bool(self._declared)

    def of(self, store: int) -> List[Key]:
        with self._session.changed:
            return [key for key in self._declared.values() if key.store == store]

    def all(self) -> List[Key]:
        with self._session.changed:
            return list(self._declared.values())

    def require_all(self) -> None:
        """In a process that has entered a running job: ValueError if this worker lacks a key, or the optimizer, that
        the job has for a store which it uses."""
        with self._session.changed:
            declared, agreed = set(self._declared), set(self.agreed)
        stores = {store for store, _ in declared}
        for store, name in sorted(agreed - declared, key=repr):
            if store in stores:
                self._refuse_as_other("does not declare key %r of store %d" % (name, store))
        for store in sorted(stores):
            optimizers = [get(store, "optimizer") for get in (self._options.agreed, self._options.wanted)]
            if optimizers[0] != optimizers[1]:
                self._refuse_as_other("sets another optimizer for store %d: %s; the job has %s"
                                      % (store, optimizers[1], optimizers[0]))  # fmt: skip

    def _refuse_as_other(self, what: str) -> None:
        raise ValueError("%s: this process has joined a running job, and its script %s" % (self._session.label, what))

    def have_norm(self, store: int) -> bool:
        """Whether one of the store's tells the norm of the others."""
        return (store, NORM) in self._declared

    def declare(self, declared: Key) -> Key:
        """`declared`: as key.checked() has made it. ValueError if its store or the job's settings exclude it."""
        store = declared.store
        with self._session.changed:
            key = self._declared.get(declared.identity)
            if key is not None:
                require_same(self._session.label, key, declared)
                return key
            self._declarations.require_together(declared)
            axes, rank = self._declarations.axes_of(declared), self._declarations.rank_of(declared)
            key = declared._replace(axes=axes, rank=rank)
            if rank:
                self._session.low_rank.require_names(key, self._declared)
            key = key._replace(handle=self._declarations.declare_to_core(key))
            self._declarations.say_if_lossy(key)
            self._declared[key.identity] = key
            agreed = self.agreed.get(key.identity)
            defaults = [] if key.is_norm else self._options.defaults(store)  # none of them applies to norms
        # Announced even if rank 0's plan is known already: the scheduler then compares, and names both workers.
        announced = {"store": store, "name": key.name, "shape": list(key.shape), "dtype": key.dtype}
        announced.update(sparse=key.sparse, staleness=key.staleness, gathered=key.factors is not None)
        announced.update(norm=key.is_norm, kind="announce", defaults=defaults, options=key.options)
        self._link.send(announced)
        if agreed is not None:
            self.apply(key, agreed)
        return key

    def give_optimizer(self, store: int) -> None:
        """To the keys of which this worker applies it, or its momentum, when it is known."""
        for key in self.of(store):
            self._declarations.give_optimizer(key)

    def have_replicas(self, store: int) -> bool:
        """Whether each worker keeps what servers would that update the store's keys (docs/replicated-servers.md)."""
        return self._declarations.are_replicated(store)

    def require_to_push(self, key: Key) -> None:
        """ValueError if it is gone with its store, or does not go together with the optimizer that this has by now, or
        with none."""
        known = self._declared.get(key.identity)
        if known is None or known.handle != key.handle:
            raise ValueError(
                "%s: key %r is gone: its store %d was released" % (self._session.label, key.name, key.store)
            )
        self._declarations.require_to_push(key)

    def describe(self, key: Key, id: Name) -> dict:
        """A captured key as a snapshot describes it (p3.snapshots.reading.Snapshot); `id`: what the script calls it."""
        return {
            "store": key.store,
            "id": id,
            "shape": list(key.shape),
            "dtype": key.dtype,
            "optimizer": self._options.agreed(key.store, "optimizer"),
            "plan": self._session.core.captured_plan(key.handle).kept(),
        }

    # What the job has agreed on

    def wait_for(self, key: Key) -> Agreed:
        """Until it is agreed."""
        self._session.wait_until(lambda: key.identity in self.agreed, "for key %r to be agreed" % (key.name,))
        return self.agreed[key.identity]

    def are_settled(self, store: int) -> bool:
        """All keys of the store are agreed, and no rows move."""
        keys, core = self.of(store), self._session.core
        known = [self.agreed.get(key.identity) for key in keys]
        rows_rest = all(core.is_idle(key.handle) for key in keys if key.sparse)  # they move behind a round
        are_agreed = all(one is not None and one.is_applied for one in known)
        return rows_rest and are_agreed and self._repartition.is_over(store)

    def forget(self, store: int) -> None:
        """With the lock held."""
        self._declarations.forget(store)
        for key in self.of(store):
            self._session.core.release(key.handle)
            del self._declared[key.identity]
        for identity in [one for one in self.agreed if one[0] == store]:
            del self.agreed[identity]

    # Messages, with the lock held; what is returned is done without it

    def _on_agreed(self, message: dict) -> Optional[Callable[[], None]]:
        identity = message["store"], message["name"]
        agreed = self.agreed[identity] = Agreed(message)
        key = self._declared.get(identity)
        return None if key is None else lambda: self.apply(key, agreed)

    def _on_repartitioned(self, message: dict) -> Optional[Callable[[], None]]:
        agreed = self.agreed[message["store"], message["name"]]
        if agreed.is_applied:
            return lambda: self._move(message)
        agreed.successor = message  # this worker has not declared the key yet
        return None

    def apply(self, key: Key, agreed: Agreed) -> None:
        """Gives the core the job's plan, once; never a plan that contradicts what was declared here."""
        with self._session.changed:
            if agreed.is_applied or not agreed.fits(key):
                return
            agreed.is_applied = True
            plan = agreed.plan  # a move changes it
            self._repartition.agreed(key, plan)
        self._session.core.agree(key.handle, plan, agreed.catches_up)
        self._link.note_key(key, plan)
        if agreed.successor is not None:
            self._move(agreed.successor)

    def _move(self, message: dict) -> None:
        identity = message["store"], message["name"]
        with self._session.changed:
            key, agreed = self._declared[identity], self.agreed[identity]
        optimizer = self._options.agreed(key.store, "optimizer")
        self._repartition.move(key, agreed, agreed.plan.successor(message), optimizer)
