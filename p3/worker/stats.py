"""What a session has done so far, as flat numbers for TensorBoard, Weights & Biases and the like, and for the scheduler
when somebody watches the job.

Cheap: counters of the core, and the waits that front ends note. Nothing is sent, and nobody is waited for.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Callable, Dict

from p3._core import P3Error
from p3.cluster.watching import report
from p3.cluster.watching.history import LONGEST_S, History
from p3.errors import ProtocolError
from p3.worker.links.link import Link

log = logging.getLogger("p3")


class Stats:
    """Of one session. Threads: any."""

    def __init__(self, session, link: Link) -> None:
        self._session, self._send = session, link.send
        self._lock = threading.Lock()
        self._began_at = time.monotonic()
        self._history = History()
        session.handle("report", self._on_report)

    def flat(self) -> Dict[str, float]:
        """See Session.stats."""
        session = self._session
        counters, waits = session.core.counters(), session.waits.by_group()
        local = counters["local"]
        totals = {
            "p3/steps": counters["last_round"],
            "p3/sent_bytes": counters["bytes_sent"],
            "p3/received_bytes": counters["bytes_received"],
            "p3/local_sent_bytes": local["bytes_sent"],
            "p3/local_received_bytes": local["bytes_received"],
            "p3/queued_s": counters["queued_s"],
        }
        if waits is not None:
            totals["p3/waited_s"] = sum(waits.values())
            totals.update(("p3/waited_s/" + group, seconds) for group, seconds in waits.items())
        with self._lock:
            self._history.add(time.monotonic() - self._began_at, totals)
            stretch = self._history.over(LONGEST_S)
        now = {
            "p3/steps_per_s": stretch.per_s("p3/steps"),
            "p3/sent_bytes_per_s": stretch.per_s("p3/sent_bytes"),
            "p3/received_bytes_per_s": stretch.per_s("p3/received_bytes"),
            "p3/queued_slices": counters["queued_slices"],
            "p3/memory_bytes": report.memory_bytes(),
            "p3/snapshots_taken": session.snapshots.counts["taken"],
            "p3/snapshots_failed": session.snapshots.counts["failed"],
        }
        if waits is not None:
            now["p3/waited_share"] = min(1.0, stretch.per_s("p3/waited_s"))
        return {name: float(value) for name, value in {**totals, **now}.items()}

    # The scheduler's question, with the session's lock held

    def _on_report(self, _message: dict) -> Callable[[], None]:
        return self._report

    def _report(self) -> None:
        """Whatever is wrong with a report, the job goes on."""
        session, at_s = self._session, time.monotonic() - self._began_at
        try:
            self._send(report.of_worker(session.core, session.num_servers, at_s, session.waits.by_group()))
        except (P3Error, ProtocolError, ValueError) as error:
            log.debug("%s: no report: %s", session.label, error)
