"""The scheduler: introduces the nodes to each other, passes on what they agree on, and watches them.

Decisions are made by Rendezvous and Agreement; this file carries messages and notices death. Each connection is a task
of its own that only reads; sending queues and returns; so no peer can hold up another.

The life of a job: nodes join (within P3_RENDEZVOUS_TIMEOUT_S) -> everyone gets its rank and the servers' addresses
(`welcome`) -> everyone has connected to everyone it needs (`ready`) -> `start` -> ... -> every worker has said `bye` ->
servers are told to `stop` -> they have said `bye`. The first failure anywhere, and the death of any node, ends the
job instead: all others get its text (`abort`), and the scheduler exits with 1. But with P3_ON_WORKER_LOSS=wait the
others wait for a lost worker, until another process of its rank has joined (replacing.py).
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import math
import os
import socket
import sys
import time
from typing import Dict, Optional

from p3.cluster import auth, channel, encryption, frames, messages
from p3.cluster.agreement import Agreement
from p3.cluster.node import Node, listen, resolve
from p3.cluster.rendezvous import Rendezvous, label_of
from p3.cluster.losses import Loss, Standing, infer
from p3.cluster.stragglers import Stragglers
from p3.cluster.strangers import PACE_S, Gate
from p3.errors import AuthenticationError, ConfigError, DisagreementError, ProtocolError, RendezvousError
from p3.settings import Settings

log = logging.getLogger("p3.scheduler")

_FAREWELL_S = 2.0  # for nodes to take note of a failure and go
_FIRST_MESSAGE = {auth.CONTROL: "join", auth.WATCH: "watch"}
_REMINDER_S = 10.0  # between two log lines about a lost worker


class _Member:
    """A node that has joined: its control connection and what is known of its life."""

    def __init__(self, stream: channel.Stream, join: dict) -> None:
        self.stream = stream
        self.join = join
        self.node: Optional[Node] = None  # once ranks are given
        self.ready = False
        self.watched = False
        self.last_heard = 0.0  # when its last heartbeat came, and the round that it had completed by then
        self.last_round = 0
        self.left = False
        self.gone = False  # lost, and perhaps replaced
        self.catches_up = False  # takes a lost worker's place, and hears of nothing until it is ready

    def __str__(self) -> str:
        return str(self.node) if self.node else label_of(self.join)


class _Vacancy:
    """The place of a lost worker, until another process has taken it."""

    def __init__(self, text: str) -> None:
        self.text = text  # how it was lost
        self.loss: Loss
        self.since = asyncio.get_running_loop().time()  # it, or another process that was on its way, was lost
        self.visitors = 0  # processes that want it, and wait until it is open
        self.is_open = asyncio.Event()  # the servers are ready for another process
        self.is_filled = asyncio.get_running_loop().create_future()


class Scheduler:
    def __init__(self, settings: Settings, listener: socket.socket, status_fd: Optional[int] = None) -> None:
        """`listener` is a listening, non-blocking socket; it is closed when the job ends. `status_fd`: where `p3 run`
        reads what becomes of the job."""
        self._settings = settings
        self._status_fd = status_fd
        self._secret = settings.job_secret()
        self._listener = listener
        self._label = "scheduler (%s)" % settings.root_host
        self._rendezvous = Rendezvous(settings.root_host, settings.num_workers, settings.num_servers)
        self._members: Dict[int, _Member] = {}  # by the order of joining
        self._by_node: Dict[Node, _Member] = {}
        self._agreement: Optional[Agreement] = None  # from `welcome` on
        self._stragglers: Optional[Stragglers] = None
        self._places: list = []  # of the workers, as they are told
        self._servers: list = []  # addresses, as the workers are told
        self._vacancies: Dict[Node, _Vacancy] = {}
        self._times_lost: Dict[Node, int] = {}
        self._taken_at: Dict[int, float] = {}  # by rank: when another process has taken that worker's place
        self._begun: Dict[Node, tuple] = {}  # behind which Standing that was, and how many calls of join() were over
        self._started = asyncio.Event()
        self._end: asyncio.Future = asyncio.get_running_loop().create_future()  # None, or the text of the failure
        self._gate = Gate(self._label, log)
        self._waits: set = set()  # tasks

    async def run(self) -> Optional[str]:
        """Serves one job to its end. Returns the text of its failure, or None if every worker left in order."""
        loop = asyncio.get_running_loop()
        deadline = loop.call_later(self._settings.rendezvous_timeout_s, self._give_up_rendezvous)
        accepting = loop.create_task(self._gate.serve(self._listener, self._serve))
        failure = await self._end
        deadline.cancel()
        await channel.stop_accepting(accepting, self._listener)
        # The nodes close their ends when they have read the last message; whoever does not is left behind.
        await self._gate.close(_FAREWELL_S)
        return failure

    # Connections

    async def _serve(self, sock: socket.socket, source: str) -> None:
        """One connection, from its first byte to its last."""
        tunnel: Optional[encryption.Tunnel] = None
        try:
            try:
                peer = await channel.prove_to_connector(sock, self._secret, "scheduler", self._settings.tls)
                self._gate.proved()
                if peer.purpose not in _FIRST_MESSAGE:
                    raise ProtocolError("it wants a data connection, which only servers accept")
                if self._settings.tls and peer.purpose == auth.CONTROL:
                    tunnel = await self._tunnel(sock, peer.key("join"))
                    sock = tunnel.socket
                first = await channel.read_message(sock, _FIRST_MESSAGE[peer.purpose])
                if first["role"] != peer.role:
                    raise ProtocolError("it proved to be a %s and says it is a %s" % (peer.role, first["role"]))
            except (AuthenticationError, ProtocolError, OSError) as error:
                self._gate.refused(source, error)
                if isinstance(error, auth.Disagreed) and self._agreement is None:
                    self._fail("%s: a node at %s was refused: %s" % (self._label, source, error))
                return
            if first["kind"] == "join":
                stream = await channel.Stream.over(sock)
                try:
                    await self._serve_member(stream, first)
                except Exception as error:  # our own mistake; without a word from us everyone would wait
                    self._fail("%s: %s: %s" % (self._label, type(error).__name__, error))
                    raise
                finally:
                    stream.abort()
            else:
                await self._watch(sock, first, peer)
        finally:
            sock.close()
            if tunnel is not None:
                tunnel.close()

    async def _tunnel(self, sock: socket.socket, key: bytes) -> encryption.Tunnel:
        return encryption.Tunnel(await encryption.secure(sock, key, False))

    async def _serve_member(self, stream: channel.Stream, join: dict) -> None:
        member = _Member(stream, join)
        lost = self._lost_worker(join)
        try:
            if self._end.done():
                raise RendezvousError("the job has ended already")
            if lost is not None:
                await self._take_place(lost, member)
                await self._follow(member)
                return
            self._rendezvous.join(len(self._members), join)
        except RendezvousError as error:
            text = "%s: %s" % (self._label, error)
            self._tell(member, {"kind": "abort", "text": text})
            if self._agreement is None:
                self._fail(text)
            else:  # a running job does not suffer for a latecomer
                log.warning(text)
            await stream.close(_FAREWELL_S)
            return
        self._members[len(self._members)] = member
        log.info("%s: %s joined", self._label, member)
        if self._rendezvous.complete():
            self._welcome()
        await self._follow(member)

    async def _follow(self, member: _Member) -> None:
        """What a member says, to its end."""
        try:
            while not member.left:
                message = await member.stream.receive()
                if member.gone:
                    break
                if message is None:
                    self._lost(member, "closed its control connection without a goodbye: its process probably ended")
                    break
                self._on_message(member, message)
        except (ProtocolError, DisagreementError) as error:
            self._fail("%s: %s" % (self._label, error))
        await member.stream.close(_FAREWELL_S)

    async def _watch(self, sock: socket.socket, first: dict, peer: auth.Acceptor) -> None:
        """Echoes the core's heartbeats, and notices when they cease."""
        member = next(
            (m for node, m in self._by_node.items() if (node.role, node.rank) == (first["role"], first["rank"])), None
        )
        if member is None or member.watched:
            log.warning("%s: refused to watch %s %d", self._label, first["role"], first["rank"])
            return
        member.watched = True
        timeout_s = self._settings.timeout_s
        tunnel: Optional[encryption.Tunnel] = None
        try:
            await channel.send_message(sock, {"kind": "accepted"})
            if self._settings.tls:
                tunnel = await self._tunnel(sock, peer.key("watch of %s %d" % (first["role"], first["rank"])))
                sock = tunnel.socket
            await self._started.wait()
            while True:
                frame = await asyncio.wait_for(channel.read_exactly(sock, frames.HEADER.size), timeout_s)
                member.last_heard = time.monotonic()
                member.last_round = frames.round_of(frame)
                await asyncio.wait_for(channel.send(sock, frame), timeout_s)
        except asyncio.TimeoutError:
            long_ago = time.monotonic() - timeout_s / 2
            others = [m for m in self._members.values() if not m.left and m is not member]
            if others and all(m.last_heard < long_ago for m in others):
                self._lost(member, "sent no heartbeat for %g s, nor did any other node: this host is cut off from "
                           "the network, or they are" % timeout_s)  # fmt: skip
            else:
                self._lost(member, "sent no heartbeat for %g s: it is frozen or unreachable" % timeout_s)
        except (OSError, ProtocolError):
            # The core has ended. Its process says why over the control connection, or closes that as well.
            if not member.left:
                await asyncio.wait({self._end}, timeout=timeout_s)
            self._lost(member, "ended its data plane without a goodbye")
        finally:
            if tunnel is not None:
                sock.close()
                tunnel.close()

    # The job's life

    def _welcome(self) -> None:
        try:
            nodes = self._rendezvous.assign()
        except RendezvousError as error:
            self._fail("%s: %s" % (self._label, error))
            return
        for identity, node in nodes.items():
            self._members[identity].node = node
            self._by_node[node] = self._members[identity]
        workers = sorted(node for node in self._by_node if node.role == "worker")
        servers = sorted(node for node in self._by_node if node.role == "server")
        common = self._by_node[workers[0]].join["settings"]
        self._agreement = Agreement(workers, servers, common["P3_SLICE_ELEMENTS"], common["P3_PARTITIONS"])
        self._servers = [
            {field: self._by_node[server].join[field] for field in ("host", "port", "local", "machine")}
            for server in servers
        ]
        machines: Dict[str, int] = {}  # numbered by the first worker on each
        for worker in workers:
            join = self._by_node[worker].join
            machine = machines.setdefault(join["machine"], len(machines))
            self._places.append({"host": worker.host, "machine": machine, "local": join["local"]})
        settings = self._settings
        self._stragglers = Stragglers(
            workers, [place["machine"] for place in self._places], settings.straggler_s, settings.stuck_s
        )
        for member in self._by_node.values():
            self._tell(member, self._welcome_for(member.node))

    def _welcome_for(self, node: Node, rejoined: Optional[dict] = None) -> dict:
        common = {"servers": self._servers, "workers": self._places, "rejoined": rejoined}
        return dict(common, kind="welcome", rank=node.rank)

    def _on_message(self, member: _Member, message: dict) -> None:
        kind = message["kind"]
        if kind == "failed":
            self._fail(message["text"])
        elif self._end.done():
            pass  # too late to matter
        elif member.node is None:
            raise ProtocolError("%s sent a %r message before it had a rank" % (member, kind))
        elif kind == "ready":
            self._on_ready(member)
        elif kind == "late":
            self._on_late(member.node, message)
        elif kind in ("lost_at", "filled") and member.node.role == "server":
            self._on_loss_message(member.node, message)
        elif kind == "place" and member.node.role == "worker":
            self._on_place(member.node, message)
        elif kind == "bye" and member.node.role == "server":
            member.left = True
            if all(m.left for m in self._members.values()):
                self._end.set_result(None)
        else:
            for node, reply in self._agreement.receive(member.node, message):
                self._tell(self._by_node[node], reply)
                if reply["kind"] == "stop":
                    loop = asyncio.get_running_loop()
                    loop.call_later(self._settings.timeout_s, self._give_up_servers)
            member.left = kind == "bye"
            if kind in ("bye", "joined", "barrier"):
                self._consider_losses()

    def _on_ready(self, member: _Member) -> None:
        if not member.watched or member.ready:
            raise ProtocolError("%s is ready at the wrong time" % member)
        member.ready = True
        if member.catches_up:
            self._readmit(member)
        elif all(m.ready for m in self._members.values()):
            log.info("%s: all nodes are connected", self._label)
            self._started.set()
            self._gate.pace_s = PACE_S
            self._report({"state": "running"})
            for other in self._members.values():
                self._tell(other, {"kind": "start"})

    def _on_late(self, sender: Node, late: dict) -> None:
        """A lost worker is waited for anyway; who has taken its place is late from then on."""
        now = time.monotonic()
        here_s = now - self._taken_at.get(late["worker"], -math.inf)
        waited_s = min(late["waited_s"], here_s)
        if not self._is_lost(late["worker"]) and waited_s >= min(self._settings.straggler_s, late["waited_s"]):
            text = self._stragglers.note(sender, dict(late, waited_s=waited_s), now)
            if text is not None:
                log.warning("%s: %s", self._label, text)

    def _give_up_rendezvous(self) -> None:
        waited = "within %g s" % self._settings.rendezvous_timeout_s
        refused = ""
        if self._gate.refusals:
            refused = " %d connection%s refused, see the scheduler's log: a wrong P3_SECRET?" % (
                self._gate.refusals,
                " was" if self._gate.refusals == 1 else "s were",
            )
        if self._agreement is None:
            self._fail(
                "%s: %s did not join %s. Are they started, with this DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT, and do "
                "the workers open a P3 store (kv = mx.kv.create('p3_sync'))? P3_RENDEZVOUS_TIMEOUT_S allows more "
                "time.%s"
                % (self._label, self._rendezvous.missing(), waited, refused)
            )
        elif not self._started.is_set():
            slow = ", ".join(str(m) for m in self._members.values() if not m.ready)
            self._fail("%s: no connection between the nodes %s: waiting for %s" % (self._label, waited, slow))

    def _give_up_servers(self) -> None:
        slow = ", ".join(str(m) for m in self._members.values() if not m.left)
        if slow:
            self._fail("%s: %s did not end %g s after the last worker" % (self._label, slow, self._settings.timeout_s))

    def _lost(self, member: _Member, what: str) -> None:
        if member.left or member.gone:
            return
        heard = ""
        if self._started.is_set():
            done = "round %d" % member.last_round if member.last_round else "no round"
            heard = "; when last heard of, it had completed %s" % done
        text = "%s: %s %s%s. See its log." % (self._label, member, what, heard)
        if not self._settings.replaces_workers or member.node is None or member.node.role != "worker":
            self._fail(text)
        elif not self._started.is_set():
            self._fail(text + " It cannot be replaced: the job had not started yet.")
        elif not self._end.done():
            self._begin_to_wait(member, text)

    # Replacing a worker

    def _begin_to_wait(self, member: _Member, text: str) -> None:
        member.gone = True
        member.stream.abort()
        node, timeout_s = member.node, self._settings.replacement_timeout_s
        log.warning("%s The others wait for another process of rank %d, at most %g s.", text, node.rank, timeout_s)
        self._report({"state": "lost", "rank": node.rank})
        self._times_lost[node] = self._times_lost.get(node, 0) + 1
        if node not in self._vacancies:  # else who came in its place is lost as well
            self._vacancies[node] = _Vacancy(text)
            task = asyncio.get_running_loop().create_task(self._wait_for(node, self._vacancies[node]))
            self._waits.add(task)
            task.add_done_callback(self._waits.discard)
        for other, message in self._agreement.lose(node):
            self._tell(self._by_node[other], message)
        servers = sorted(other for other in self._by_node if other.role == "server")
        vacancy = self._vacancies[node]
        stores, joins = self._agreement.stores(), self._agreement.joins_called(node)
        vacancy.loss = Loss(node, self._times_lost[node], servers, stores, joins)
        vacancy.since = asyncio.get_running_loop().time()
        vacancy.is_open.clear()
        self._tell_all("server", {"kind": "lost", "rank": node.rank})
        self._consider_losses()

    async def _wait_for(self, node: Node, vacancy: _Vacancy) -> None:
        """Says every now and then who is waited for, and fails the job when that took too long."""
        loop = asyncio.get_running_loop()
        began, timeout_s = loop.time(), self._settings.replacement_timeout_s
        while True:
            left_s = _REMINDER_S if vacancy.visitors else vacancy.since + timeout_s - loop.time()
            if left_s <= 0:
                text = "%s Nobody took its place within %g s (half of P3_WAIT_TIMEOUT_S)." % (vacancy.text, timeout_s)
                self._fail(text)
            await asyncio.wait(
                {self._end, vacancy.is_filled}, timeout=min(_REMINDER_S, left_s), return_when=asyncio.FIRST_COMPLETED
            )
            waited_s = loop.time() - began
            if self._end.done():
                return
            if vacancy.is_filled.done():
                log.warning("%s: %s is there again after %.1f s", self._label, node, waited_s)
                return
            log.warning("%s: waiting for %s for %.0f s", self._label, node, waited_s)

    def _on_loss_message(self, server: Node, message: dict) -> None:
        vacancy = next((v for node, v in self._vacancies.items() if node.rank == message["rank"]), None)
        if vacancy is None:
            raise ProtocolError("%s sent %r of a worker that is not lost" % (server, message["kind"]))
        loss = vacancy.loss
        if message["kind"] == "filled":
            loss.on_filled(server, message)
            if loss.is_vacant:
                vacancy.is_open.set()
            return
        restores = loss.node.rank == 0 and self._agreement.resumed > 0
        try:
            is_all = loss.on_lost_at(server, message, restores)
        except RendezvousError as error:
            self._fail("%s It cannot be replaced: %s." % (vacancy.text, error))
            return
        if is_all:
            self._tell_all("server", loss.fill(loss.pushed))
            self._tell_all("worker", loss.question())
            self._consider_losses()

    def _on_place(self, worker: Node, message: dict) -> None:
        vacancy = next((v for node, v in self._vacancies.items() if node.rank == message["rank"]), None)
        if vacancy is None or vacancy.loss.attempt != message["attempt"]:
            return  # that has been decided
        fill = vacancy.loss.on_place(worker, message)
        if fill is not None:
            self._tell_all("server", fill)
        self._consider_losses()

    def _consider_losses(self) -> None:
        """Whether what is known by now decides something."""
        here = {
            node: self._agreement.joined(node)
            for node, member in self._by_node.items()
            if node.role == "worker" and not member.left and node not in self._vacancies
        }
        losses = [vacancy.loss for vacancy in self._vacancies.values()]
        for loss in losses:
            was_known = loss.standing is not None
            if loss.decide(here, self._agreement.is_uneven):
                for other, message in self._agreement.join_for(loss.node, max(here.values())):
                    self._tell(self._by_node[other], message)
                self._tell_all("worker", loss.question())
            elif loss.standing is not None and not was_known:
                self._tell_all("server", loss.fill(loss.standing.rounds, is_last=True))
        if not here and all(loss.is_asked and loss.standing is None for loss in losses):
            self._infer(losses)
        self._enter_barriers(here)

    def _infer(self, losses: list) -> None:
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
            self._tell_all("server", losses[number].fill(losses[number].standing.rounds, is_last=True))

    def _enter_barriers(self, here: dict) -> None:
        """A lost worker has entered those that the others wait in right behind the step in which it was lost."""
        for number, arrived in self._agreement.barriers():
            missing = [node for node in self._by_node if node.role == "worker" and node not in arrived]
            waiting = [node for node in arrived if node in here]
            losses = [self._vacancies[node].loss for node in missing if node in self._vacancies]
            if len(losses) == len(missing) and waiting and all(loss.is_within(waiting) for loss in losses):
                for node in missing:
                    for other, message in self._agreement.enter_for(node, number):
                        self._tell(self._by_node[other], message)

    def _is_lost(self, rank: int) -> bool:
        return any(node.rank == rank for node in self._vacancies)

    def _lost_worker(self, join: dict) -> Optional[Node]:
        """The node whose place a process wants, if that is one that is lost."""
        if join["role"] != "worker":
            return None
        return next((node for node in self._vacancies if node.rank == join["rank"]), None)

    async def _take_place(self, node: Node, member: _Member) -> None:
        """Gives a process that has joined the place of a lost one. RendezvousError if it cannot have it."""
        vacancy, former = self._vacancies[node], self._by_node[node]
        self._rendezvous.check_replacement(member.join, former.join)
        opening = asyncio.ensure_future(vacancy.is_open.wait())
        hearing = asyncio.ensure_future(member.stream.receive())  # nothing but its end
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
        member.node, member.catches_up = node, True
        self._report({"state": "taken", "rank": node.rank})
        identity = next(i for i, other in self._members.items() if other is former)
        self._members[identity] = self._by_node[node] = member
        standing = vacancy.loss.standing
        past = {
            "step": standing.step,
            "resumed": self._agreement.resumed,
            "barriers": self._agreement.barriers_entered(node),
            "joins": self._agreement.joins,
            "in_join": self._agreement.joins > 0 and self._agreement.joined_at == standing.step,
            "lost": self._times_lost[node],
            "marked": standing.is_marked,
            "numbers": standing.numbers,
        }
        member.stream.send(self._welcome_for(node, past))

    def _readmit(self, member: _Member) -> None:
        """Its connections stand: it trains on with the others."""
        member.catches_up = False
        self._tell(member, {"kind": "start"})
        vacancy = self._vacancies.pop(member.node)
        standing = vacancy.loss.standing
        self._begun[member.node] = standing, self._agreement.joins
        for message in self._agreement.catch_up(member.node, standing.step, standing.rounds):
            self._tell(member, message)
        self._tell_all("worker", {"kind": "found", "rank": member.node.rank})
        for other in self._vacancies.values():
            if other.loss.is_asked and other.loss.standing is None:
                self._tell(member, other.loss.question())
        self._tell(member, {"kind": "caught_up"})
        self._taken_at[member.node.rank] = time.monotonic()
        vacancy.is_filled.set_result(None)

    def _fail(self, text: str) -> None:
        """The first failure is the job's; what follows is mostly its consequence."""
        if not self._end.done():
            text = messages.sendable(text)
            self._report({"state": "failed", "text": text})
            self._end.set_result(text)
            for member in self._members.values():
                member.catches_up = False
                self._tell(member, {"kind": "abort", "text": text})

    def _tell(self, member: _Member, message: dict) -> None:
        if not member.left and not member.gone and not member.catches_up:
            member.stream.send(message)

    def _tell_all(self, role: str, message: dict) -> None:
        for node, member in self._by_node.items():
            if node.role == role:
                self._tell(member, message)

    def _report(self, state: dict) -> None:
        """One JSON line to `p3 run`, if that started us."""
        if self._status_fd is not None:
            try:
                os.write(self._status_fd, json.dumps(state).encode() + b"\n")
            except OSError:  # the launcher has gone, and takes us with it
                pass


