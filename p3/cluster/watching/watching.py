"""The scheduler's part in watching a job: while somebody watches, it asks all processes how far they are, and tells
those who do what they answer.

Nothing of it can hold up the job. Nobody is asked unless somebody watches, and none again before it has answered; who
does not answer within a second is shown as it was. A watcher has one view under way at a time, so it takes no memory
for what it does not read, and one that has not taken its view within 5 s is cut off. There are 16 at most.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from typing import Callable, List, Optional, Set

from p3.cluster import messages
from p3.cluster.connections import channel
from p3.cluster.node import Node
from p3.cluster.roster import Entry, Roster
from p3.cluster.watching import view as views
from p3.errors import ProtocolError

log = logging.getLogger("p3.scheduler")

MAX_WATCHERS = 16
_ANSWER_S = 1.0  # for all processes to report
_FRESH_S = 0.5  # nobody is asked more often
_SLOW_S = 5.0  # for a watcher to take a view
_FAREWELL_S = 0.5


class Watching:
    """Threads: the event loop's alone."""

    def __init__(self, roster: Roster, end: asyncio.Future, missing: Callable[[], str]) -> None:
        """`end`: the job's, with the text of its failure or None. `missing`: who has not joined yet."""
        self._roster, self._end, self._missing = roster, end, missing
        self._watchers = 0
        self._began_at: Optional[float] = None
        self._links = views.Links()
        self._asked_at = 0.0
        self._unanswered: Set[Entry] = set()
        self._answers: Optional[asyncio.Future] = None  # of the last question: done when all are there

    def begin(self) -> None:
        """All processes are connected, and listen."""
        self._began_at = time.monotonic()
        for entry in self._roster.entries:
            entry.reports.pace.note(self._began_at, 0)

    def note_heartbeat(self, entry: Entry) -> None:
        entry.reports.pace.note(entry.last_heard, entry.last_round)

    def take(self, entry: Entry, report: dict) -> None:
        """An answer. ProtocolError if nobody has asked."""
        if not entry.reports.is_asked:
            raise ProtocolError("%s sent a report that nobody asked for" % entry)
        entry.reports.take(report, time.monotonic())
        self._unanswered.discard(entry)
        if not self._unanswered and self._answers is not None and not self._answers.done():
            self._answers.set_result(None)

    async def view(self, span_s: float) -> dict:
        """What the processes are doing now, with rates over so many seconds. Takes a second at most."""
        if self._began_at is None:
            return views.waiting(self._missing() or "connections between the processes")
        await self._ask()
        now = time.monotonic()
        seconds = now - self._began_at
        return views.view(now, seconds, span_s, self._processes("worker"), self._processes("server"), self._links)

    async def _ask(self) -> None:
        now = time.monotonic()
        if self._answers is None or now - self._asked_at >= _FRESH_S:
            self._asked_at = now
            self._answers = asyncio.get_running_loop().create_future()
            self._unanswered = {entry for entry in self._roster.entries if _is_there(entry)}
            for entry in self._unanswered:
                if not entry.reports.is_asked:
                    entry.reports.is_asked = True
                    entry.tell({"kind": "report"})
            if not self._unanswered:
                self._answers.set_result(None)
        answers = self._answers
        await asyncio.wait({answers, self._end}, timeout=_ANSWER_S, return_when=asyncio.FIRST_COMPLETED)
        if answers is self._answers:
            seconds = time.monotonic() - self._began_at
            self._links.record(seconds, self._processes("worker"), self._processes("server"))

    def _processes(self, role: str) -> List[views.Process]:
        return [self._process(node) for node in self._roster.nodes(role) if self._roster.by_node[node].join is not None]

    def _process(self, node: Node) -> views.Process:
        entry = self._roster.by_node[node]
        state = "lost" if entry.gone else "left" if entry.left else "runs"
        return views.Process(node.rank, node.host, entry.join["machine"], state, entry.last_round, entry.reports)

    async def feed(self, take: Callable[[dict], None], every_s: float, span_s: float) -> None:
        """Gives it a view every so often, until the job ends."""
        while not self._end.done():
            take(await self.view(span_s))
            await asyncio.wait({self._end}, timeout=every_s)

    async def serve(self, sock: socket.socket, look: dict) -> None:
        """One who watches, until that one or the job ends. `look`: its first message."""
        refusal = self._refusal(look)
        if refusal:
            await channel.send_message(sock, {"kind": "ended", "text": refusal})
            return
        self._watchers += 1
        gone = asyncio.ensure_future(channel.read_exactly(sock, 1))  # it has nothing more to say, so: its end
        try:
            await self._show(sock, gone, max(_FRESH_S, look["every_s"]), look["span_s"])
        except OSError:
            pass  # it has gone
        finally:
            self._watchers -= 1
            await channel.cancel(gone)

    def _refusal(self, look: dict) -> str:
        from p3 import __version__

        if look["protocol"] != messages.PROTOCOL_VERSION:
            ours = (__version__, messages.PROTOCOL_VERSION, look["version"], look["protocol"])
            return "the job runs P3 %s with control protocol %d, and this is P3 %s with protocol %d" % ours
        if self._watchers >= MAX_WATCHERS:
            return "%d others watch this job already" % self._watchers
        return ""

    async def _show(self, sock: socket.socket, gone: asyncio.Future, every_s: float, span_s: float) -> None:
        while not gone.done() and not self._end.done():
            data = messages.encode(await self.view(span_s))
            if not await self._has_taken(sock, data, gone):
                return
            await asyncio.wait({gone, self._end}, timeout=every_s, return_when=asyncio.FIRST_COMPLETED)
        if self._end.done():
            text = self._end.result() or ""
            await asyncio.wait_for(channel.send(sock, messages.encode({"kind": "ended", "text": text})), _FAREWELL_S)

    async def _has_taken(self, sock: socket.socket, data: bytes, gone: asyncio.Future) -> bool:
        sending = asyncio.ensure_future(channel.send(sock, data))
        awaited = {sending, gone, self._end}
        try:
            await asyncio.wait(awaited, timeout=_SLOW_S, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
                return True
            if not gone.done() and not self._end.done():
                log.info("cut off one who watches: it has not read for %g s", _SLOW_S)
            return False
        finally:
            await channel.cancel(sending)


def _is_there(entry: Entry) -> bool:
    return entry.ready and not (entry.left or entry.gone or entry.catches_up)
