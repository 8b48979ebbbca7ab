"""What a worker asks of all others through the scheduler, by number: barriers, and the counters of the servers."""

from __future__ import annotations

from typing import Dict, List, Optional

from p3.worker.link import Link


class Requests:
    """Of one session, whose lock guards it."""

    def __init__(self, session, link: Link) -> None:
        past = link.rejoined or {"barriers": 0, "lost": 0}
        self._session = session
        self._send = link.send
        self._barriers = self._barriers_done = past["barriers"]
        self._counts = past["lost"] << 32  # other numbers than those of a predecessor
        self._counters: Dict[int, Optional[List[dict]]] = {}  # of each count under way: what the servers said
        session.handle("barrier_done", self._on_barrier_done)
        session.handle("counters", self._on_counters)

    def barrier(self, timeout_s: float) -> None:
        with self._session.changed:
            self._barriers += 1
            number = self._barriers
        self._send({"kind": "barrier", "number": number})
        what = "in barrier %d for other workers" % number
        self._session.wait_until(lambda: self._barriers_done >= number, timeout_s, what)

    def server_counters(self, timeout_s: float) -> List[dict]:
        with self._session.changed:
            self._counts += 1
            number = self._counts
            self._counters[number] = None
        try:
            self._send({"kind": "count", "number": number})
            what = "for the counters of the servers"
            self._session.wait_until(lambda: self._counters[number] is not None, timeout_s, what)
            return self._counters[number]
        finally:
            with self._session.changed:
                del self._counters[number]

    def _on_barrier_done(self, message: dict) -> None:
        self._barriers_done = max(self._barriers_done, message["number"])

    def _on_counters(self, message: dict) -> None:
        if message["number"] in self._counters:  # else nobody waits any more
            self._counters[message["number"]] = message["servers"]
