"""Processes that enter a running job, in places of workers that have departed or that none has had yet: the scheduler's
part. What is decided of each, and why, is in entrants.py; here it is carried out.

What is decided goes into the journal first, by `decide`, which then calls apply(): so a scheduler that takes this one's
place has decided the same. Who waits, or is on the way, is lost with the scheduler that it waits for: it comes again,
and what servers were told of it is taken back.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Callable, Dict, Set

from p3.cluster.agreement import Agreement, Sent
from p3.cluster.candidates import Candidate
from p3.cluster.entrants import Entrants
from p3.cluster.node import Node
from p3.cluster.rendezvous import Rendezvous, is_guest, label_of
from p3.cluster.roster import Entry, Roster
from p3.errors import RendezvousError
from p3.settings import Settings

log = logging.getLogger("p3.scheduler")

_WORD_S = 0.25  # for one that must go to read why, before servers close their ends
_FAREWELL_S = 2.0  # and to close its own

_NOBODY_LEFT = "all who waited for it have gone meanwhile"
_WITH_SCHEDULER = "it was lost with the scheduler before this one"

DECISIONS = ("admit", "entered", "pass")  # besides `departed`, which every loss of a worker is


class _Candidate(Candidate):
    refusal = ""

    def refuse(self, why: str) -> None:
        self.refusal = why
        if not self.place.done():
            self.place.set_exception(RendezvousError(why))


class Entrances:
    """Of a job that has begun. Threads: the event loop's alone."""

    def __init__(
        self,
        settings: Settings,
        label: str,
        roster: Roster,
        rendezvous: Rendezvous,
        agreement: Agreement,
        end: asyncio.Future,
        decide: Callable[[Node, dict], None],
        depart: Callable[[Entry, str], None],
        dismiss: Callable[[Entry, str], None],
        tell: Callable[[Sent], None],
        report: Callable[[dict], None],
        hold_mark: Callable[[bool], bool],
    ) -> None:
        """`label`: the scheduler's. `end`: of the job. `decide(node, decision)` writes it down, and has it applied;
        `depart(entry, text)` the same of one that is gone; `dismiss(entry, text)` of one that was to take its place.
        `tell`: what Agreement has decided. `report` tells `p3 run`. `hold_mark`: of Returns."""
        self._settings, self._label, self._roster, self._rendezvous = settings, label, roster, rendezvous
        self._agreement, self._end = agreement, end
        self._decide, self._depart, self._dismiss, self._tell, self._report = decide, depart, dismiss, tell, report
        self._hold_mark = hold_mark
        self.replays = False  # what a scheduler before this one has decided: nothing new, up to go_on()
        self._entrants = Entrants(agreement, roster.nodes("worker"), roster.nodes("server"))
        self._candidates: Dict[Node, _Candidate] = {}  # of those on the way
        self._deadlines: Dict[Node, asyncio.TimerHandle] = {}  # of those on trial
        self._to_expel: Set[Node] = set()  # of those on trial, by a scheduler that may not have lived to do it

    # Who waits

    async def let_in(self, entry: Entry, nodes: Callable[[], dict], outlived: bool) -> None:
        """Until a process that wants to enter may connect: it is told so, and is in the roster. RendezvousError if it
        cannot. `nodes`: the message that has all of them."""
        candidate = self._candidate(entry)
        self._entrants.waiting.append(candidate)
        log.warning("%s: %s waits to join the job: %s", self._label, entry, self._why_it_waits(candidate))
        self.consider()
        is_there = await candidate.wait(self._end)
        if candidate in self._entrants.waiting:
            self._entrants.waiting.remove(candidate)
        is_refused = candidate.place.done() and candidate.place.exception() is not None
        if not is_refused and not is_there:
            self._give_up(candidate)
            raise RendezvousError("%s has not joined the job: %s has ended"
                                  % (entry, "it" if self._end.done() else "the process"))  # fmt: skip
        node, mark = candidate.place.result(), self._agreement.mark
        if mark is None or candidate.refusal:
            why = candidate.refusal or _NOBODY_LEFT
            self._drop(node, why)
            raise RendezvousError("%s has not joined the job: %s" % (entry, why))
        candidate.welcome(node, mark, self._roster, outlived)
        entry.stream.send(nodes())
        # Who was admitted behind it waits for it, and sends no heartbeat before it has entered itself: this one is gone
        # long before those are missed.
        connecting_s = self._settings.timeout_s / 2
        what = "%s: %s did not connect to all nodes within %g s (half of P3_TIMEOUT_S)."
        asyncio.get_running_loop().call_later(
            connecting_s, self._give_up_slow, entry, what % (self._label, entry, connecting_s)
        )

    def _candidate(self, entry: Entry) -> _Candidate:
        """RendezvousError if it can never enter."""
        join, label = entry.join, label_of(entry.join)
        if not self._settings.outlives_workers:
            raise RendezvousError("%s wants to join the job, which does not go on without lost workers: "
                                  "--on-worker-loss continue, P3_ON_WORKER_LOSS" % label)  # fmt: skip
        workers = self._roster.nodes("worker")
        if join["role"] != "worker" or (join["rank"] or 0) >= len(workers):
            raise RendezvousError("%s wants to join the job, which has workers 0 to %d: --max-workers, P3_MAX_WORKERS"
                                  % (label, len(workers) - 1))  # fmt: skip
        self._rendezvous.check_entrant(join, self._roster.by_node[workers[0]].join)
        return _Candidate(entry)

    def _why_it_waits(self, candidate: _Candidate) -> str:
        free = self._entrants.free
        if not free:
            return "all %d places are taken (--max-workers, P3_MAX_WORKERS)" % len(self._roster.nodes("worker"))
        if candidate.rank is not None and candidate.rank not in free:
            return "worker %d is there" % candidate.rank
        if not self._entrants.may_enter:
            return "a server is lost, and another one takes over from it first"
        return "the others did not call members(round) yet, as p3.torch.members(epoch) before each epoch"

    def _tell_why(self) -> None:
        for candidate in self._entrants.waiting:
            candidate.tell(self._why_it_waits(candidate))

    def _give_up(self, candidate: _Candidate) -> None:
        """It is gone; if it was on the way already, that is taken back."""
        candidate.place.cancel()
        node = next((node for node, one in self._candidates.items() if one is candidate), None)
        if node is not None and self._entrants.is_answered(node):
            self._drop(node, "it has ended")

    def _give_up_slow(self, entry: Entry, text: str) -> None:
        is_on_the_way = self._roster.by_node[entry.node] is entry and self._entrants.is_on_the_way(entry.node)
        if is_on_the_way and not self._entrants.is_ready(entry.node):  # else it waits for one before it
            self.expel(entry, text)

    # At a mark

    def consider(self) -> None:
        """What may be decided by now, behind anything that may have changed it."""
        if self.replays or self._end.done():
            return
        self._tell_why()
        if self._hold_mark(not self._entrants.on_the_way):
            return
        if self._agreement.mark is None:
            return self._expel_ready()
        while self._entrants.may_enter and self._entrants.next_in is not None:
            entry = self._roster.by_node[self._entrants.next_in]
            if entry.gone:  # and departs in a moment
                break
            self._decide(entry.node, {"kind": "entered", "join": entry.join})
        if self._agreement.mark.problem:
            for candidate in self._entrants.waiting:
                candidate.refuse("nobody can join this job: %s" % self._agreement.mark.problem)
        for candidate, node in self._entrants.choose():
            self._entrants.waiting.remove(candidate)
            self._candidates[node] = candidate
            self._decide(node, {"kind": "admit"})
        self._tell_why()
        if self._entrants.lets_mark_end:
            self._decide(self._roster.nodes("worker")[0], {"kind": "pass"})

    def lose_server(self, server: Node) -> None:
        """Whoever is on the way would have to connect to it; and whoever is on trial lacks values of keys that the
        others claim to its heir. They depart. Who waits enters when all know of the heir."""
        why = "%s was lost meanwhile; who starts it again may join" % (server,)
        for node in self._entrants.on_the_way:
            if node in self._candidates:
                self._candidates[node].refuse(why)
            if self._roster.by_node[node].catches_up:
                self.expel(self._roster.by_node[node], "%s: %s" % (self._label, why))
            elif self._entrants.is_awaited(node, server):
                self.on_admitted(server, {"kind": "admitted", "rank": node.rank, "problem": why})
        self._to_expel.update(self._entrants.on_trial)
        if not self.replays:
            self._expel_on_trial()

    def on_admitted(self, server: Node, message: dict) -> None:
        outcome = self._entrants.on_admitted(server, message)
        if outcome is None:
            return
        candidate = self._candidates.get(outcome.node)
        if candidate is None:
            if not self.replays:
                self._drop(outcome.node, _WITH_SCHEDULER)
            return
        if outcome.problem:
            candidate.refuse("nobody can join the job now: %s" % outcome.problem)
        if candidate.place.done():  # or its process has ended meanwhile
            self._drop(outcome.node, outcome.problem or "it has ended")
        else:
            candidate.place.set_result(outcome.node)

    def _drop(self, node: Node, why: str) -> None:
        """One that is on the way."""
        self._candidates.pop(node, None)
        text = "%s: the process that was to be worker %d did not join: %s." % (self._label, node.rank, why)
        self._dismiss(self._roster.by_node[node], text)

    def on_ready(self, entry: Entry) -> None:
        """The connections of one that let_in() has let in stand."""
        if self._entrants.is_on_the_way(entry.node):  # else it came too late
            self._entrants.note_ready(entry.node)
            self.consider()

    def _expel_ready(self) -> None:
        """Nobody is left where they would have entered."""
        for node in self._entrants.on_the_way:
            if self._entrants.is_ready(node):
                entry = self._roster.by_node[node]
                self.expel(entry, "%s: %s has not joined the job: %s." % (self._label, entry, _NOBODY_LEFT))

    def _expel_on_trial(self) -> None:
        """Behind the loss of a server. They hear of no heir."""
        text = "%s: %s has joined the job, and a server was lost before its first members(); started again, it may join"
        for node in sorted(self._to_expel):
            entry = self._roster.by_node[node]
            self.expel(entry, text % (self._label, entry))

    def apply(self, node: Node, decision: dict) -> None:
        """One of DECISIONS, which is in the journal."""
        if decision["kind"] == "admit":
            self._tell(self._entrants.admit(node))
        elif decision["kind"] == "pass":
            self._tell(self._agreement.end_mark())
        else:
            self._enter(node, decision["join"])

    def _enter(self, node: Node, join: dict) -> None:
        self._candidates.pop(node, None)
        entry = self._roster.by_node[node]
        if entry.join is not join:  # it had entered with the scheduler before this one, and will come back
            entry = Entry(None, join)
            self._roster.replace(node, entry)
            entry.ready = True
        entry.catches_up = False
        node = entry.node
        past = self._entrants.enter(node)
        entry.tell({"kind": "start"})
        for message in past:
            entry.tell(message)
        entry.tell({"kind": "members", "ranks": [worker.rank for worker in self._agreement.workers]})
        entry.tell({"kind": "caught_up"})
        for other in self._agreement.workers:
            if other != node:
                self._roster.by_node[other].tell({"kind": "entered", "rank": node.rank, "host": join["host"]})
        self._tell(self._agreement.demand_anew())
        self._report({"state": "entered", "rank": node.rank, "is_guest": is_guest(join)})
        self._put_on_trial(node)

    # On trial

    def _put_on_trial(self, node: Node) -> None:
        """From now on for so long, if nothing moves."""
        self._end_deadline(node)
        text = "%s: %s has joined the job, and did not come to members() within %g s (half of P3_WAIT_TIMEOUT_S)."
        wait_s = self._settings.trial_s
        self._deadlines[node] = asyncio.get_running_loop().call_later(
            wait_s, lambda: self.expel(self._roster.by_node[node], text % (self._label, node, wait_s))
        )

    def _end_deadline(self, node: Node) -> None:
        deadline = self._deadlines.pop(node, None)
        if deadline is not None:
            deadline.cancel()

    def on_message(self, entry: Entry, message: dict) -> None:
        """Anything that one on trial has said, behind what followed from it."""
        if not self._entrants.is_on_trial(entry.node):
            return
        if message["kind"] == "progress":
            self._put_on_trial(entry.node)
            self._tell([(other, message) for other in self._agreement.workers[1:] if other != entry.node])
        elif message["kind"] == "barrier" and self._entrants.end_trial(entry.node):
            self._end_deadline(entry.node)
            if not self.replays:
                log.warning("%s: %s has joined the job", self._label, entry)

    def is_on_probation(self, entry: Entry) -> bool:
        """Whether it departs, and the job is as it was, whatever goes wrong with it."""
        is_it = entry.node is not None and self._roster.by_node[entry.node] is entry and not entry.gone
        return is_it and (self._entrants.is_on_trial(entry.node) or self._entrants.is_on_the_way(entry.node))

    def expel(self, entry: Entry, text: str) -> None:
        """One on probation, which is told why."""
        if self._end.done() or entry.gone:
            return
        entry.catches_up = False
        entry.tell({"kind": "abort", "text": text})
        entry.gone = True
        self._report({"state": "expelled", "rank": entry.node.rank, "is_guest": is_guest(entry.join)})
        loop = asyncio.get_running_loop()
        if entry.stream is not None:
            loop.call_later(_FAREWELL_S, entry.stream.abort)
        loop.call_later(_WORD_S, self._depart, entry, text)

    def drop(self, node: Node) -> bool:
        """It has departed. True if it was on the way, and so none of the job yet."""
        self._end_deadline(node)
        self._to_expel.discard(node)
        return self._entrants.drop(node)

    def go_on(self) -> None:
        """In a scheduler that has taken another one's place: who was on the way was lost with that."""
        self.replays = False
        for node in self._entrants.on_the_way:
            if self._entrants.is_answered(node):  # else the last answer is still to come
                self._drop(node, _WITH_SCHEDULER)
        self._expel_on_trial()  # of whom that one has not yet written down that they are gone
        self.consider()
