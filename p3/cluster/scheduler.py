"""The scheduler: introduces the nodes to each other, passes on what they agree on, and notices their end.

Decisions are made by Rendezvous and Agreement; this file carries messages. Each connection is a task of its own that
only reads; sending queues and returns; so no peer can hold up another.

The life of a job: nodes join (within P3_RENDEZVOUS_TIMEOUT_S) -> everyone gets its rank and the servers' addresses
(`welcome`) -> everyone has connected to everyone it needs (`ready`) -> `start` -> ... -> every worker has said `bye` ->
servers are told to `stop` -> they have said `bye`. The first failure anywhere, and the death of any node, ends the
job instead: all others get its text (`abort`), and the scheduler exits with 1. But with P3_ON_WORKER_LOSS=continue the
others go on without a lost worker (`departed`), and others may enter the job, in such places or in those that it has
had from the beginning for workers to come (entrances.py). With P3_ON_SERVER_LOSS=continue another server takes over
from one that is lost (heirs.py), until another process takes its place (returns.py). And a scheduler that has a journal
leaves it to another one, if it dies (journal.py): the nodes come back to that.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import time
from typing import Callable, Dict, Hashable, List, Optional, Tuple

from p3.cluster import messages
from p3.cluster.agreement import Agreement
from p3.cluster.connections import auth, channel, descriptors, encryption, frames
from p3.cluster.connections.strangers import MAX_UNPROVED, PACE_S, Gate
from p3.cluster.departures import Departures
from p3.cluster.entrances import DECISIONS, Entrances
from p3.cluster.groups import greatest_groups
from p3.cluster.journal import Journal
from p3.cluster.node import Node, endpoint, listen_as_root
from p3.cluster.rendezvous import Rendezvous
from p3.cluster.returns import Returns
from p3.cluster.roster import Entry, Roster
from p3.cluster.stragglers import Stragglers
from p3.cluster.strategies import told_to_all
from p3.cluster.watching.metrics import METRICS_EVERY_S, METRICS_SPAN_S, Metrics
from p3.cluster.watching.watching import Watching
from p3.cluster.windows import Windows
from p3.errors import AuthenticationError, ConfigError, DisagreementError, ProtocolError, RendezvousError
from p3.plan.strategy import Strategy, of_job, parse
from p3.settings import Settings, sizes_of_groups

log = logging.getLogger("p3.scheduler")

_FAREWELL_S = 2.0  # for nodes to take note of a failure and go
_SECOND_LOOK_S = 0.25  # a worker that has lost a server ends before we may hear of that server's end
_NOTED_EVERY = 64  # messages in the journal, a node is told that it can forget them
_FIRST_MESSAGES = {auth.CONTROL: "join", auth.WATCH: "watch", auth.LOOK: "look"}


class Scheduler:
    def __init__(
        self, settings: Settings, listener: socket.socket, status_fd: Optional[int] = None,
        metrics: Optional[Metrics] = None, strategy: Strategy = Strategy(), journal: Optional[Journal] = None,
    ) -> None:  # fmt: skip
        """`listener` is a listening, non-blocking socket; it is closed when the job ends. `status_fd`: where `p3 run`
        reads what becomes of the job. `metrics`: who wants to have views of it. `strategy`: of as many servers
        as the job has. `journal`: for a scheduler that takes this one's place, or of the one whose place this takes."""
        self._settings = settings
        self._status_fd = status_fd
        self._secret = settings.job_secret()
        self._listener = listener
        self._label = "scheduler (%s)" % settings.root_host
        self._rendezvous = Rendezvous(
            settings.root_host, settings.num_workers, settings.num_servers, settings.max_workers
        )
        self._roster = Roster()
        self._agreement: Optional[Agreement] = None  # from `welcome` on, as the next three
        self._stragglers: Optional[Stragglers] = None
        self._entrances: Optional[Entrances] = None
        self._returns: Optional[Returns] = None
        self._departures = Departures()
        self._started = asyncio.Event()
        self._end: asyncio.Future = asyncio.get_running_loop().create_future()  # None, or the text of the failure
        self._gate = Gate(self._label, log)
        self._windows = Windows(self._roster)
        self._watching = Watching(self._roster, self._end, self._rendezvous.missing)
        self._metrics = metrics
        self._strategy = strategy
        self._journal = journal
        self._is_replaying = self._is_mortal = False
        self._waits_for_absent = False  # in the place of a scheduler that has died, until all are back or given up
        self._unreported: Dict[Tuple[str, Optional[int]], dict] = {}  # by role and rank, what a replay came to last
        self._refuted: List[Entry] = []  # in what the journal has: who must go

    def take_snapshots_at_signals(self) -> None:
        """SIGUSR1: of the job, behind its next step; SIGUSR2: and then it ends. Unless this process is to ignore them.
        In the main thread."""
        for number, ends in ((signal.SIGUSR1, False), (signal.SIGUSR2, True)):
            if signal.getsignal(number) is signal.SIG_DFL:
                asyncio.get_running_loop().add_signal_handler(number, self._demand_snapshot, ends)

    def _demand_snapshot(self, ends: bool) -> None:
        if self._started.is_set() and not self._end.done():
            if self._journal is not None and not self._is_replaying:
                self._journal.add_demand(ends)
                self._look_at_journal()
            self._roster.tell_each(self._agreement.demand_snapshot(ends))

    async def run(self) -> Optional[str]:
        """Serves one job to its end. Returns the text of its failure, or None if every worker left in order."""
        loop = asyncio.get_running_loop()
        if self._journal is not None:
            self._take_over(self._journal)
        deadline = loop.call_later(self._settings.rendezvous_timeout_s, self._give_up_rendezvous)
        accepting = loop.create_task(self._gate.serve(self._listener, self._serve))
        feeding = loop.create_task(self._feed_metrics())
        failure = await self._end
        if failure is None:
            self._name_unused_entries()
        deadline.cancel()
        await channel.cancel(feeding)
        await channel.stop_accepting(accepting, self._listener)
        with contextlib.suppress(OSError):  # for whoever started us as well: a node that comes back now is refused
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        # The nodes close their ends when they have read the last message; whoever does not is left behind.
        await self._gate.close(_FAREWELL_S)
        return failure

    def _name_unused_entries(self) -> None:
        unused = self._agreement.entries_unused()
        if unused:
            names = ", ".join(map(repr, unused[:10])) + (" and others" if unused[10:] else "")
            log.warning("strategy %s: the job had no keys %s, which have entries there", self._strategy.path, names)

    async def _feed_metrics(self) -> None:
        await self._started.wait()
        if self._metrics is not None:
            await self._watching.feed(self._metrics.take, METRICS_EVERY_S, METRICS_SPAN_S)

    # Connections

    async def _serve(self, sock: socket.socket, source: str) -> None:
        """One connection, from its first byte to its last."""
        with contextlib.ExitStack() as at_end:
            at_end.callback(sock.close)

            async def encrypted(subject: str) -> socket.socket:
                """What takes the place of `sock` from here on: with P3_TLS=1 it has a key for that subject."""
                if not self._settings.tls:
                    return sock
                tunnel = encryption.Tunnel(await encryption.secure(sock, peer.key(subject), False))
                at_end.callback(tunnel.close)
                at_end.callback(tunnel.socket.close)
                return tunnel.socket

            try:
                peer = await channel.prove_to_connector(sock, self._secret, "scheduler", self._settings.tls)
                self._gate.proved()
                if peer.purpose == auth.DATA:
                    raise ProtocolError("it wants a data connection, which only servers accept")
                kind = _FIRST_MESSAGES[peer.purpose]
                control = sock if peer.purpose == auth.WATCH else await encrypted(kind)
                first = await channel.read_message(control, kind)
                role = "watcher" if peer.purpose == auth.LOOK else first["role"]
                if role != peer.role:
                    raise ProtocolError("it proved to be a %s, but says it is a %s" % (peer.role, role))
            except (AuthenticationError, ProtocolError, OSError) as error:
                self._gate.refused(source, error)
                is_node = getattr(error, "purpose", None) != auth.LOOK
                if isinstance(error, auth.Disagreed) and is_node and self._agreement is None:
                    self._fail("%s: a node at %s was refused: %s" % (self._label, source, error))
                return
            if first["kind"] == "watch":
                await self._watch(sock, first, encrypted)
                return
            if first["kind"] == "look":
                await self._watching.serve(control, first)
                return
            stream = await channel.Stream.over(control)
            try:
                await self._serve_node(stream, first)
            except Exception as error:  # our own mistake; without a word from us everyone would wait
                self._fail("%s: %s: %s" % (self._label, type(error).__name__, error))
                raise
            finally:
                stream.abort()

    async def _serve_node(self, stream: channel.Stream, join: dict) -> None:
        entry = Entry(stream, join)
        try:
            if self._end.done():
                raise RendezvousError("the job has ended already")
            if join["back"] is not None:
                await self._follow(self._let_back_in(stream, join))
                return
            if join["enters"]:
                if not self._started.is_set():
                    raise RendezvousError("%s wants to join a job that does not run yet" % entry)
                self._depart_former(join)
                entrances = self._returns if join["role"] == "server" else self._entrances
                await entrances.let_in(entry, self._nodes, self._journal is not None)
                await self._follow(entry)
                return
            self._rendezvous.join(join)
        except RendezvousError as error:
            text = "%s: %s" % (self._label, error)
            entry.tell({"kind": "abort", "text": text})
            if self._agreement is None and not join["enters"]:
                self._fail(text)
            else:  # a running job does not suffer for a latecomer, nor one that begins for who is too early
                log.warning(text)
            await stream.close(_FAREWELL_S)
            return
        self._roster.entries.append(entry)
        log.info("%s: %s joined", self._label, entry)
        if self._rendezvous.complete():
            self._welcome()
        await self._follow(entry)

    async def _follow(self, entry: Entry) -> None:
        """What a node says, to its end."""
        try:
            while not entry.left:
                message = await entry.stream.receive()
                if entry.gone:
                    break
                if message is None:
                    self._lost(entry, "closed its control connection without a goodbye: its process probably ended")
                    break
                self._on_message(entry, message)
        except (ProtocolError, DisagreementError) as error:
            text = "%s: %s" % (self._label, error)
            self._expel(entry, text) if self._is_on_probation(entry) else self._fail(text)
        await entry.stream.close(_FAREWELL_S)

    def _is_on_probation(self, entry: Entry) -> bool:
        return self._agreement is not None and (
            self._entrances.is_on_probation(entry) or self._returns.is_on_the_way(entry)
        )

    def _expel(self, entry: Entry, text: str) -> None:
        """One on probation, which is told why."""
        (self._returns if entry.node.role == "server" else self._entrances).expel(entry, text)

    async def _watch(self, sock: socket.socket, first: dict, encrypted: Callable) -> None:
        """Echoes the heartbeats of a node's core, with what windows go by, and notices when they cease."""
        node = "%s %d" % (first["role"], first["rank"])
        entry = self._roster.find(first["role"], first["rank"])
        if entry is None or entry.watched or entry.stream is None:  # that of one that has come back to another one
            log.warning("%s: refused to watch %s", self._label, node)
            return
        entry.watched = True
        timeout_s = self._settings.timeout_s
        try:
            await channel.send_message(sock, {"kind": "accepted"})
            sock = await encrypted("watch of " + node)
            await self._started.wait()
            while True:
                frame = await asyncio.wait_for(channel.read_exactly(sock, frames.HEADER.size), timeout_s)
                if not frames.is_heartbeat(frame):
                    raise ProtocolError("the core ends")
                entry.last_heard = time.monotonic()
                entry.last_round = frames.round_of(frame)
                self._watching.note_heartbeat(entry)
                link = self._windows.note(entry, frames.link_share_of(frame), entry.last_heard)
                await asyncio.wait_for(channel.send(sock, frames.with_link_share(frame, link)), timeout_s)
        except asyncio.TimeoutError:
            what = "sent no heartbeat for %g s" % timeout_s
            long_ago = time.monotonic() - timeout_s / 2
            others = [other for other in self._roster.entries if not other.left and other is not entry]
            if others and all(other.last_heard < long_ago for other in others):
                what += ", nor did any other node: this host is cut off from the network, or they are"
            else:
                what += ": it is frozen or unreachable"
        except (OSError, ProtocolError):
            # The core has ended. Its process says why over the control connection, or closes that as well.
            if not entry.left:
                await asyncio.wait({self._end}, timeout=timeout_s)
            what = "ended its data plane without a goodbye"
        self._lost(entry, what)

    # The job's life

    def _welcome(self) -> None:
        try:
            self._begin(self._rendezvous.assign())
        except RendezvousError as error:
            self._fail("%s: %s" % (self._label, error))
            return
        outlived = self._journal is not None
        for node, entry in self._roster.by_node.items():
            entry.tell({"kind": "welcome", "rank": node.rank, "entered": None, "outlived": outlived})
        nodes = self._nodes()
        self._roster.tell_each((node, nodes) for node in self._roster.by_node)

    def _begin(self, nodes: List[Node]) -> None:
        """`nodes`: of the entries, in the order of joining."""
        roster, settings = self._roster, self._settings
        roster.assign(nodes)
        workers, servers = roster.nodes("worker"), roster.nodes("server")
        common = roster.by_node[workers[0]].join["settings"]
        to_come = range(len(workers), settings.places)
        self._agreement = Agreement(
            workers, servers, common["P3_SLICE_ELEMENTS"], common["P3_PARTITIONS"], self._strategy, to_come
        )
        groups = sizes_of_groups(common["P3_GROUPS"])
        machines: List[Hashable] = [roster.by_node[worker].join["machine"] for worker in workers]
        if groups:  # whose leaders see who is late, in place of machines'
            machines = [*greatest_groups(len(workers), groups)]
        roster.add_places("worker", to_come)
        machines += [("of rank", rank) for rank in to_come]  # whatever that will be: nobody pushes for it
        self._stragglers = Stragglers(roster.nodes("worker"), machines, settings.straggler_s, settings.stuck_s)
        self._returns = Returns(
            settings, self._label, roster, self._rendezvous, self._agreement, self._end, self._decide,
            lambda: self._entrances.consider(), self._tell, self._report,
        )  # fmt: skip
        self._entrances = Entrances(
            settings, self._label, roster, self._rendezvous, self._agreement, self._end, self._decide, self._depart,
            self._dismiss, self._tell, self._report, self._returns.hold_mark,
        )  # fmt: skip

    def _nodes(self) -> dict:
        def told(role: str) -> List[Optional[dict]]:
            joins = [self._roster.by_node[node].join for node in self._roster.nodes(role)]
            fields = ("host", "port", "local", "machine")
            return [None if join is None else {field: join[field] for field in fields} for join in joins]

        workers, servers = told("worker"), told("server")
        for server, node in zip(servers, self._roster.nodes("server")):
            heir = self._agreement.heirs.heir_of(node)
            server["heir"] = None if heir is None else heir.rank
        return {
            "kind": "nodes", "servers": servers, "workers": workers, "began_with": self._settings.num_workers,
            "strategy": told_to_all(self._strategy), "server_changes": self._agreement.heirs.changes,
        }  # fmt: skip

    def _on_message(self, entry: Entry, message: dict) -> None:
        kind = message["kind"]
        if kind == "failed" and self._is_on_probation(entry):
            self._expel(entry, message["text"])
            return
        # It would count as a member's goodbye, and stay so after the process has departed.
        if kind == "bye" and self._is_on_probation(entry):
            raise DisagreementError("%s said goodbye before its first members()" % entry)
        if entry.catches_up and kind not in ("ready", "failed"):
            raise ProtocolError("%s sent a %r message before it had taken its place" % (entry, kind))
        if messages.counts(kind):
            self._note(entry, message)
        if kind == "failed":
            self._fail(message["text"])
        elif self._end.done():
            pass  # too late to matter
        elif entry.node is None:
            raise ProtocolError("%s sent a %r message before it had a rank" % (entry, kind))
        elif kind == "ready":
            self._on_ready(entry)
        elif kind == "late":
            self._on_late(entry.node, message)
        elif kind == entry.node.role + "_reported":
            self._watching.take(entry, message)
        elif (kind, entry.node.role) == ("server_lost", "worker"):
            self._on_server_lost(entry, message["rank"], message["changes"])
        elif (kind, entry.node.role) == ("admitted", "server"):
            self._entrances.on_admitted(entry.node, message)
        elif (kind, entry.node.role) == ("dismissed", "server"):
            self._end_departures(self._departures.on_dismissed(entry.node, message))
        elif (kind, entry.node.role) in (("opened", "server"), ("handed_over", "server"), ("taken_back", "worker")):
            self._returns.on_message(entry.node, message)
            self._entrances.consider()
        elif kind == "bye" and entry.node.role == "server":
            entry.left = True
            self._end_behind_the_last()
        else:
            self._tell(self._agreement.receive(entry.node, message))
            entry.left = kind == "bye"
            if entry.left:
                self._report({"state": "left", "rank": entry.node.rank})
            if kind == "snapshot_taken":
                self._report({"state": "saved", "round": message["round"]})
            self._entrances.on_message(entry, message)
            self._entrances.consider()

    def _tell(self, decided) -> None:
        """What Agreement has decided."""
        self._roster.tell_each(decided)
        if decided and decided[-1][1]["kind"] == "stop":
            asyncio.get_running_loop().call_later(self._settings.timeout_s, self._give_up_servers)

    def _on_ready(self, entry: Entry) -> None:
        if not entry.watched or entry.ready:
            raise ProtocolError("%s said that it is ready at the wrong time" % entry)
        entry.ready = True
        if entry.catches_up and entry.node.role == "server":
            self._entrances.consider()
        elif entry.catches_up:
            self._entrances.on_ready(entry)
        elif all(other.ready for other in self._roster.entries):
            log.info("%s: all nodes are connected", self._label)
            self._started.set()
            self._watching.begin()
            self._gate.pace_s = PACE_S
            if self._journal is not None:
                strategy = None if self._strategy == Strategy() else [self._strategy.text(), self._strategy.path]
                self._journal.begin([(other.node, other.join) for other in self._roster.entries], strategy)
            self._report({"state": "running"})
            for other in self._roster.entries:
                other.tell({"kind": "start"})

    def _on_late(self, sender: Node, late: dict) -> None:
        """Who is lost departs, and who is on the way is late only when it is there."""
        entry = self._roster.find("worker", late["worker"])
        if entry is not None and (entry.gone or entry.catches_up):
            return
        if entry is not None:
            self._stragglers.name(entry.node)
        text = self._stragglers.note(sender, late, time.monotonic())
        if text is not None:
            log.warning("%s: %s", self._label, text)

    # Taking the place of a scheduler that has died

    def _decide(self, node: Node, decision: dict) -> None:
        """About a process that enters, or comes back; written down before anything follows from it."""
        self._write_down(node, decision)
        self._apply(node, decision)

    def _apply(self, node: Node, decision: dict) -> None:
        (self._returns if decision["kind"] == "return" else self._entrances).apply(node, decision)

    def _write_down(self, node: Node, message: dict) -> None:
        """Before anything follows from it."""
        if self._journal is not None:
            self._journal.add(node, message)
            self._look_at_journal()

    def _note(self, entry: Entry, message: dict) -> None:
        """For a scheduler that may take this one's place, before anything follows from the message."""
        if self._journal is None or not self._started.is_set():
            return
        entry.noted += 1
        if self._is_replaying:
            return
        self._write_down(entry.node, message)
        if entry.noted % _NOTED_EVERY == 0 or message["kind"] == "bye":
            entry.tell({"kind": "noted", "count": entry.noted})

    def _look_at_journal(self) -> None:
        if self._journal.is_full and not self._is_mortal:
            self._is_mortal = True
            self._report({"state": "mortal"})
            log.warning("%s: its journal is full; from here on the job ends if this process dies", self._label)

    def _take_over(self, journal: Journal) -> None:
        """If that is another scheduler's: decides what that had decided, and waits for the nodes to come back."""
        records = journal.read()
        first = next(records, None)
        if first is None:
            return
        self._is_replaying = True
        if first["strategy"] is not None:  # its file may be another one by now
            self._strategy = parse(*first["strategy"])
        for *_, join in first["members"]:
            self._rendezvous.join(join)  # so that it lets nobody else in
            self._roster.entries.append(Entry(None, join))
        self._begin([Node(role, rank, host) for role, rank, host, _ in first["members"]])
        self._started.set()
        self._entrances.replays = self._returns.replays = True
        for record in records:
            if type(record) is bool:
                self._demand_snapshot(record)
            else:
                role, rank, message = record
                self._replay(self._roster.find(role, rank), message)
        self._is_replaying = self._returns.replays = False
        for state in self._unreported.values():
            self._report(state)
        self._look_at_journal()
        self._watching.begin()
        for entry in self._refuted:  # the one before was about to say so
            self._entrances.expel(entry, "%s: it said what it must not say" % self._label)
        self._entrances.go_on()
        asyncio.get_running_loop().call_later(self._settings.timeout_s, self._give_up_absent)
        absent = ", ".join(map(str, self._absent()))
        log.warning("%s: took the place of one that has died; waiting for %s to come back", self._label, absent)
        self._waits_for_absent = True

    def _replay(self, entry: Entry, message: dict) -> None:
        try:
            if message["kind"] == "server_departed":
                self._let_server_go(entry, "%s: %s was lost." % (self._label, entry))
            elif message["kind"] == "departed":
                self._let_go(entry, message, "%s: %s was lost." % (self._label, entry))
            elif message["kind"] in (*DECISIONS, "return"):
                self._apply(entry.node, message)
            else:
                self._on_message(entry, message)
        except (ProtocolError, DisagreementError) as error:
            if self._is_on_probation(entry):
                self._refuted.append(entry)
            else:
                self._fail("%s: %s" % (self._label, error))

    def _absent(self) -> List[Entry]:
        return [entry for entry in self._roster.entries if entry.stream is None and not entry.left]

    def _let_back_in(self, stream: channel.Stream, join: dict) -> Entry:
        """RendezvousError if it was none of the job's nodes, or is here already."""
        entry = self._roster.find(join["role"], join["back"]["rank"]) if self._agreement is not None else None
        is_known = entry is not None and dict(entry.join, back=join["back"]) == join
        if is_known and entry.gone and (entry.left or entry.node.role == "server"):  # about to be given up
            raise RendezvousError("%s was not heard of for too long, and the job has gone on without it" % entry)
        if not is_known or entry.stream is not None or entry.left:
            raise RendezvousError("a %s wants to come back that nobody misses" % join["role"])
        entry.come_back(stream, join["back"]["heard"])
        entry.ready = True
        asyncio.get_running_loop().call_later(self._settings.timeout_s, self._give_up_unwatched, entry)
        self._resume_if_none_is_absent()
        return entry

    def _resume_if_none_is_absent(self) -> None:
        """Once, behind another scheduler's death: who was absent has come back, or has left the job."""
        if self._waits_for_absent and not self._absent() and not self._end.done():
            self._waits_for_absent = False
            self._gate.pace_s = PACE_S
            log.warning("%s: all nodes have come back", self._label)
            self._report({"state": "resumed"})

    def _depart_former(self, join: dict) -> None:
        """Of a process that had entered when the scheduler before this one died, and had not heard of that: it comes
        anew, and not back."""
        for entry in [one for one in self._absent() if one.join == join]:
            entry.gone = True
            self._depart(entry, "%s: %s had not heard yet that it had joined the job, and comes anew."
                                % (self._label, entry))  # fmt: skip

    def _give_up_unwatched(self, entry: Entry) -> None:
        """Of whom nothing would be heard if it froze."""
        if not entry.watched and not self._end.done():
            self._lost(entry, "came back, and did not open its watch connection within %g s" % self._settings.timeout_s)

    def _give_up_absent(self) -> None:
        absent = self._absent()
        if not absent:
            return
        has_server, has_worker = (any(one.node.role == role for one in absent) for role in ("server", "worker"))
        text = "%s: another scheduler has died, and %s did not come back within %g s of its end"
        outlives = self._settings.outlives_servers or not has_server
        if not outlives or (has_worker and not self._settings.outlives_workers):
            self._fail(text % (self._label, ", ".join(map(str, absent)), self._settings.timeout_s))
            return
        for entry in absent:
            entry.gone = True
            depart = self._depart_server if entry.node.role == "server" else self._depart
            depart(entry, text % (self._label, entry, self._settings.timeout_s) + ".")

    # Deadlines

    def _give_up_rendezvous(self) -> None:
        waited = "within %g s" % self._settings.rendezvous_timeout_s
        if self._agreement is None:
            refused = ""
            if self._gate.shortage is not None:
                refused = " Connections could not be accepted: %s." % self._gate.shortage
            elif self._gate.refusals:
                were = " was" if self._gate.refusals == 1 else "s were"
                refused = " %d connection%s refused, see the scheduler's log: a wrong P3_SECRET?"
                refused %= (self._gate.refusals, were)
            self._fail(
                "%s: %s did not join %s. Were they started, with this DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT, and do "
                "the workers join the job (p3.torch.DistributedOptimizer, or with MXNet mx.kv.create('p3_sync'))? "
                "P3_RENDEZVOUS_TIMEOUT_S allows more time.%s"
                % (self._label, self._rendezvous.missing(), waited, refused)
            )
        elif not self._started.is_set():
            slow = ", ".join(str(entry) for entry in self._roster.entries if not entry.ready)
            self._fail("%s: no connection between the nodes %s: waiting for %s" % (self._label, waited, slow))

    def _give_up_servers(self) -> None:
        """Behind the last worker a job that goes on without servers has no need of them."""
        slow = [entry for entry in self._roster.entries if not entry.left and not entry.gone]
        what = "did not end %g s after the last worker" % self._settings.timeout_s
        if self._settings.outlives_servers:
            for entry in slow:
                self._lost(entry, what)
        elif slow:
            self._fail("%s: %s %s" % (self._label, ", ".join(map(str, slow)), what))

    def _lost(self, entry: Entry, what: str) -> None:
        if entry.left or entry.gone:
            return
        heard = ""
        if self._started.is_set():
            done = "round %d" % entry.last_round if entry.last_round else "no round"
            heard = "; when last heard from, it had completed %s" % done
        text = "%s: %s %s%s. See its log." % (self._label, entry, what, heard)
        if self._returns is not None and self._returns.is_on_the_way(entry):
            self._returns.expel(entry, text)
        elif entry.node is not None and entry.node.role == "server" and self._settings.outlives_servers:
            self._lose_server(entry, text)
        elif not self._settings.outlives_workers or entry.node is None or entry.node.role != "worker":
            self._fail(text)
        elif not self._started.is_set():
            self._fail(text + " The job cannot do without it: it had not started yet.")
        elif not self._end.done():
            entry.gone = True
            if entry.stream is not None:
                entry.stream.abort()
            asyncio.get_running_loop().call_later(_SECOND_LOOK_S, self._depart, entry, text)

    # Going on without a worker

    def _depart(self, entry: Entry, text: str) -> None:
        """`text`: how it was lost. Once: it may be given up for another reason, too, while that was to be settled, and
        its place may be another one's by then."""
        if not entry.left:
            self._dismiss(entry, text)

    def _dismiss(self, entry: Entry, text: str) -> None:
        """The same without that question: of one on its way, whose entry is still its predecessor's."""
        if self._end.done():
            return
        departed = {"kind": "departed", "rank": entry.node.rank}
        self._write_down(entry.node, departed)
        self._let_go(entry, departed, text)

    def _let_go(self, entry: Entry, departed: dict, text: str) -> None:
        entry.gone = entry.left = True
        was_member = not self._entrances.drop(entry.node)
        self._returns.lose(entry.node)
        servers = [one for one in self._roster.nodes("server") if self._agreement.heirs.is_alive(one)]
        self._departures.begin(entry.node, was_member, text, servers)
        self._roster.tell_all("server", departed)
        self._entrances.consider()
        if not was_member:
            self._say_departed(entry.node, text)
            self._end_behind_the_last()
        self._resume_if_none_is_absent()

    def _end_departures(self, over: list) -> None:
        """Servers have dismissed these workers; now the others hear of it."""
        for departure in over:
            node, text = departure.worker, departure.text
            try:
                told = self._agreement.depart(node)
            except DisagreementError as error:
                self._fail("%s The job cannot go on without it: %s." % (text, error))
                return
            self._say_departed(node, text)
            self._roster.tell_all("worker", {"kind": "departed", "rank": node.rank})
            self._tell(told)
            self._entrances.consider()

    def _say_departed(self, node: Node, text: str) -> None:
        if not self._is_replaying:
            log.warning("%s The others go on without it.", text if text.endswith(".") else text + ".")
        self._report({"state": "departed", "rank": node.rank})

    # Going on without a server

    def _on_server_lost(self, worker: Entry, rank: int, changes: int) -> None:
        """What not all workers reach is no server, though it may be alive. A worker that is itself cut off does not
        come to say so, or departs in a moment; so does one that was, and reaches no server any more. One that joins
        departs, whosever fault it is. It is said only once, perhaps to the scheduler before this one."""
        entry = self._roster.find("server", rank)
        if entry is None or not self._settings.outlives_servers:
            raise ProtocolError("%s says that it has lost server %d" % (worker, rank))
        if self._is_on_probation(worker):
            raise DisagreementError("%s lost its connection to %s while it joined the job" % (worker, entry))
        if self._agreement.heirs.was_former(rank, changes):
            return
        worker.lost_servers.add(rank)
        if not entry.gone and not entry.left and not self._end.done():
            asyncio.get_running_loop().call_later(_SECOND_LOOK_S, self._believe, worker, entry)

    def _believe(self, worker: Entry, entry: Entry) -> None:
        if worker.gone or entry.gone or entry.left or self._end.done():
            return
        if worker.stream is None and not worker.left:  # if it lives, it comes back in a moment
            asyncio.get_running_loop().call_later(_SECOND_LOOK_S, self._believe, worker, entry)
        elif not worker.left and worker.lost_servers >= {one.node.rank for one in self._servers_there}:
            self._lost(worker, "reaches no server any more")
        else:
            entry.tell({"kind": "abort", "text": "%s: %s has lost its connection to it, and the others go on without it"
                                                 % (self._label, worker)})  # fmt: skip
            self._lost(entry, "is not reached by %s any more" % worker)

    @property
    def _servers_there(self) -> List[Entry]:
        return [one for one in self._roster.entries if one.node.role == "server" and one.hears]

    def _lose_server(self, entry: Entry, text: str) -> None:
        if not self._started.is_set():
            self._fail(text + " The job cannot do without it: it had not started yet.")
        elif not self._end.done():
            entry.gone = True
            if entry.stream is not None:
                asyncio.get_running_loop().call_later(_FAREWELL_S, entry.stream.abort)
            asyncio.get_running_loop().call_later(_SECOND_LOOK_S, self._depart_server, entry, text)

    def _depart_server(self, entry: Entry, text: str) -> None:
        if self._end.done() or entry.left:  # given up as absent, too, while this was to be settled
            return
        self._write_down(entry.node, {"kind": "server_departed"})
        self._let_server_go(entry, text)

    def _let_server_go(self, entry: Entry, text: str) -> None:
        entry.gone = entry.left = True
        is_needed = any(not one.left for one in self._roster.entries if one.node.role == "worker")
        try:
            told = self._agreement.depart_server(entry.node) if is_needed else []
        except DisagreementError as error:
            self._fail("%s The job cannot go on without it: %s." % (text, error))
            return
        if not self._is_replaying:
            what = "Another server takes over from it" if is_needed else "All workers were done by then"
            log.warning("%s %s.", text, what)
        self._report({"state": "server_departed", "server": entry.node.rank})
        self._tell(told)  # first, as one that replays it: whose departures then follow are written down behind it
        self._returns.lose(entry.node)
        self._end_departures(self._departures.lose_server(entry.node))
        self._entrances.lose_server(entry.node)
        self._end_behind_the_last()
        self._resume_if_none_is_absent()

    def _end_behind_the_last(self) -> None:
        if all(other.left for other in self._roster.entries):
            self._report({"state": "over"})
            self._end.set_result(None)

    def _fail(self, text: str) -> None:
        """The first failure is the job's; what follows is mostly its consequence."""
        if not self._end.done():
            text = messages.sendable(text)
            self._report({"state": "failed", "text": text})
            self._end.set_result(text)
            for entry in self._roster.entries:
                entry.catches_up = False
                entry.tell({"kind": "abort", "text": text})

    def _report(self, state: dict) -> None:
        """One JSON line to `p3 run`, if that started us. What is replayed it has mostly heard, and of a worker that has
        departed and come back it must not hear the former alone."""
        if self._is_replaying and state["state"] != "failed":
            if state["state"] != "saved":
                of = ("server", state["server"]) if "server" in state else ("worker", state.get("rank"))
                self._unreported[of] = state
        elif self._status_fd is not None:
            with contextlib.suppress(OSError):  # the launcher has gone, and takes us with it
                os.write(self._status_fd, json.dumps(state).encode() + b"\n")


