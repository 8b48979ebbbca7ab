"""The keys of a session whose gradients are of low rank: where their rounds begin, and what snapshots keep of them."""

from __future__ import annotations

from typing import Any, Dict, Optional, Sequence

import numpy as np

from p3.worker.key import Key
from p3.worker.lowrank.matrix import Matrix
from p3.worker.lowrank.work import Round, Work


class Matrices:
    """Those of one session, whose lock guards which there are. Threads: as the session's own."""

    def __init__(self, session) -> None:
        self._session = session
        self._matrices: Dict[int, Matrix] = {}  # by the handles of their keys
        self._work: Optional[Work] = None  # with the first

    def declare(self, key: Key) -> None:
        if key.handle in self._matrices:
            return
        if self._work is None:
            self._work = Work(self._session)
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
