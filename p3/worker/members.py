"""Who is part of the job: all workers, without those that have departed (P3_ON_WORKER_LOSS=continue).

The scheduler says who has departed, and who has entered in the place of one; each worker hears of it at a moment of its
own. What all must do alike, they agree on first: every worker is told of the same members at the end of a barrier.
"""

from __future__ import annotations

import logging
from typing import Tuple

from p3.worker.links.link import Link

log = logging.getLogger("p3")


class Members:
    """Of one session, whose lock guards it."""

    def __init__(self, session, link: Link) -> None:
        self._session, self._link = session, link
        self._in_order = list(range(session.num_workers))  # of coming, as this worker has heard by now
        session.handle("departed", self._on_departed)
        session.handle("entered", self._on_entered)
        session.handle("members", self._on_members)

    @property
    def ranks(self) -> Tuple[int, ...]:
        return tuple(sorted(self._in_order))

    @property
    def first(self) -> int:
        """Who gives first values, and writes snapshots: rank 0, unless that has departed."""
        return self._in_order[0]

    def _on_departed(self, message: dict) -> None:
        self._in_order.remove(message["rank"])
        if self.first == self._session.rank:
            self._link.core.become_first()
        self._say(message["rank"], "departed")

    def _on_entered(self, message: dict) -> None:
        rank = message["rank"]
        self._in_order.append(rank)
        self._link.note_host(rank, message["host"])
        self._session.joins.note_entered(rank)
        self._say(rank, "joined the job")

    def _on_members(self, message: dict) -> None:
        self._in_order = message["ranks"]

    def _say(self, rank: int, what: str) -> None:
        count = len(self._in_order)
        are = "1 worker trains" if count == 1 else "%d workers train" % count
        log.warning("%s: %s has %s; %s on", self._session.label, self._link.label_of(rank), what, are)
