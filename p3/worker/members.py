"""Who is part of the job: all workers, without those that have departed (P3_ON_WORKER_LOSS=continue).

The scheduler says who has departed; each worker hears of it at a moment of its own. What all must do alike, they agree
on first: every worker is told of the same members at the end of a barrier.
"""

from __future__ import annotations

import logging
from typing import Tuple

from p3.worker.links.link import Link

log = logging.getLogger("p3")


class Members:
    """Of one session, whose lock guards it."""

    def __init__(self, session, link: Link) -> None:
        self._core, self._label, self._label_of = link.core, session.label, link.label_of
        self._rank = session.rank
        self.ranks: Tuple[int, ...] = tuple(range(session.num_workers))  # as this worker has heard by now
        session.handle("departed", self._on_departed)

    @property
    def is_first(self) -> bool:
        """Whether this worker gives first values, and writes snapshots: rank 0, unless that has departed."""
        return self.ranks[0] == self._rank

    def _on_departed(self, message: dict) -> None:
        rank = message["rank"]
        self.ranks = tuple(other for other in self.ranks if other != rank)
        if self.is_first:
            self._core.become_first()
        are = "1 worker trains" if len(self.ranks) == 1 else "%d workers train" % len(self.ranks)
        log.warning("%s: %s has departed; %s on", self._label, self._label_of(rank), are)
