"""A node's membership in the job: its connection to the scheduler, from the first attempt to the last message.

Where a scheduler that dies is started again (`outlived`), the node comes back to that by itself, in receive(), and
neither side misses a message that counts (journal.py). Meanwhile messages are kept, and the core goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from typing import Any, List, Optional, Tuple

from p3.cluster.connections import auth, channel, encryption
from p3.cluster.connections.channel import Stream
from p3.cluster.connections.vans import DoorStep, Van
from p3.cluster.journal import Outbox
from p3.cluster.messages import PROTOCOL_VERSION, counts
from p3.cluster.node import REFUSED, Node, address_beside, connect, endpoint, machine_id
from p3.cluster.strategies import read_of_job
from p3.errors import AuthenticationError, ProtocolError, RendezvousError
from p3.placement import Placement
from p3.plan.strategy import Strategy
from p3.settings import Settings

log = logging.getLogger("p3.member")

_FAREWELL_S = 2.0  # for the scheduler to read what we have sent
_MARGIN_S = 5.0  # the scheduler, which knows who is missing, gives up first
_RETRY_S = 0.2
_CAUSE_S = 0.25  # for the scheduler to say why a step has failed


class _Refused(Exception):
    """By the scheduler, for good."""


class SchedulerGone(RendezvousError):
    """The scheduler has ended."""


class Member:
    """What join() returns; all methods belong to the event loop's thread."""

    host: str
    node: Node
    door: Optional[DoorStep] = None  # of a server, and of a worker that others of its machine may connect to
    servers: List[dict]  # host, port, local, machine; by rank
    workers: List[Optional[dict]]  # host, local, machine; by rank; None: a place that no process has had
    began_with: int  # workers
    strategy: Strategy  # Strategy.choices of the job's
    entered: Optional[dict]  # of one that has entered a running job, or is a server that comes back
    server_changes: int  # how often a server of the job had been lost or come back by then
    outlived = False  # the scheduler, by its nodes: another one takes its place if it dies

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._secret = settings.job_secret()
        self._label: str = settings.role
        self._stream: Stream
        self._tunnel: Optional[encryption.Tunnel] = None  # what the stream goes through
        self._core: Any = None  # from outlive() on
        self._outlives = False  # a scheduler that dies, up to the job's end
        self._outbox, self._heard = Outbox(), 0  # messages that count, sent and received
        self._coming_back: Optional[asyncio.Task] = None
        self._has_said_bye = False
        self._last_words: Optional[dict] = None  # why it fails, until a scheduler answers that the job does
        self._waits_as = "the scheduler has not said why"  # while it waits to be let in

    @classmethod
    async def join(cls, settings: Settings) -> Member:
        """Connects, proves itself, and waits until all nodes are there.

        Raises ConfigError, AuthenticationError, or RendezvousError: the scheduler's own words where it has any.
        """
        settings.require("role", "root_host", "root_port", *(() if settings.joins else ("num_workers", "num_servers")))
        member = cls(settings)
        encryption.require(settings)
        try:
            if settings.joins:
                await member._enter()
            else:
                await member._connect()
                await member._be_welcomed()
        except BaseException:
            member.close_door()
            raise
        return member

    @property
    def placement(self) -> Placement:
        """Who may still come counts as alone on a machine."""
        workers = [("of rank", rank) if one is None else one["machine"] for rank, one in enumerate(self.workers)]
        servers = [one["machine"] for one in self.servers]
        return Placement.of(workers, servers, self._settings.local_aggregation)

    def label_of_worker(self, rank: int) -> str:
        """As messages name it."""
        return str(Node("worker", rank, self.workers[rank]["host"]))

    async def _enter(self) -> None:
        """A job that runs, whatever becomes of its schedulers meanwhile."""
        deadline = time.monotonic() + self._settings.join_s
        while True:
            sock, proved = await self._reach()
            try:
                await self._join_through(sock, proved)
                return await self._wait_for_a_place(deadline)
            except SchedulerGone as gone:
                if time.monotonic() >= deadline:
                    raise
                log.warning("%s Trying again to join the job", gone)
            self.close_door()  # or its port would not be free for the next one
            await asyncio.sleep(_RETRY_S)

    async def _wait_for_a_place(self, deadline: float) -> None:
        settings = self._settings
        try:
            await asyncio.wait_for(self._be_welcomed(), max(0.0, deadline - time.monotonic()))
        except asyncio.TimeoutError:
            raise RendezvousError(
                "%s: waited %g s (P3_JOIN, --wait) to join the job of the scheduler at %s: %s"
                % (self._label, settings.join_s, endpoint(settings.root_host, settings.root_port), self._waits_as)
            ) from None
        except SchedulerGone:
            self._stream.abort()
            if self._tunnel is not None:
                self._tunnel.close()
            raise

    @property
    def may_enter_again(self) -> bool:
        """Whether a scheduler that dies while this is on its way into a running job leaves that to another one, which
        takes back what was decided of it."""
        return self.outlived and self.entered is not None

    async def _connect(self) -> None:
        await self._join_through(*await self._reach())

    async def _reach(self) -> Tuple[socket.socket, auth.Connector]:
        patience_s = self._settings.rendezvous_timeout_s
        if self._settings.joins:
            patience_s = min(patience_s, self._settings.join_s)
        return await _connect_to_scheduler(self._settings, self._secret, auth.CONTROL, patience_s)

    async def _join_through(self, sock: socket.socket, proved: auth.Connector) -> None:
        """Up to the `join` message. SchedulerGone if it ends meanwhile."""
        settings = self._settings
        try:
            self.host = address_beside(settings, sock)
            is_far_reached = settings.role == "server" or bool(settings.group_sizes)
            if is_far_reached or settings.local_aggregation:
                self.door = DoorStep.open(settings, self.host if is_far_reached else None)
            self._join = _join_message(settings, self.host, self.door)
            self._stream = await self._say_join(sock, proved, self._join)
        except BaseException as error:
            sock.close()
            if self._tunnel is not None:
                self._tunnel.close()
            if isinstance(error, (OSError, ProtocolError)):
                failure = SchedulerGone if isinstance(error, ConnectionError) else RendezvousError
                raise failure("%s: joining failed: %s." % (settings.role, error)) from None
            raise

    async def _say_join(self, sock: socket.socket, proved: auth.Connector, join: dict) -> Stream:
        if self._settings.tls:
            self._tunnel = encryption.Tunnel(await encryption.secure(sock, proved.key("join"), True))
            sock = self._tunnel.socket
        await channel.send_message(sock, join)
        return await Stream.over(sock)

    async def _be_welcomed(self) -> None:
        settings = self._settings
        self._label = "%s (%s)" % (settings.role, self.host)
        patience_s: Optional[float] = settings.rendezvous_timeout_s + _MARGIN_S
        if settings.joins:  # _enter() has a deadline
            patience_s = None
        welcome = await self._receive_within(patience_s, "welcome")
        self.node = Node(settings.role, welcome["rank"], self.host)
        self._label = str(self.node)
        self.entered, self.outlived = welcome["entered"], welcome["outlived"]
        nodes = await self._receive_within(patience_s, "nodes")
        self.servers, self.workers, self.began_with = nodes["servers"], nodes["workers"], nodes["began_with"]
        self.server_changes = nodes["server_changes"]
        self.strategy = read_of_job(nodes["strategy"])

    def close_door(self) -> None:
        """To who has not connected yet. Idempotent, as close(), which does it as well."""
        if self.door is not None:
            self.door.close()

    async def open_watch(self) -> Van:
        """A proved connection to the scheduler for the core's heartbeats."""
        patience_s = self._settings.rendezvous_timeout_s
        sock, proved = await _connect_to_scheduler(self._settings, self._secret, auth.WATCH, patience_s)
        van = Van(sock, [])
        try:
            await channel.send_message(sock, {"kind": "watch", "role": self.node.role, "rank": self.node.rank})
            await channel.read_message(sock, "accepted")
            if self._settings.tls:
                key = proved.key("watch of %s %d" % (self.node.role, self.node.rank))
                van = van._replace(tls=await encryption.secure(sock, key, True))
        except (ProtocolError, OSError) as error:
            van.close()
            raise RendezvousError("%s: the scheduler refused a watch connection: %s" % (self._label, error)) from None
        return van

    async def start(self) -> None:
        """Says that all connections stand, and returns when they do everywhere."""
        self.send({"kind": "ready"})
        await self._receive_within(self._settings.rendezvous_timeout_s + _MARGIN_S, "start")

    async def unless_aborted(self, step):
        """Awaits `step`, but raises RendezvousError at once if the scheduler reports a failure meanwhile, or ends, and
        if it does not long after it should have."""
        deadline_s = self._settings.rendezvous_timeout_s + _MARGIN_S
        both = work, listening = asyncio.ensure_future(step), asyncio.ensure_future(self.receive())
        done, _ = await asyncio.wait(both, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
        if listening not in done and done and work.exception() is not None:  # may follow from what is about to be heard
            done |= (await asyncio.wait({listening}, timeout=_CAUSE_S))[0]
        for task in both:
            task.cancel()
        await asyncio.gather(*both, return_exceptions=True)
        if listening in done:
            message = listening.result()  # raises, as a rule
            raise RendezvousError("%s: the scheduler sent %r too early" % (self._label, message["kind"]))
        if work not in done:
            raise RendezvousError(
                "%s: heard nothing from the scheduler or any other node for %g s: this host, or they, are cut off"
                % (self._label, deadline_s)
            )
        return work.result()

    async def receive(self, kind: Optional[str] = None) -> dict:
        """The scheduler's next message, of that kind if one is given. RendezvousError if it aborts, or goes away and no
        other one takes its place."""
        message = None
        while message is None:
            message = await self._hear()
        self._heard += counts(message["kind"])
        if message["kind"] == "abort":
            self._give_up()  # nobody comes back to a job that has failed
            raise RendezvousError(message["text"])
        if kind is not None and message["kind"] != kind:
            raise RendezvousError("%s: the scheduler sent %r instead of %r" % (self._label, message["kind"], kind))
        return message

    async def _hear(self) -> Optional[dict]:
        """None: it was a word of the scheduler to this alone, or this came back to another one."""
        try:
            message = await self._stream.receive()
        except ProtocolError as error:
            raise RendezvousError("%s: the scheduler sent %s" % (self._label, error)) from None
        if message is None:
            await self._come_back("%s: the scheduler (%s) closed the connection: it has ended. See its log."
                                  % (self._label, self._settings.root_host))  # fmt: skip
            return None
        if message["kind"] == "noted":
            self._outbox.forget(message["count"])
            return None
        if message["kind"] == "waits":
            self._waits_as = message["text"]
            log.warning("%s: waiting to join: %s", self._label, self._waits_as)
            return None
        return message

    async def _receive_within(self, timeout_s: Optional[float], kind: str) -> dict:
        try:
            return await asyncio.wait_for(self.receive(kind), timeout_s)
        except asyncio.TimeoutError:
            raise RendezvousError("%s: the scheduler no longer answers" % self._label) from None

    def send(self, message: dict) -> None:
        self._has_said_bye |= message["kind"] == "bye"
        if message["kind"] == "failed":
            self._core, self._last_words = None, message
        if self._core is not None and counts(message["kind"]):
            self._outbox.add(message)
        self._stream.send(message)

    # Coming back to a scheduler that has taken the former one's place

    def outlive(self, core: Any) -> None:
        """The job has started. If a scheduler that dies is started again, this node and its core go on without it, from
        here on. `core`: P3Worker or P3Server, with outlives_scheduler as here."""
        self._core, self._outlives = core if self.outlived else None, self.outlived

    def _give_up(self) -> None:
        self._core, self._outlives = None, False

    @property
    def _patience_s(self) -> float:
        """With a scheduler that has died; of one that only has to say why it fails less."""
        return self._settings.rendezvous_timeout_s if self._last_words is None else self._settings.timeout_s

    @property
    def is_away(self) -> bool:
        """It has lost a scheduler, and has not found the next one yet. From any thread."""
        return self._coming_back is not None and not self._coming_back.done()

    @property
    def _is_done(self) -> bool:
        """It has said bye, and that is written down: no scheduler has anything more to tell it, or to hear from it."""
        return self._has_said_bye and self._last_words is None and not self._outbox

    async def _come_back(self, loss: str) -> None:
        """RendezvousError if there is nobody to come back to. May be cancelled and called again."""
        if not self._outlives or self._is_done:
            raise SchedulerGone(loss)
        if not self.is_away:
            self._coming_back = asyncio.ensure_future(self._until_back(loss))
            # Or asyncio would print how it failed to whoever listens no more.
            self._coming_back.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._coming_back)

    async def _until_back(self, loss: str) -> None:
        log.info("%s: the scheduler has ended; this node goes on, and waits for another one", self._label)
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                return await self._try_to_come_back(deadline)
            except _Refused as refusal:
                self._give_up()
                raise RendezvousError(str(refusal)) from None
            except (RendezvousError, AuthenticationError, ProtocolError, OSError) as error:
                # While the job runs somebody listens there, if only for the next scheduler.
                is_over = self._has_said_bye and isinstance(error, SchedulerGone)
                if is_over or time.monotonic() >= deadline:
                    self._give_up()
                    raise RendezvousError("%s No other one took its place: %s" % (loss, error)) from None
            await asyncio.sleep(_RETRY_S)

    async def _try_to_come_back(self, deadline: float) -> None:
        self._stream.abort()
        if self._tunnel is not None:
            self._tunnel.close()
        left_s = max(_RETRY_S, deadline - time.monotonic())
        connect_s = 0.0 if self._has_said_bye else left_s
        sock, proved = await _connect_to_scheduler(self._settings, self._secret, auth.CONTROL, connect_s)
        try:
            join = dict(self._join, back={"rank": self.node.rank, "heard": self._heard})
            stream = await self._say_join(sock, proved, join)
            answer = await asyncio.wait_for(stream.receive(), left_s)
        except BaseException as error:
            sock.close()
            if isinstance(error, asyncio.TimeoutError):
                raise RendezvousError("it does not answer") from None
            raise
        if answer is None or answer["kind"] != "welcome_back":
            stream.abort()
            if answer is not None and answer["kind"] == "abort":
                raise _Refused(answer["text"])
            raise RendezvousError("it closed the connection")
        self._stream = stream
        for message in self._outbox.after(answer["noted"]):
            stream.send(message)
        if self._last_words is not None:
            stream.send(self._last_words)
        # Who has said bye, or why it fails: the scheduler may end before it has another look at its door.
        if not self._has_said_bye and self._last_words is None:
            watch, core = await self.open_watch(), self._core
            if core is None:
                watch.close()
            else:
                with contextlib.suppress(RuntimeError):  # it has failed, and says so itself
                    core.replace_watch(watch.socket.detach(), tls=watch.tls)
        log.info("%s: came back to the scheduler", self._label)

    def abort(self) -> None:
        """Ends the connection without a word: the scheduler takes this node for lost."""
        self._stream.abort()

    async def close(self) -> None:
        """Sends what is queued, and closes when the scheduler has read it. No receive() may be under way."""
        self.close_door()
        with contextlib.suppress(RendezvousError, asyncio.TimeoutError):
            await asyncio.wait_for(self._until_all_is_noted(), self._patience_s)
        await self._stream.close(_FAREWELL_S)
        if self._tunnel is not None:
            self._tunnel.close()

    async def _until_all_is_noted(self) -> None:
        """Else a scheduler that dies now would leave one that waits for us."""
        while self._outlives and (self._last_words is not None or (self._outbox and self._core is not None)):
            message = await self._hear()
            if message is not None and message["kind"] == "abort":
                self._give_up()

    def abandon_after_fork(self) -> None:
        """In a forked child: drops the socket without a word to the scheduler."""
        if self._tunnel is not None:
            self._tunnel.abandon_after_fork()
        descriptor = self._stream.socket.detach()
        if descriptor >= 0:
            os.close(descriptor)