def open_listener(settings: Settings, listen_fd: Optional[int]) -> socket.socket:
    """The scheduler's socket: inherited from `p3 run`, or bound to DMLC_PS_ROOT_URI:DMLC_PS_ROOT_PORT."""
    if listen_fd is not None:
        listener = socket.socket(fileno=listen_fd)
        listener.setblocking(False)
        return listener
    settings.require("root_host", "root_port")
    try:
        return listen_as_root(settings.root_host, settings.root_port)
    except ConfigError as error:
        raise ConfigError("scheduler (%s): %s" % (settings.root_host, error)) from None


def _provide_descriptors(settings: Settings) -> None:
    each = descriptors.PER_NODE_TLS if settings.tls else descriptors.PER_NODE
    nodes = settings.places + settings.num_servers
    spare = 2 * MAX_UNPROVED
    descriptors.provide(each * nodes, "scheduler (%s)" % settings.root_host, "%d nodes" % nodes, spare)


def main(
    settings: Settings, listen_fd: Optional[int] = None, status_fd: Optional[int] = None,
    journal_fd: Optional[int] = None,
) -> int:  # fmt: skip
    """Runs the scheduler of one job; the exit code of its process. `p3 run` passes the descriptors on."""
    try:
        settings.require("root_host", "num_workers", "num_servers")
        settings.job_secret()
        encryption.require(settings)
        settings.require_heir(settings.num_servers)
        _provide_descriptors(settings)
        journal = None if journal_fd is None else Journal(journal_fd)
        has_died = journal is not None and journal.has_begun  # the one before, which had read it
        strategy = Strategy() if has_died else of_job(settings.strategy, settings.num_servers)
        metrics = None if settings.metrics_port is None else Metrics(settings)
        listener = open_listener(settings, listen_fd)
    except (ConfigError, RendezvousError) as error:
        print("p3: %s" % error, file=sys.stderr)
        return 1

    if metrics is not None:
        print("p3: metrics at http://%s/metrics" % endpoint(settings.root_host, metrics.port), file=sys.stderr)

    async def serve() -> Optional[str]:
        scheduler = Scheduler(settings, listener, status_fd, metrics, strategy, journal)
        scheduler.take_snapshots_at_signals()
        return await scheduler.run()

    failure = asyncio.run(serve())
    if metrics is not None:
        metrics.close()
    if failure is not None:
        print("p3: the job failed: %s" % failure, file=sys.stderr)
    return 0 if failure is None else 1
