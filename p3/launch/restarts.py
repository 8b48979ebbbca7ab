"""Whether, when and where what was lost starts again: workers and servers (`--rejoin`), and whole jobs (`--restarts`).

Decisions over state. No I/O and no clock: who asks says the time, in seconds of one monotonic clock.
"""

from __future__ import annotations

from typing import Dict

from p3.launch.placement import Host

REFUND_S = 600.0  # after which what was started again has shown that it is well: its restart is given back
_DOUBLINGS = 5  # of a pause, at most


class Budget:
    """How often one process, or the job, may be started again."""

    def __init__(self, allowed: int) -> None:
        self.left = self._allowed = allowed

    def spend(self, well_s: float) -> bool:
        """For what has just ended, having done well for that long. False, and nothing is spent, if none is left."""
        self.left = min(self._allowed, self.left + int(well_s // REFUND_S))
        if self.left == 0:
            return False
        self.left -= 1
        return True

    def pause_s(self, first_s: float) -> float:
        """Before the start that was just paid for: none before the first one, then doubling."""
        before = self._allowed - self.left - 1
        return first_s * 2 ** min(before - 1, _DOUBLINGS) if before > 0 else 0.0


class Cooling:
    """Hosts on which a start has failed: each is left alone for a while, which doubles from failure to failure."""

    def __init__(self, first_s: float) -> None:
        self._first_s = first_s
        self._failures: Dict[str, int] = {}
        self._until: Dict[str, float] = {}

    def failed(self, host: Host, now: float) -> None:
        if self.left_s(host, now) > 0:
            return  # of several that were started there at once
        failures = self._failures[host.name] = self._failures.get(host.name, 0) + 1
        self._until[host.name] = now + self._first_s * 2 ** min(failures - 1, _DOUBLINGS)

    def left_s(self, host: Host, now: float) -> float:
        return max(0.0, self._until.get(host.name, now) - now)