def open_listener(settings: Settings, listen_fd: Optional[int]) -> socket.socket:
    """The scheduler's socket: inherited from `p3 run`, or bound to DMLC_PS_ROOT_URI:DMLC_PS_ROOT_PORT."""
    if listen_fd is not None:
        listener = socket.socket(fileno=listen_fd)
        listener.setblocking(False)
        return listener
    settings.require("root_host", "root_port")
    family, address = resolve(settings.root_host, settings.root_port, "DMLC_PS_ROOT_URI")[0]
    try:
        try:
            return listen(address[0], settings.root_port)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            # The name belongs to a service or a translated address in front of this host.
            return listen("::" if family == socket.AF_INET6 else "0.0.0.0", settings.root_port)
    except OSError as error:
        raise ConfigError(
            "scheduler (%s): cannot listen on DMLC_PS_ROOT_PORT=%d: %s. Stop the program that uses the port, or choose "
            "another." % (settings.root_host, settings.root_port, error.strerror)
        ) from None


def main(settings: Settings, listen_fd: Optional[int] = None, status_fd: Optional[int] = None) -> int:
    """Runs the scheduler of one job; the exit code of its process.
    The descriptors are those that `p3 run` passes on."""
    try:
        settings.require("root_host", "num_workers", "num_servers")
        settings.job_secret()
        encryption.require(settings)
        listener = open_listener(settings, listen_fd)
    except (ConfigError, RendezvousError) as error:
        print("p3: %s" % error, file=sys.stderr)
        return 1

    async def serve() -> Optional[str]:
        return await Scheduler(settings, listener, status_fd).run()

    failure = asyncio.run(serve())
    if failure is not None:
        print("p3: the job failed: %s" % failure, file=sys.stderr)
    return 0 if failure is None else 1
