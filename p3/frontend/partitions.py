"""Has the number of partitions of each sparse key found while the job trains (P3_PARTITIONS=auto), on rank 0.

More partitions mean more to do in parallel, and load that is spread more evenly over the servers; each also costs
something by itself. Parallax (EuroSys'19, section 3.2, equation 1) takes a step with P partitions for
`t(P) = a + b/P + c*P`, samples t by doubling P, and then by halving it, from the number of servers until the step
becomes slower, and fits the rest: the minimum lies between the samples.

One key after the other, in the order of their first pushes, as all of them share the steps that are measured. The rows
move as Session.repartition() says. Threads: one at a time.
"""

from __future__ import annotations

import logging
import statistics
import weakref
from itertools import combinations
from typing import Dict, List, Optional, Set

import numpy as np

from p3.worker.key import Key
from p3.worker.session import Session

log = logging.getLogger("p3")

WARM_UP_STEPS = 3  # after each change: steps that still feel it
STEPS = 12  # whose median is one sample
NOISE = 0.02  # a step that is slower by less than this is not slower
TOLERANCE = 0.05  # a fit that is worse than a sample by less than this is believed: it has seen all samples

_searches: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # of each session: all its stores share the steps


def note_push(session: Session, key: Key) -> None:
    """A front end calls it at each push of a key, whatever that is: this worker may search its partitions."""
    if key.sparse and session.searches_partitions:
        if session not in _searches:
            _searches[session] = Partitions(session)
        _searches[session].pushed(key)


def forget(session: Session, store: int) -> None:
    """The keys of the store are gone."""
    if session in _searches:
        _searches[session].forget(store)


class Partitions:
    """The searches of one session."""

    def __init__(self, session: Session) -> None:
        self._session = weakref.proxy(session)
        self._waiting: Dict[Key, None] = {}  # in order
        self._found: Set[Key] = set()  # of which the search has ended
        self._key: Optional[Key] = None  # whose partitions are searched
        self._search: PartitionSearch
        self._rounds, self._completed_s = 0, 0.0  # of that key, when last looked at

    def pushed(self, key: Key) -> None:
        """Call it at each push of a sparse key, on rank 0. Looks at what has completed since, and may act on it."""
        if key.staleness > 0 or self._session.keys.have_norm(key.store):
            return  # its rows cannot move
        if key != self._key and key not in self._found:
            self._waiting[key] = None
        if self._key is None:
            self._begin_next()
        if key == self._key:
            self._observe()

    def finished(self, key: Key) -> bool:
        """Whether the key's search has ended and its rows have moved to where it led."""
        return key in self._found and not self._session.is_moving(key)

    def forget(self, store: int) -> None:
        """Its keys are gone."""
        self._waiting = {key: None for key in self._waiting if key.store != store}
        self._found = {key for key in self._found if key.store != store}
        if self._key is not None and self._key.store == store:
            self._key = None

    def _begin_next(self) -> None:
        for key in list(self._waiting):
            partitions = self._session.partitions(key)
            if partitions > 0:  # it is agreed
                del self._waiting[key]
                if self._session.is_placed(key):  # other partitions would be other shares of its servers
                    self._found.add(key)
                    continue
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
            log.info("key %r continues with %d partitions", self._key.name, changed)
            self._session.repartition(self._key, changed)
        if self._search.finished:
            samples = ", ".join("%d: %.4g s" % one for one in sorted(self._search.samples.items()))
            log.info("key %r has %d partitions; steps took %s", self._key.name, self._search.partitions, samples)
            self._found.add(self._key)
            self._key = None


class PartitionSearch:
    """Of one key. Feed it the duration of every step; it says when to go on with another number of partitions. Pure: no
    clock, no I/O."""

    def __init__(self, servers: int, rows: int, steps: int = STEPS, warm_up: int = WARM_UP_STEPS) -> None:
        self.most = max(1, rows)
        self.partitions = min(servers, self.most)  # now
        self.samples: Dict[int, float] = {}  # partitions -> seconds of a step
        self.finished = False
        self._start = self.partitions
        self._steps, self._warm_up = steps, warm_up
        self._seen: List[float] = []
        self._factor = 2.0
        self._fitted: Optional[int] = None

    def observe(self, step_s: float) -> Optional[int]:
        """One step with the present number of partitions. Returns the number to go on with, if it is another."""
        if self.finished:
            return None
        self._seen.append(step_s)
        if len(self._seen) < self._warm_up + self._steps:
            return None
        self.samples[self.partitions] = statistics.median(self._seen[self._warm_up :])
        self._seen = []
        before, self.partitions = self.partitions, self._next()
        return self.partitions if self.partitions != before else None

    def _next(self) -> int:
        if self._fitted is not None:
            return self._end()
        if self._factor > 1:
            doubled = self.partitions * 2
            if doubled <= self.most and not self._has_become_slower(self.partitions // 2):
                return doubled
            self._factor, self.partitions = 0.5, self._start
        if self.partitions > 1 and not self._has_become_slower(self.partitions * 2):
            return self.partitions // 2
        self._fitted = minimum_of(fit(self.samples), min(self.samples), max(self.samples))
        return self._end() if self._fitted in self.samples else self._fitted

    def _has_become_slower(self, previous: int) -> bool:
        """Whether the present number is slower than the one before on this way; the start has none before it."""
        if self.partitions == self._start:
            return False
        return self.samples[self.partitions] > (1 + NOISE) * self.samples[previous]

    def _end(self) -> int:
        """The fit's minimum has been measured by now. If it is clearly worse than a sample, times are not as fitted."""
        self.finished = True
        best = min(self.samples, key=lambda partitions: self.samples[partitions])
        is_good = self.samples[self._fitted] <= (1 + TOLERANCE) * self.samples[best]
        return self._fitted if is_good else best


def fit(samples: Dict[int, float]) -> np.ndarray:
    """a, b and c of t(P) = a + b/P + c*P, none of them negative, with the least squared error."""
    counts = np.array(sorted(samples), dtype=float)
    times = np.array([samples[int(count)] for count in counts])
    columns = np.stack([np.ones_like(counts), 1 / counts, counts], axis=1)
    best, least = np.zeros(3), float("inf")
    for size in (3, 2, 1):  # three numbers: each set of those that may be positive can be tried
        for chosen in combinations(range(3), size):
            found = np.linalg.lstsq(columns[:, chosen], times, rcond=None)[0]
            if (found < 0).any():
                continue
            error = float(((columns[:, chosen] @ found - times) ** 2).sum())
            if error < least * (1 - 1e-9):
                least, best = error, np.zeros(3)
                best[list(chosen)] = found
    return best


def minimum_of(coefficients: np.ndarray, least: int, most: int) -> int:
    """The whole number from `least` to `most` at which t is smallest."""
    counts = np.arange(least, most + 1, dtype=float)
    times = coefficients[0] + coefficients[1] / counts + coefficients[2] * counts
    return least + int(times.argmin())
