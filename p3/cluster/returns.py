"""Processes that take the place of lost servers (P3_ON_SERVER_LOSS=continue): the scheduler's part.

One that wants to come back waits. When all workers are in a barrier at which the script says how far it is (a mark),
and nothing is under way, it is welcomed, and soon `ready`. From then on it is that server: what becomes of it is a loss
as any other. It is told all keys (`define`, then `open`), and its heir to `hand_over`; when both have answered, all
workers are told (`server_returned`), connect to it and say what they have, as they would to an heir. The barrier ends
when all have answered (`taken_back`). They come one after the other, and before workers that wait to enter.

What is decided, that it is the server from here on, goes into the journal first, by `decide`, which then calls apply().
Who waits, or is on the way, is lost with the scheduler.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Callable, Dict, List, Optional

from p3.cluster.agreement import Agreement, Sent
from p3.cluster.candidates import Candidate
from p3.cluster.node import Node
from p3.cluster.rendezvous import Rendezvous, is_guest, label_of
from p3.cluster.roster import Entry, Roster
from p3.errors import ProtocolError, RendezvousError
from p3.settings import Settings

log = logging.getLogger("p3.scheduler")

_FAREWELL_S = 2.0  # for one that must go, to read why


class _Question:
    """What a node is to answer about the server of that rank: `opened`, `handed_over` or `taken_back`."""

    def __init__(self, kind: str, node: Node, rank: int) -> None:
        self.kind, self.node, self.rank = kind, node, rank
        self.is_unable = False  # it cannot, and that server is about to be lost for it, or it itself


class Returns:
    """Of a job that has begun. Threads: the event loop's alone."""

    def __init__(
        self, settings: Settings, label: str, roster: Roster, rendezvous: Rendezvous, agreement: Agreement,
        end: asyncio.Future, decide: Callable[[Node, dict], None], consider: Callable[[], None],
        tell: Callable[[Sent], None], report: Callable[[dict], None],
    ) -> None:  # fmt: skip
        """As of Entrances. `consider()`: whether the mark may end, behind anything that may have changed it."""
        self._settings, self._label, self._roster, self._rendezvous = settings, label, roster, rendezvous
        self._agreement, self._end = agreement, end
        self._decide, self._consider, self._tell, self._report = decide, consider, tell, report
        self.replays = False  # what a scheduler before this one has decided, and said
        self._waiting: List[Candidate] = []  # in the order of coming
        self._coming: Optional[Candidate] = None  # on the way
        self._returned: Optional[Node] = None  # until all workers use it
        self._are_told = False  # they
        self._began_at = 0  # the number of the last mark at which one came back
        # Without an answer yet; also of one that was lost again since, as the answer is still to come.
        self._asked: List[_Question] = []
        self._tried: Dict[int, int] = {}  # by rank: the number of the last mark at which one was welcomed

    # Who waits

    async def let_in(self, entry: Entry, nodes: Callable[[], dict], outlived: bool) -> None:
        """Until the process may make its core: it is told so, and is in the roster. RendezvousError if it cannot come
        back."""
        candidate = self._candidate(entry)
        self._waiting.append(candidate)
        log.warning("%s: %s waits to come back: %s", self._label, entry, self._why_it_waits(candidate))
        self._consider()
        is_there = await candidate.wait(self._end)
        if candidate in self._waiting:
            self._waiting.remove(candidate)
        if not is_there:
            self._forget(candidate)
            raise RendezvousError("%s has not come back: %s has ended"
                                  % (entry, "the job" if self._end.done() else "the process"))  # fmt: skip
        candidate.welcome(candidate.place.result(), self._agreement.mark, self._roster, outlived)
        entry.stream.send(nodes())
        connecting_s = self._settings.timeout_s / 2
        asyncio.get_running_loop().call_later(connecting_s, self._give_up_slow, candidate, connecting_s)

    def _candidate(self, entry: Entry) -> Candidate:
        """RendezvousError if it can never come back."""
        join, label = entry.join, label_of(entry.join)
        servers = self._roster.nodes("server")
        if not self._settings.outlives_servers:
            raise RendezvousError("%s wants to come back to the job, which does not go on without lost servers: "
                                  "--on-server-loss continue, P3_ON_SERVER_LOSS" % label)  # fmt: skip
        if (join["rank"] or 0) >= len(servers):
            raise RendezvousError("%s wants to come back to the job, which has servers 0 to %d"
                                  % (label, len(servers) - 1))  # fmt: skip
        self._rendezvous.check_entrant(join, self._roster.by_node[self._roster.nodes("worker")[0]].join)
        return Candidate(entry)

    def _why_it_waits(self, candidate: Candidate) -> str:
        lost = self._agreement.heirs.lost
        if candidate.rank is not None and candidate.rank not in lost:
            return "server %d is there" % candidate.rank
        if not lost:
            return "all servers are there"
        return "the workers did not call members(round) yet, as p3.torch.members(epoch) before each epoch"

    def _forget(self, candidate: Candidate) -> None:
        if self._coming is candidate:
            self._coming = None
            self._consider()

    # On the way

    def is_on_the_way(self, entry: Entry) -> bool:
        """It is no server yet, and the job is as it was, whatever goes wrong with it."""
        return self._coming is not None and self._coming.entry is entry and entry.node is not None

    def expel(self, entry: Entry, text: str) -> None:
        """One on the way, which is told why."""
        entry.catches_up = False
        entry.tell({"kind": "abort", "text": text})
        entry.gone = entry.left = True
        self._report({"state": "server_expelled", "server": entry.node.rank, "is_guest": is_guest(entry.join)})
        log.warning("%s It has not come back.", text)
        asyncio.get_running_loop().call_later(_FAREWELL_S, entry.stream.abort)
        self._forget(self._coming)

    def _give_up_slow(self, candidate: Candidate, after_s: float) -> None:
        if self._coming is candidate and not candidate.entry.ready:
            text = "%s: %s was not ready within %g s (half of P3_TIMEOUT_S)."
            self.expel(candidate.entry, text % (self._label, candidate.entry, after_s))

    # At a mark

    def hold_mark(self, may_begin: bool) -> bool:
        """Whether the mark must not end, nor a worker enter: one is coming back, or begins to."""
        for candidate in self._waiting:
            candidate.tell(self._why_it_waits(candidate))
        if self._returned is None and self._coming is None and may_begin and self._agreement.all_rest:
            self._choose()
        if self._coming is not None and self._coming.entry.ready and self._agreement.heirs.are_known:
            entry, self._coming = self._coming.entry, None
            self._decide(entry.node, {"kind": "return", "join": entry.join})
        mark = self._agreement.mark
        if mark is not None and mark.number == self._began_at and not self._agreement.heirs.are_known:
            return True  # it was lost again, and its heir, which has handed over, must inherit anew
        return self._returned is not None or self._coming is not None

    def _choose(self) -> None:
        """Each rank once at a mark."""
        heirs, number = self._agreement.heirs, self._agreement.mark.number
        lost = [rank for rank in heirs.lost if heirs.are_known and self._tried.get(rank) != number]
        for candidate in sorted(self._waiting, key=lambda one: one.rank is None):
            rank = candidate.rank if candidate.rank is not None else next(iter(lost), None)
            if rank in lost:
                self._tried[rank] = number
                self._waiting.remove(candidate)
                self._coming = candidate
                candidate.place.set_result(self._roster.find("server", rank).node)
                return

    def apply(self, node: Node, decision: dict) -> None:
        """It is the server from here on, as the journal has it."""
        entry, join = self._roster.by_node[node], decision["join"]
        if entry.join is not join:  # so it was with the scheduler before this one, and will come back
            entry = Entry(None, join)
            self._roster.replace(node, entry)
            entry.ready = True
        entry.catches_up = False
        server = entry.node
        for worker in self._roster.nodes("worker"):
            self._roster.by_node[worker].lost_servers.discard(server.rank)
        self._report({"state": "server_returned", "server": server.rank, "is_guest": is_guest(join)})
        self._returned, self._are_told, self._began_at = server, False, self._agreement.mark.number
        keys, heir = self._agreement.take_back_server(server)
        entry.tell({"kind": "start"})
        there = [worker.rank for worker in self._agreement.workers if not self._roster.by_node[worker].left]
        entry.tell({"kind": "members", "ranks": there})
        for key in keys:
            entry.tell(key)
        entry.tell({"kind": "open"})
        self._asked += [_Question("opened", server, server.rank), _Question("handed_over", heir, server.rank)]
        self._tell([(heir, {"kind": "hand_over", "rank": server.rank})])

    # What follows

    def on_message(self, node: Node, message: dict) -> None:
        """`opened` of the server, `handed_over` of its heir, or `taken_back` of a worker."""
        answer = (message["kind"], node, message.get("rank", node.rank), False)
        questions = [one for one in self._asked if (one.kind, one.node, one.rank, one.is_unable) == answer]
        if not questions:
            raise ProtocolError("%s sent a %r message, which is not allowed now" % (node, message["kind"]))
        question = questions[0]  # if there is another one, this is about one that was lost again
        is_current = self._are_told and self._returned is not None and self._returned.rank == question.rank
        question.is_unable = is_current and len(questions) == 1 and not message.get("done", True)
        if not question.is_unable:
            self._asked.remove(question)
        self._go_on()

    def lose(self, node: Node) -> None:
        """A server or a worker: nobody waits for its answers."""
        self._asked = [one for one in self._asked if one.node != node]
        if node == self._returned:
            self._returned = None
            self._asked = [one for one in self._asked if not one.is_unable]
        self._go_on()

    def _go_on(self) -> None:
        if self._returned is None or self._awaits("opened") or self._awaits("handed_over"):
            return
        if not self._are_told:
            self._are_told = True
            self._tell_workers(self._roster.by_node[self._returned].join)
        if not self._awaits("taken_back"):
            if not self.replays:
                log.warning("%s: %s is back", self._label, self._roster.by_node[self._returned])
            self._returned = None

    def _awaits(self, kind: str) -> bool:
        return any((one.kind, one.rank) == (kind, self._returned.rank) for one in self._asked)

    def _tell_workers(self, join: dict) -> None:
        address = {field: join[field] for field in ("host", "port", "local", "machine")}
        rank, changes = self._returned.rank, self._agreement.heirs.changes
        told = {"kind": "server_returned", "rank": rank, "changes": changes, **address}
        there = [worker for worker in self._agreement.workers if self._roster.by_node[worker].hears]
        self._asked += [_Question("taken_back", worker, rank) for worker in there]
        self._tell([(worker, told) for worker in there])
