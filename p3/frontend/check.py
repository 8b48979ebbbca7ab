"""P3_CHECK: all workers compare digests of their weights. For finding errors, not for speed."""

from __future__ import annotations

import zlib
from typing import Any, Iterable, Sequence

import numpy as np

from p3.frontend import waiting
from p3.worker.session import Session


class Digests:
    """The digests of all workers are added up; if they are the same everywhere, each sum is the own digest times the
    number of workers, which is counted with them. What differs is named, on each worker whose digest is not the mean:
    on one at least."""

    def __init__(self, session: Session, store: int, names: Sequence[str]) -> None:
        """On every worker at the same point; waits for them. `store`: not that of the weights."""
        self._session, self._names = session, names
        self._key = session.declare("digests", (len(names) + 1,), "int64", store)
        waiting.from_rank_0(session, self._key, np.zeros(len(names) + 1, np.int64))

    def require_same(self, contents: Iterable[Any], what: str, advice: str = "") -> None:
        """Of what has these names, in their order, in CPU memory. RuntimeError, that `what` differs. Waits for all."""
        own = np.array([*map(zlib.crc32, contents), 1], np.int64)
        total = np.empty_like(own)
        awaited = "for the digests of other workers (P3_CHECK), which take the same steps"
        self._session.wait([self._session.pushpull(self._key, own, total)], awaited)
        differing = [name for name, same in zip(self._names, total == own * total[-1]) if not same]
        if differing:
            raise RuntimeError("%s: %s differ, in %s%s" % (self._session.label, what, ", ".join(differing), advice))
