"""What stands between a host and the network: how its rate is kept, how long the queue in front of it is, and where.

The defaults are docs/lab.md's "What a link does". The others are for asking whether a result is the link's or its
queue's: networks differ in these, and nobody can choose them.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

SHAPERS = ("tbf", "htb", "smooth")
CONGESTION = ("machine", "bbr", "cubic", "reno")

# Token bucket: a TCP segment of 64 KiB, counted with a header for each packet it will become, must pass whole, or the
# kernel cuts up every one in software. At 800 Mbit/s and 64 KiB bare TCP had 0.43 Gbit/s of goodput, with 96 KiB 0.75,
# for a third of the CPU time.
BURST_BYTES = 96 << 10
# Queue in front of a slow link. Bounded by time, not bytes, so that a lab at any rate behaves like the same switch.
QUEUE_MS = 20.0


class Shaping(NamedTuple):
    # The token bucket: a qdisc of its own, or htb with one class and a first-in-first-out queue. Or no bucket: smooth.
    # None: tbf, or smooth where links delay or lose.
    shaper: Optional[str] = None
    queue_ms: float = QUEUE_MS  # at the link's rate, besides the burst
    # The uplink is slow behind the host's interface, as at a router, where the host cannot see it: smooth ones always.
    beyond: bool = False
    # TCP's congestion control on the hosts; machine: the machine's default. With cubic or reno no program can take
    # another.
    congestion: str = "machine"

    def check(self) -> None:
        """Raises ValueError."""
        if self.shaper not in (None, *SHAPERS):
            raise ValueError(f"a shaper is one of {', '.join(SHAPERS)}, not {self.shaper!r}")
        if not 0 < self.queue_ms < 1e5:
            raise ValueError(f"a queue must be above 0 and below 100000 ms, not {self.queue_ms}")
        if self.congestion not in CONGESTION:
            raise ValueError(f"congestion control is one of {', '.join(CONGESTION)}, not {self.congestion!r}")

    def limit_bytes(self, rate_mbit: float) -> int:
        """Of what waits, the burst included."""
        return BURST_BYTES + int(rate_mbit * 1e6 / 8 * self.queue_ms / 1e3)
