"""What a worker asks the scheduler, and waits for: whether all are at a barrier, and the counters of all servers."""

from __future__ import annotations

from typing import Dict, List, Optional, Tuple

from p3.worker.links.link import Link


class Barriers:
    """Of one session, whose lock guards it."""

    def __init__(self, session, link: Link) -> None:
        self._session, self._send = session, link.send
        self._entered = self._done = session.entrance.barrier
        # At the end of each that is awaited: the ranks of all workers, and of those that have entered the job there.
        self._ends: Dict[int, Tuple[List[int], List[int]]] = {}
        session.handle("barrier_done", self._on_done)

    def enter(self, of: str, mark: Optional[dict] = None) -> Tuple[List[int], List[int]]:
        """See Session.barrier. Returns the ranks of all workers at its end, and of those of them who have entered the
        job there, where a `mark` says that they may (messages.py)."""
        self._session.send_kept()
        with self._session.changed:
            self._entered += 1
            number = self._entered
        self._send({"kind": "barrier", "number": number, "mark": mark})
        each = "each must call it, at the same point of its program"
        what = "in %s (barrier %d) for other workers: %s" % (of, number, each)
        self._session.wait_until(lambda: self._done >= number, what)
        with self._session.changed:
            return self._ends.pop(number)

    def _on_done(self, message: dict) -> None:
        self._done = max(self._done, message["number"])
        self._ends[message["number"]] = message["members"], message["entered"]


class ServerCounters:
    """Of one session, whose lock guards it."""

    def __init__(self, session, link: Link) -> None:
        self._session, self._send = session, link.send
        self._asked = session.entrance.barrier << 32  # other numbers than those of a predecessor
        self._answers: Dict[int, Optional[List[dict]]] = {}  # of each question under way: what the servers said
        session.handle("counters", self._on_counters)

    def ask(self) -> List[dict]:
        """See Session.server_counters."""
        with self._session.changed:
            self._asked += 1
            number = self._asked
            self._answers[number] = None
        try:
            self._send({"kind": "count", "number": number})
            what = "for the counters of the servers"
            self._session.wait_until(lambda: self._answers[number] is not None, what)
            return self._answers[number]
        finally:
            with self._session.changed:
                del self._answers[number]

    def _on_counters(self, message: dict) -> None:
        if message["number"] in self._answers:  # else nobody waits any more
            self._answers[message["number"]] = message["servers"]
