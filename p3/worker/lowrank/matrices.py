"""The keys of a session whose gradients are of low rank: where their rounds begin, and what snapshots keep of them."""

from __future__ import annotations

from typing import Any, Container, Dict, Optional, Sequence

import numpy as np

from p3.worker.key import Identity, Key
from p3.worker.lowrank.matrix import Matrix, thin_names
from p3.worker.lowrank.work import Round, Work


class Matrices:
    """Those of one session, whose lock guards which there are. Threads: as the session's own."""

    def __init__(self, session) -> None:
        self._session = session
        self._matrices: Dict[int, Matrix] = {}  # by the handles of their keys
        self._owners: Dict[Identity, Key] = {}  # by the thin matrices that have rounds in their place
        self._work: Optional[Work] = None  # with the first

    def require_free(self, declared: Key) -> None:
        """ValueError if the script declares a key by a name that one of the thin matrices has."""
        owner = self._owners.get(declared.identity)
        if owner is not None:
            raise ValueError("%s: key %r: the name is taken by lowrank's key of %r; give one of the two another name"
                             % (self._session.label, declared.name, owner.name))  # fmt: skip

    def require_names(self, key: Key, declared: Container[Identity]) -> None:
        """ValueError if one of `declared` has a name that a thin matrix of this key needs. Before anything is made."""
        for name in thin_names(key):
            self.require_free(key._replace(name=name))
            if (key.store, name) in declared:
                raise ValueError(
                    "%s: key %r: lowrank's key of it would be called %r, and that name is taken; give one of the two "
                    "another name" % (self._session.label, key.name, name)
                )

    def declare(self, key: Key) -> None:
        if key.handle in self._matrices:
            return
        if self._work is None:
            self._work = Work(self._session)
        self._owners.update(((key.store, name), key) for name in thin_names(key))
        self._matrices[key.handle] = Matrix(self._session, key, self._work)

    def push(self, key: Key, gradient: Any, landing: Any, priority: int) -> Round:
        """A round of the key; see Session.pushpull."""
        return self._matrices[key.handle].begin(gradient, landing, priority)

    def skip(self, key: Key, landing: Any, priority: int, goes_on: bool) -> Round:
        """See Session.skip. `landing` is not written to if all skip."""
        return self._matrices[key.handle].begin(None, landing, priority, goes_on)

    def is_busy(self, key: Key) -> bool:
        """A round of it is under way."""
        return key.rank > 0 and self._matrices[key.handle].is_busy

    def counters(self, key: Key) -> Dict[str, float]:
        """Of the key's own rounds; see Session.key_counters."""
        return self._matrices[key.handle].counters

    def finish(self) -> None:
        """Until no round is under way: what one is still to push, others wait for. P3Error if the job has failed;
        TimeoutError."""
        with self._session.changed:
            begun = [one.round for one in self._matrices.values() if one.is_busy]
        for round in begun:
            self._session.wait(
                [round], "for the round of key %r, compressed by lowrank, to end before the session is closed: every "
                "worker must push it" % (round.key.name,)
            )  # fmt: skip

    def state(self, key: Key) -> Optional[np.ndarray]:
        """What a snapshot keeps of it. Waits for the round under way."""
        matrix = self._matrices[key.handle]
        if matrix.round is not None:
            self._session.wait([matrix.round])
        return matrix.state()

    def restore(self, key: Key, parts: Sequence[np.ndarray], factor: np.float32, own: Optional[np.ndarray]) -> None:
        self._matrices[key.handle].restore(parts, factor, own)

    def forget(self, store: int) -> None:
        """With the session's lock held."""
        gone = [handle for handle, one in self._matrices.items() if one.key.store == store]
        for handle in gone:
            del self._matrices[handle]
        self._owners = {identity: key for identity, key in self._owners.items() if key.store != store}
