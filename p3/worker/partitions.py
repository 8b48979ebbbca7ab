"""Has the number of partitions of each sparse key found while the job trains (P3_PARTITIONS=auto), on rank 0.

One key after the other, in the order of their first pushes, as all of them share the steps that are measured. The
search is partition_search.py; the rows move as Session.repartition() says.
Threads: one at a time.
"""

from __future__ import annotations

import logging
import weakref
from typing import Dict, Optional

from p3.worker.partition_search import PartitionSearch
from p3.worker.key import Key
from p3.worker.session import Session

log = logging.getLogger("p3")


_searches: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # of each session: all its stores share the steps


def of(session: Session) -> Optional[Partitions]:
    """The session's search, or None if this worker does not search."""
    if not session.searches_partitions:
        return None
    return _searches.setdefault(session, Partitions(session))


class Partitions:
    def __init__(self, session: Session) -> None:
        self._session = weakref.proxy(session)
        self._waiting: Dict[Key, None] = {}  # in order
        self._seen = set()
        self._key: Optional[Key] = None  # whose partitions are searched
        self._search: PartitionSearch
        self._rounds, self._completed_s = 0, 0.0  # of that key, when last looked at

    def pushed(self, key: Key) -> None:
        """Call it at each push of a sparse key, on rank 0. Looks at what has been completed since,
        and may act on it."""
        if key not in self._seen:
            self._seen.add(key)
            self._waiting[key] = None
        if self._key is None:
            self._begin_next()
        if key == self._key:
            self._observe()

    def finished(self, key: Key) -> bool:
        """Whether the key's search has ended and its rows have moved to where it led."""
        return key in self._seen and key not in self._waiting and key != self._key and not self._session.is_moving(key)

    def _begin_next(self) -> None:
        for key in list(self._waiting):
            partitions = self._session.partitions(key)
            if partitions > 0:  # it is agreed
                del self._waiting[key]
                self._key = key
                self._search = PartitionSearch(self._session.num_servers, key.shape[0])
                self._rounds = 0
                return

    def _observe(self) -> None:
        counters = self._session.key_counters(self._key)
        rounds, completed_s = counters["rounds"], counters["completed_s"]
        if self._session.is_moving(self._key) or self._rounds == 0:
            self._rounds, self._completed_s = rounds, completed_s
            return
        if rounds == self._rounds:
            return
        step_s = (completed_s - self._completed_s) / (rounds - self._rounds)
        self._rounds, self._completed_s = rounds, completed_s
        changed = self._search.observe(step_s)
        if changed is not None:
            log.info("key %r goes on with %d partitions", self._key.name, changed)
            self._session.repartition(self._key, changed)
        if self._search.finished:
            samples = ", ".join("%d: %.4g s" % one for one in sorted(self._search.samples.items()))
            log.info("key %r has %d partitions; steps took %s", self._key.name, self._search.partitions, samples)
            self._key = None