def _join_message(settings: Settings, host: str, door: Optional[DoorStep]) -> dict:
    from p3 import __version__

    return {
        "kind": "join",
        "role": settings.role,
        "host": host,
        "port": 0 if door is None else door.port,
        "local": "" if door is None else door.local,
        "machine": machine_id(),
        "pid": os.getpid(),
        "rank": settings.rank,
        "version": __version__,
        "protocol": PROTOCOL_VERSION,
        "counts": {  # of one that joins the first two are None
            "DMLC_NUM_WORKER": settings.num_workers,
            "DMLC_NUM_SERVER": settings.num_servers,
            "P3_MAX_WORKERS": settings.max_workers,
        },
        "settings": {  # or nodes would cut, add or order tensors differently
            "P3_SLICE_ELEMENTS": settings.slice_elements,
            "P3_PARTITIONS": settings.partitions,
            "P3_SUM_ORDER": settings.sum_order,
            "P3_PRIORITY": settings.priority,
            "P3_LOCAL_AGGREGATION": int(settings.local_aggregation),
            "P3_GROUPS": settings.groups,
            "P3_SNAPSHOT_EVERY": 0 if settings.snapshot_dir is None else settings.snapshot_every,
            "P3_CHECKSUM": int(settings.checksum),
            "P3_ON_WORKER_LOSS": settings.on_worker_loss,
            "P3_ON_SERVER_LOSS": settings.on_server_loss,
        },
        "back": None,
        "enters": settings.joins,
    }


