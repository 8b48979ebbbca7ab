"""How fast a process moves the bytes of its part of a snapshot, and that it tells of it.

Whoever waits for a part waits for as long as its bytes move: a large snapshot on a slow disk or network takes longer
than any time-out for all of it could foresee.
"""

from __future__ import annotations

import time
from typing import Callable, Optional

_MB = 1e6
_LONGEST_S = 10.0  # between two reports
_SLEEP_S = 1.0


class Pace:
    """Of one process. Threads: one at a time."""

    def __init__(
        self, wait_timeout_s: float, tell: Callable[[], None], max_mb_per_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep,
    ) -> None:  # fmt: skip
        """`tell` is called while bytes move, several times in the time that others wait without hearing anything.
        `max_mb_per_s`: of what is written; 0: no limit."""
        self._tell, self._every_s = tell, min(_LONGEST_S, wait_timeout_s / 4)
        self._max_bytes_per_s = max_mb_per_s * _MB
        self._clock, self._sleep = clock, sleep
        self._told_at: Optional[float] = None
        self._free_at = 0.0  # when the bytes written so far are within the limit

    @property
    def step_bytes(self) -> Optional[int]:
        """How much to write at once, at most; None: whatever suits."""
        if not self._max_bytes_per_s:
            return None
        return max(1, int(self._max_bytes_per_s * min(self._every_s, _SLEEP_S)))

    def moved(self) -> None:
        now = self._clock()
        if self._told_at is None or now - self._told_at >= self._every_s:
            self._told_at = now
            self._tell()

    def wrote(self, count: int) -> None:
        """So many bytes are on the disk. Returns when the next may follow."""
        self.moved()
        if self._max_bytes_per_s:
            now = self._clock()
            self._free_at = max(self._free_at + count / self._max_bytes_per_s, now)
            while now < self._free_at:
                self._sleep(min(self._free_at - now, self._every_s, _SLEEP_S))
                self.moved()
                now = self._clock()
