"""Workers that live and keep others waiting: named in the scheduler's log, and in the end the job's failure.

Servers, and the leaders of machines, see whose push of a round is missing while others' are in, and for how long; each
tells the scheduler. It says so once P3_STRAGGLER_S have passed, then at intervals that double, and fails the job after
P3_STUCK_S. A worker that sends no heartbeats is not late but dead, which others notice.
"""

from __future__ import annotations

import asyncio
from typing import Callable, Dict, Hashable, NamedTuple, Optional, Sequence

from p3.cluster.node import Node
from p3.errors import DisagreementError, ProtocolError

_LOOK_S = 1.0
_LONGEST_INTERVAL_S = 3600.0
_FRESH_S = 3.0 * _LOOK_S  # for how long what a leader has said of its machine counts


async def report_late(core, straggler_s: float, send: Callable[[dict], None]) -> None:
    """Tells the scheduler, again and again, of the workers whom the core sees that late."""
    while True:
        await asyncio.sleep(min(_LOOK_S, straggler_s / 4))
        for late in core.late():
            if late["waited_s"] >= straggler_s:
                send(dict(late, kind="late"))


class _Reported(NamedTuple):
    at: float
    interval_s: float  # until the next time


class Stragglers:
    """The scheduler's. Times are of a monotonic clock."""

    def __init__(
        self, workers: Sequence[Node], machines: Sequence[Hashable], straggler_s: float, stuck_s: float
    ) -> None:
        """`machines`: of each worker, or the greatest group that it is in."""
        self._workers, self._machines = list(workers), machines
        self._straggler_s, self._stuck_s = straggler_s, stuck_s
        self._reported: Dict[int, _Reported] = {}
        self._leader_said: Dict[Hashable, float] = {}  # by machine: when its leader has last named one of its workers

    def name(self, worker: Node) -> None:
        """That is who has its rank now."""
        self._workers[worker.rank] = worker

    def note(self, sender: Node, late: dict, now: float) -> Optional[str]:
        """What the log is to say, if anything. DisagreementError if the job fails of it."""
        worker = late["worker"]
        if worker >= len(self._workers):
            raise ProtocolError("%s reports that worker %d is late, but there is no such worker" % (sender, worker))
        machine = self._machines[worker]
        if sender.role == "worker":
            if self._machines[sender.rank] != machine:
                raise ProtocolError("%s reports that worker %d is late, which is on another machine" % (sender, worker))
            self._leader_said[machine] = now
        elif late["of_machine"] and now - self._leader_said.get(machine, -_FRESH_S) < _FRESH_S:
            return None  # it knows better which one
        if 0 < self._stuck_s <= late["waited_s"]:
            raise DisagreementError(
                "%s. That is more than P3_STUCK_S=%g; 0 sets no limit" % (self._described(late), self._stuck_s)
            )
        last = self._reported.get(worker)
        if last is not None and now - last.at < last.interval_s:
            return None
        interval_s = self._straggler_s
        if last is not None and now - last.at < 2 * last.interval_s:  # it has gone on, or soon begun again
            interval_s = min(2 * last.interval_s, max(_LONGEST_INTERVAL_S, self._straggler_s))
        self._reported[worker] = _Reported(now, interval_s)
        return self._described(late)

    def _described(self, late: dict) -> str:
        others = late["waiting"]
        text = "%s%s is %.0f s behind in round %d, key '%s', for which %d other worker%s; it is alive: see its output"
        return text % (
            self._workers[late["worker"]],
            ", or another worker of its machine or group," if late["of_machine"] else "",
            late["waited_s"],
            late["round"],
            late["key"],
            others,
            " waits" if others == 1 else "s wait",
        )
