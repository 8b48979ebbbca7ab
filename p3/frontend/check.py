"""P3_CHECK: all workers compare digests of their weights. For finding errors, not for speed."""

from __future__ import annotations

import zlib
from typing import Any, Iterable, Sequence

import numpy as np

from p3.frontend import waiting
from p3.worker.session import Session


class Digests:
    """Each worker adds up the digests of all; if they are the same everywhere, each sum is the own digest times the
    number of workers. What differs is named, on each worker whose digest is not the mean: on one at least."""

    def __init__(self, session: Session, store: int, names: Sequence[str]) -> None:
        """On every worker at the same point; waits for them. `store`: not that of the weights."""
        self._session, self._names = session, names
        self._key = session.declare("digests", (len(names),), "int64", store)
        waiting.from_rank_0(session, self._key, np.zeros(len(names), np.int64))

    def require_same(self, contents: Iterable[Any], what: str, advice: str = "") -> None:
        """Of what has these names, in their order, in CPU memory. RuntimeError, that `what` differs. Waits for all."""
        own = np.array([zlib.crc32(one) for one in contents], np.int64)
        total = np.empty_like(own)
        awaited = "for the digests of other workers (P3_CHECK), which take the same steps"
        self._session.wait([self._session.pushpull(self._key, own, total)], awaited)
        differing = [name for name, same in zip(self._names, total == own * self._session.num_workers) if not same]
        if differing:
            raise RuntimeError("%s: %s differ, in %s%s" % (self._session.label, what, ", ".join(differing), advice))