async def _connect_to_scheduler(
    settings: Settings, secret: bytes, purpose: int, timeout_s: float
) -> Tuple[socket.socket, auth.Connector]:
    """Tries until `timeout_s` is over, because nodes start in any order; then proves both ends. SchedulerGone if nobody
    even listens there."""
    label = "%s%s" % (settings.role, "" if settings.rank is None else " %d" % settings.rank)
    where = endpoint(settings.root_host, settings.root_port)
    deadline = time.monotonic() + timeout_s

    def unresolved(reason: str) -> None:
        log.warning("%s: %s; retrying for %g s (P3_RENDEZVOUS_TIMEOUT_S)", label, reason, timeout_s)

    async def connected() -> socket.socket:
        sock, reason = await connect(
            settings.root_host, settings.root_port, "DMLC_PS_ROOT_URI", deadline, unresolved
        )
        if sock is None:
            raise (SchedulerGone if reason == REFUSED else RendezvousError)(
                "%s: no scheduler at %s for %g s (%s). Is it started, and are DMLC_PS_ROOT_URI and "
                "DMLC_PS_ROOT_PORT its address?" % (label, where, timeout_s, reason)
            )
        return sock

    try:
        return await channel.connect_and_prove(
            connected, secret, settings.role, purpose, "scheduler", deadline, settings.tls
        )
    except AuthenticationError as error:
        raise AuthenticationError("%s: the scheduler at %s: %s" % (label, where, error)) from None
