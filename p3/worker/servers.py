"""Servers that are lost, and who takes over from them (P3_ON_SERVER_LOSS=continue): what a worker is told."""

from __future__ import annotations

import contextlib
import logging
from typing import Callable, List

from p3._core import P3Error
from p3.worker.links.link import Link

log = logging.getLogger("p3")


class Servers:
    """Of one session, whose lock guards it."""

    def __init__(self, session, link: Link) -> None:
        self._session, self._link = session, link
        self.lost = link.servers_lost  # so many are, as this worker has heard by now
        session.handle("server_departed", self._on_departed)

    def _on_departed(self, message: dict) -> Callable[[], None]:
        self.lost += 1
        ranks = message.get("ranks", [message["rank"]])
        return lambda: self._inherit(message["rank"], message["heir"], ranks)

    def _inherit(self, lost: int, heir: int, ranks: List[int]) -> None:
        log.warning("%s: server %d is lost; server %d takes over from it", self._session.label, lost, heir)
        with contextlib.suppress(P3Error):  # the core has failed, and says so itself
            self._link.core.inherit(lost, heir, ranks)
