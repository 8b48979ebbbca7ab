"""Lost workers for whom the others wait (P3_ON_WORKER_LOSS=wait), and the processes that take their places: the
scheduler's part. What is decided of each, and why, is in losses.py; here it is carried out."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from typing import Callable, Dict, List, Optional

from p3.cluster.agreement import Agreement, joined_message
from p3.cluster.losses import Loss, Standing, infer
from p3.cluster.node import Node
from p3.cluster.roster import Entry, Roster
from p3.errors import ProtocolError, RendezvousError
from p3.settings import Settings

log = logging.getLogger("p3.scheduler")

_REMINDER_S = 10.0  # between two log lines about a lost worker


class _Vacancy:
    """The place of a lost worker, until another process has taken it."""

    def __init__(self, text: str) -> None:
        self.text = text  # how it was lost
        self.loss: Loss
        self.since: float  # it, or another process that was on its way, was lost; in the event loop's time
        self.visitors = 0  # processes that want it, and wait until it is open
        self.is_open = asyncio.Event()  # the servers are ready for another process
        self.is_filled = asyncio.get_running_loop().create_future()


class Vacancies:
    """Of a job that has begun. Threads: the event loop's alone."""

    def __init__(
        self,
        settings: Settings,
        label: str,
        roster: Roster,
        agreement: Agreement,
        end: asyncio.Future,
        fail: Callable[[str], None],
        report: Callable[[dict], None],
    ) -> None:
        """`label`: the scheduler's. `end`: of the job. `fail` ends it, `report` tells `p3 run`."""
        self._timeout_s = settings.replacement_timeout_s
        self._label, self._roster, self._agreement = label, roster, agreement
        self._end, self._fail, self._report = end, fail, report
        self._vacancies: Dict[Node, _Vacancy] = {}
        self._times_lost: Dict[Node, int] = {}
        self._filled_at: Dict[int, float] = {}  # by rank: when another process has taken that worker's place
        self._begun: Dict[Node, tuple] = {}  # behind which Standing that was, and how many calls of join() were over
        self._waits: set = set()  # tasks

    def is_vacant(self, rank: int) -> bool:
        return any(node.rank == rank for node in self._vacancies)

    def filled_for_s(self, rank: int, now: float) -> float:
        """For how long another process has been that worker; math.inf if none has."""
        return now - self._filled_at.get(rank, -math.inf)

    def wanted_by(self, join: dict) -> Optional[Node]:
        """The node whose place a process wants, if that is one that is lost."""
        if join["role"] != "worker":
            return None
        return next((node for node in self._vacancies if node.rank == join["rank"]), None)

    # Losing a worker

    def lose(self, entry: Entry, text: str) -> None:
        """Begins to wait. `text`: how it was lost."""
        entry.gone = True
        entry.stream.abort()
        node = entry.node
        log.warning("%s The others wait at most %g s for another process of rank %d.", text, self._timeout_s, node.rank)
        self._report({"state": "lost", "rank": node.rank})
        self._times_lost[node] = self._times_lost.get(node, 0) + 1
        if node not in self._vacancies:  # else who came in its place is lost as well
            self._vacancies[node] = _Vacancy(text)
            task = asyncio.get_running_loop().create_task(self._wait_for(node, self._vacancies[node]))
            self._waits.add(task)
            task.add_done_callback(self._waits.discard)
        self._tell_each(self._agreement.lose(node))
        vacancy = self._vacancies[node]
        servers, joins = self._roster.nodes("server"), self._agreement.joins_called(node)
        vacancy.loss = Loss(node, self._times_lost[node], servers, self._agreement.stores, joins)
        vacancy.since = asyncio.get_running_loop().time()
        vacancy.is_open.clear()
        self._roster.tell_all("server", {"kind": "lost", "rank": node.rank})
        self.consider()

    async def _wait_for(self, node: Node, vacancy: _Vacancy) -> None:
        """Says every now and then who is waited for, and fails the job when that took too long."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            left_s = _REMINDER_S if vacancy.visitors else vacancy.since + self._timeout_s - loop.time()
            if left_s <= 0:
                self._fail(
                    "%s Nobody took its place within %g s (half of P3_WAIT_TIMEOUT_S)."
                    % (vacancy.text, self._timeout_s)
                )
            await asyncio.wait(
                {self._end, vacancy.is_filled}, timeout=min(_REMINDER_S, left_s), return_when=asyncio.FIRST_COMPLETED
            )
            waited_s = loop.time() - began
            if self._end.done():
                return
            if vacancy.is_filled.done():
                log.warning("%s: %s is back after %.1f s", self._label, node, waited_s)
                return
            log.warning("%s: waiting for %s for %.0f s", self._label, node, waited_s)

    # What servers and workers say of it

    def on_message(self, sender: Node, message: dict) -> None:
        """`lost_at` or `filled` of a server, `place` of a worker."""
        vacancy = next((v for node, v in self._vacancies.items() if node.rank == message["rank"]), None)
        if message["kind"] == "place":
            if vacancy is None or vacancy.loss.attempt != message["attempt"]:
                return  # that has been decided
            fill = vacancy.loss.on_place(sender, message)
            if fill is not None:
                self._roster.tell_all("server", fill)
            self.consider()
        elif vacancy is None:
            raise ProtocolError("%s sent %r for a worker that is not lost" % (sender, message["kind"]))
        elif message["kind"] == "filled":
            vacancy.loss.on_filled(sender, message)
            if vacancy.loss.is_vacant:
                vacancy.is_open.set()
        else:
            self._on_lost_at(sender, vacancy, message)

    def _on_lost_at(self, server: Node, vacancy: _Vacancy, message: dict) -> None:
        loss = vacancy.loss
        restores = loss.node.rank == 0 and self._agreement.resumed > 0
        try:
            is_all = loss.on_lost_at(server, message, restores)
        except RendezvousError as error:
            self._fail("%s It cannot be replaced: %s." % (vacancy.text, error))
            return
        if is_all:
            self._roster.tell_all("server", loss.fill(loss.pushed))
            self._roster.tell_all("worker", loss.question())
            self.consider()

    def consider(self) -> None:
        """Whether what is known by now decides something."""
        here = {
            node: self._agreement.joined(node)
            for node, entry in self._roster.by_node.items()
            if node.role == "worker" and not entry.left and node not in self._vacancies
        }
        losses = [vacancy.loss for vacancy in self._vacancies.values()]
        for loss in losses:
            was_known = loss.standing is not None
            if loss.decide(here, self._agreement.is_uneven):
                self._tell_each(self._agreement.receive(loss.node, joined_message(loss.node, max(here.values()))))
                self._roster.tell_all("worker", loss.question())
            elif loss.standing is not None and not was_known:
                self._roster.tell_all("server", loss.fill(loss.standing.rounds, is_last=True))
        if not here and all(loss.is_asked and loss.standing is None for loss in losses):
            self._infer(losses)
        self._enter_barriers(here)

    def _infer(self, losses: List[Loss]) -> None:
        """Nobody is left. Who has called join() waits for those who have not."""
        losses = [loss for loss in losses if self._agreement.joined(loss.node) is None] or losses
        if not losses:
            return
        begun = []
        for loss in losses:
            start, joins = self._begun.get(loss.node, (Standing(self._agreement.resumed, {}), 0))
            skipped = self._agreement.joins - joins  # rounds of each key
            begun.append(start._replace(rounds={key: start.rounds.get(key, 0) + skipped for key in loss.pushed}))
        those, standing = infer([loss.pushed for loss in losses], begun, at_least=self._agreement.joined_at)
        for number in those:
            losses[number].stand_at(standing)
            self._roster.tell_all("server", losses[number].fill(losses[number].standing.rounds, is_last=True))

    def _enter_barriers(self, here: dict) -> None:
        """A lost worker has entered those that the others wait in right behind the step in which it was lost."""
        for number, arrived in self._agreement.barriers():
            missing = [node for node in self._roster.by_node if node.role == "worker" and node not in arrived]
            waiting = [node for node in arrived if node in here]
            losses = [self._vacancies[node].loss for node in missing if node in self._vacancies]
            if len(losses) == len(missing) and waiting and all(loss.is_within(waiting) for loss in losses):
                for node in missing:
                    self._tell_each(self._agreement.receive(node, {"kind": "barrier", "number": number, "mark": None}))

    def _tell_each(self, messages) -> None:
        for node, message in messages:
            self._roster.by_node[node].tell(message)

    # Letting another process in

    async def fill(self, node: Node, entry: Entry) -> dict:
        """Gives a process that has joined the place of a lost one, when it is open; what it is to know of the past.
        RendezvousError if it cannot have it."""
        vacancy = self._vacancies[node]
        opening = asyncio.ensure_future(vacancy.is_open.wait())
        hearing = asyncio.ensure_future(entry.stream.receive())  # nothing but its end
        vacancy.visitors += 1
        try:
            await asyncio.wait({opening, hearing, self._end}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            vacancy.visitors -= 1
            opening.cancel()
            hearing.cancel()
            heard = await asyncio.gather(hearing, return_exceptions=True)
        if self._end.done() or not vacancy.loss.is_vacant or not isinstance(heard[0], asyncio.CancelledError):
            raise RendezvousError("the place of %s is taken, or the process or the job has ended" % (node,))
        vacancy.loss.is_taken = True
        vacancy.since = asyncio.get_running_loop().time()
        vacancy.is_open.clear()
        entry.catches_up = True
        self._report({"state": "taken", "rank": node.rank})
        self._roster.replace(node, entry)
        standing = vacancy.loss.standing
        return {
            "step": standing.step,
            "resumed": self._agreement.resumed,
            "barriers": self._agreement.barriers_entered(node),
            "joins": self._agreement.joins,
            "in_join": self._agreement.joins > 0 and self._agreement.joined_at == standing.step,
            "lost": self._times_lost[node],
            "marked": standing.is_marked,
            "numbers": standing.numbers,
        }

    def on_ready(self, entry: Entry) -> None:
        """The connections of a process that fill() has let in stand: it trains on with the others."""
        entry.catches_up = False
        entry.tell({"kind": "start"})
        vacancy = self._vacancies.pop(entry.node)
        standing = vacancy.loss.standing
        self._begun[entry.node] = standing, self._agreement.joins
        for message in self._agreement.catch_up(entry.node, standing.step, standing.rounds):
            entry.tell(message)
        self._roster.tell_all("worker", {"kind": "found", "rank": entry.node.rank})
        for other in self._vacancies.values():
            if other.loss.is_asked and other.loss.standing is None:
                entry.tell(other.loss.question())
        entry.tell({"kind": "caught_up"})
        self._filled_at[entry.node.rank] = time.monotonic()
        vacancy.is_filled.set_result(None)
