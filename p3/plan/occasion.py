"""When servers' shares are to be planned anew, from what the links of a job's hosts have carried. Pure.

A link shows its rate only while it is full, so a worker tells of a step what its link carried then, and nothing of a
step in which it was not full: what is known stays. One step may be off, by what a token bucket lets pass at once or by
what the other end was slow to take; so of the last few steps the second greatest counts. A plan is due when a rate is
more than a quarter from what the last plan assumed (not from what was measured last), for several steps in a row.
"""

from __future__ import annotations

import collections
from typing import Deque, Dict, Hashable, List, Mapping, Optional, Sequence

OF_LATE = 5  # steps, of those in which the link was full, that its rate is of
IN_ROW = 3  # steps that have to say the same
APART = 0.25  # of the rate that was assumed


class Rates:
    """Of the links of all workers, by rank."""

    def __init__(self, workers: int) -> None:
        self._of_late: List[Deque[float]] = [collections.deque(maxlen=OF_LATE) for _ in range(workers)]

    def note(self, told: Sequence[float]) -> None:
        """Of one step, in bytes per second. 0: the link was not full, or the worker is not there."""
        for measured, rate in zip(self._of_late, told):
            if rate > 0:
                measured.append(rate)

    def of(self, worker: int) -> Optional[float]:
        """None: its link has hardly ever been full."""
        measured = sorted(self._of_late[worker])
        return measured[-2] if len(measured) > 1 else None

    def of_hosts(self, workers: Mapping[int, Hashable]) -> Dict[Hashable, Optional[float]]:
        """`workers`: by rank, the host of each that is there. They share its link, which carries what any has seen."""
        found: Dict[Hashable, Optional[float]] = {}
        for rank, host in workers.items():
            known = [rate for rate in (found.get(host), self.of(rank)) if rate is not None]
            found[host] = max(known, default=None)
        return found


class Occasion:
    """Whether it is time for a plan; asked once in each step."""

    def __init__(self) -> None:
        self._assumed: Optional[Dict[Hashable, float]] = None  # by the last plan
        self._in_row = 0

    def is_there(self, rates: Mapping[Hashable, Optional[float]]) -> bool:
        """`rates`: of all hosts with workers. Not before all are known."""
        are_known = None not in rates.values() and len(rates) > 0
        self._in_row = self._in_row + 1 if are_known and self._differ(rates) else 0
        return self._in_row >= IN_ROW

    def _differ(self, rates: Mapping[Hashable, Optional[float]]) -> bool:
        before = self._assumed
        if before is None or before.keys() != rates.keys():
            return True
        return any(abs(rate - before[host]) > APART * before[host] for host, rate in rates.items())

    def plan(self, rates: Mapping[Hashable, float]) -> None:
        """One is made that assumes these."""
        self._assumed, self._in_row = dict(rates), 0
