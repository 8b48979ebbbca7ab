"""What the windows of a job's connections go by: one rate and one number of connections for all machines, whose windows
must be the same (docs/decisions.md, "Why does every connection of a job have the same window?").

Heartbeats tell the scheduler what the link of a process's machine carries and how many connections the process fills
there; the echoes tell all processes the greatest rate, and the greatest number of connections on one machine.
"""

from __future__ import annotations

from typing import Dict

from p3.cluster.connections.frames import LinkShare
from p3.cluster.roster import Entry, Roster

_FRESH_S = 0.5  # no more often is anything computed over all processes
_NEWS = 1.06  # below that ratio a rate is still the same: measurements differ, and changes reach processes one by one


class Windows:
    """Threads: the event loop's alone."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._agreed = LinkShare(0.0, 0.0)
        self._agreed_at = -_FRESH_S

    def note(self, entry: Entry, told: LinkShare, now: float) -> LinkShare:
        """What a process tells at `now`, by a monotonic clock; what it is told. Zeros: nothing is known yet."""
        entry.link = told
        if now - self._agreed_at >= _FRESH_S:
            self._agreed_at = now
            self._agree()
        return self._agreed

    def _agree(self) -> None:
        there = [entry for entry in self._roster.entries if not entry.left and not entry.gone]
        if not all(entry.watched for entry in there):  # of a scheduler that was here before: they will come back
            return
        rate = max((entry.link.bytes_per_second for entry in there), default=0.0)
        connections: Dict[str, float] = {}
        for entry in there:
            machine = entry.join["machine"]
            connections[machine] = connections.get(machine, 0.0) + entry.link.connections
        if self._agreed.bytes_per_second / _NEWS <= rate <= self._agreed.bytes_per_second * _NEWS:
            rate = self._agreed.bytes_per_second
        if rate > 0:
            self._agreed = LinkShare(rate, max(connections.values()))
