"""Servers that are lost, who takes over from them, and who comes back (P3_ON_SERVER_LOSS=continue): what a worker is
told. That it connects to a server that comes back is the link's part."""

from __future__ import annotations

import contextlib
import logging
from typing import Callable

from p3._core import P3Error
from p3.worker.links.link import Link

log = logging.getLogger("p3")


class Servers:
    """Of one session, whose lock guards it."""

    def __init__(self, session, link: Link) -> None:
        self._session, self._link = session, link
        session.handle("server_departed", self._on_departed)
        session.handle("server_returned", self._on_returned)

    @property
    def changes(self) -> int:
        """How often one was lost or came back, as this worker has heard by now."""
        return self._link.server_changes

    def _on_departed(self, message: dict) -> Callable[[], None]:
        return lambda: self._inherit(message["rank"], message["heir"], message["ranks"])

    def _inherit(self, lost: int, heir: int, ranks: list) -> None:
        log.warning("%s: server %d is lost; server %d takes over from it", self._session.label, lost, heir)
        with contextlib.suppress(P3Error):  # the core has failed, and says so itself
            self._link.core.inherit(lost, heir, ranks)

    def _on_returned(self, message: dict) -> Callable[[], None]:
        text = "%s: server %d is back, on %s"
        return lambda: log.warning(text, self._session.label, message["rank"], message["host"])
