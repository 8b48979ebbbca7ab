"""Joins a worker to a job of several processes: the control connection in a daemon thread, the vans in the core."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from typing import Callable, Dict, List, Optional, Set

from p3._core import P3Worker
from p3.cluster import messages
from p3.cluster.connections.channel import cancel
from p3.cluster.connections.vans import DoorStep, Van, accept_workers, connect, provide_for
from p3.cluster.groups import Groups
from p3.cluster.member import Member, SchedulerGone
from p3.cluster.node import Node, machine_id
from p3.cluster.stragglers import report_late
from p3.errors import ConfigError, RendezvousError
from p3.settings import Settings
from p3.trace.recording import Recording, fd_of
from p3.worker.links.link import Link

log = logging.getLogger("p3")

_CLOSE_TIMEOUT_S = 5.0
_LOOK_S = 0.1  # for servers that are lost


class ClusterLink(Link):
    """Made in the caller's thread; blocks until the job is complete."""

    def __init__(self, settings: Settings) -> None:
        if settings.role != "worker":
            raise ConfigError(
                "DMLC_ROLE=%s: only a worker opens a session; servers and the scheduler are started by `p3 exec`"
                % settings.role
            )
        self.settings = settings
        self.on_worker_loss, self.on_server_loss = settings.on_worker_loss, settings.on_server_loss
        self._loop: Optional[asyncio.AbstractEventLoop] = None
        self._member: Optional[Member] = None
        self.recording: Optional[Recording] = None
        self._opened = threading.Event()
        self._opening_failed: Optional[BaseException] = None
        self._leaving = False
        self._reported = False
        self._lost_servers: Set[int] = set()  # of which the scheduler has been told
        self._connecting: Dict[int, asyncio.Task] = {}  # to servers that have come back
        self._thread = threading.Thread(target=self._run, name="p3-control", daemon=True)
        self._thread.start()
        self._opened.wait()  # the rendezvous has its deadlines
        if self._opening_failed is not None:
            raise self._opening_failed

    def label_of(self, worker: int) -> str:
        return str(Node("worker", worker, self._member.workers[worker]["host"]))

    def note_host(self, worker: int, host: str) -> None:
        self._member.workers[worker] = dict(self._member.workers[worker] or {}, host=host)

    def start(self, on_message: Callable[[dict], None], on_failure: Callable[[], None]) -> None:
        self._on_message = on_message
        self._on_failure = on_failure
        self._loop.call_soon_threadsafe(self._begin_to_listen)

    def send(self, message: dict) -> None:
        messages.encode(message)  # here, where the caller sees the error
        self._post(self._member.send, message)

    def report(self, text: str) -> None:
        if not self._reported:
            self._reported = True
            self._post(self._member.send, {"kind": "failed", "text": messages.sendable(text)})

    def close(self, failure: Optional[str]) -> None:
        """Waits at most 5 s for the thread to end; longer for a scheduler that takes another one's place, which must
        hear the goodbye."""
        self._leaving = True
        if failure is not None:
            self.report(failure)
        elif not self._reported:
            self._post(self._member.send, {"kind": "bye"})
        self._post(self._finished.set)
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._member.is_away:
            self._thread.join(self.settings.rendezvous_timeout_s)

    def abandon_after_fork(self) -> None:
        self._member.abandon_after_fork()

    # In the control thread

    def _post(self, function, *arguments) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, after a failure that every later call reports
            self._loop.call_soon_threadsafe(function, *arguments)

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:  # handed to the thread that waits in __init__
            if isinstance(error, (ConfigError, RendezvousError)):
                error.__traceback__ = None  # the text says what is wrong; where we read it is no matter to a script
            self._opening_failed = error
            self._opened.set()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._finished = asyncio.Event()
        self._member = await Member.join(self.settings)
        try:
            await self._take_place()
            self.core.start()
            self._member.outlive(self.core)
            self._opened.set()
            await self._finished.wait()
            await cancel(self._listening)
        except Exception as error:  # before the job runs; the scheduler, and so everyone, hears why
            self._member.send({"kind": "failed", "text": messages.sendable(str(error))})
            raise
        finally:
            await self._member.close()

    async def _take_place(self) -> None:
        """Until all connections stand, everywhere. One that enters a running job begins anew if the scheduler dies: the
        next one knows nothing of it."""
        while True:
            try:
                await self._member.unless_aborted(self._open_vans())
                return await self._member.start()
            except SchedulerGone as gone:
                if not self._member.may_enter_again:
                    raise
                log.warning("%s Trying again to join the job", gone)
            self._drop_core()
            await self._member.close()
            self._member = await Member.join(self.settings)

    def _drop_core(self) -> None:
        """With its connections; before it was started."""
        self.core = None
        if self.recording is not None:
            self.recording.discard()
            self.recording = None

    async def _open_vans(self) -> None:
        settings, member = self.settings, self._member
        self.node = member.node
        self.entered, self.strategy = member.entered, member.strategy
        self.num_workers, self.places = member.began_with, len(member.workers)
        self.num_servers = len(member.servers)
        heirs = {rank: one["heir"] for rank, one in enumerate(member.servers) if one["heir"] is not None}
        self.server_changes = member.server_changes
        self.placement = member.placement
        machines = self.placement.workers
        neighbours = [rank for rank, machine in enumerate(machines) if machine == machines[self.node.rank]]
        self.local_rank, self.local_size = neighbours.index(self.node.rank), len(neighbours)
        self.recording = Recording.of(settings, member.node)
        self.core = P3Worker(
            self.node.rank,
            self.num_servers,
            str(self.node),
            heartbeat_s=settings.heartbeat_s,
            timeout_s=settings.timeout_s,
            trace_fd=fd_of(self.recording),
            checksums=settings.checksum,
            outlives_scheduler=member.outlived,
            outlives_servers=settings.outlives_servers,
        )
        if self.entered is not None:
            self.core.come_later()
        secret = settings.job_secret()
        local = sum(server["machine"] == machine_id() for server in member.servers)
        groups = Groups.of(self.placement, settings.group_sizes)
        others = [] if groups is None else groups.members(self.node.rank)
        peers = self.num_servers + max(self.local_size - 1, len(others))
        provide_for(settings, str(self.node), peers, "servers and workers of its machine or group",
                    local + self.local_size - 1)  # fmt: skip
        if groups is not None:
            await self._open_vans_of_groups(member.door, secret, others)
            self.core.join_groups(groups.workers, groups.sizes, groups.homes)
        elif member.door is not None:
            await self._open_local_vans(member.door, secret, neighbours)
        member.close_door()
        for rank, address in enumerate(member.servers):
            if rank in heirs:
                continue
            server = Node("server", rank, address["host"])
            van = await connect(settings, secret, self.node, server, address)
            self.core.add_server(rank, van.socket.detach(), str(server), ring=van.ring, tls=van.tls)
        for lost, heir in heirs.items():
            self.core.add_heir(lost, heir, "server %d (which was lost)" % lost)
        watch = await member.open_watch()
        self.core.add_watch(watch.socket.detach(), "the scheduler (%s)" % settings.root_host, tls=watch.tls)

    async def _open_local_vans(self, door: DoorStep, secret: bytes, neighbours: List[int]) -> None:
        """Between the leader of this machine, the worker of lowest rank, and the others."""
        is_leader, vans = self.local_rank == 0, {}
        if is_leader and self.local_size > 1:
            vans = await self._accept_workers(door, secret, neighbours[1:])
        elif not is_leader:
            vans = {neighbours[0]: await self._connect_to_worker(secret, neighbours[0])}
        for rank, van in sorted(vans.items()):
            label = self.label_of(rank)
            self.core.add_local(rank, van.socket.detach(), label, ring=van.ring, made_ring=not is_leader)

    async def _open_vans_of_groups(self, door: DoorStep, secret: bytes, others: List[int]) -> None:
        """Between this one and their members: who has the higher rank connects."""
        above = [rank for rank in others if rank > self.node.rank]
        below = [rank for rank in others if rank < self.node.rank]
        vans = {} if not above else await self._accept_workers(door, secret, above)
        for rank in below:
            vans[rank] = await self._connect_to_worker(secret, rank)
        for rank, van in sorted(vans.items()):
            label, made_ring = self.label_of(rank), rank in below
            self.core.add_member(rank, van.socket.detach(), label, ring=van.ring, made_ring=made_ring, tls=van.tls)

    async def _accept_workers(self, door: DoorStep, secret: bytes, ranks: List[int]) -> Dict[int, Van]:
        return await accept_workers(door, secret, str(self.node), ranks, "worker", self.settings)

    async def _connect_to_worker(self, secret: bytes, rank: int) -> Van:
        address = self._member.workers[rank]
        return await connect(self.settings, secret, self.node, Node("worker", rank, address["host"]), address)

    def _begin_to_listen(self) -> None:
        self._listening = self._loop.create_task(self._listen())

    async def _listen(self) -> None:
        """Messages and the core's failure, until the session is closed or the scheduler has gone."""
        self._loop.add_reader(self.core.event_fd, self._on_core_event)
        reporting = [self._loop.create_task(report_late(self.core, self.settings.straggler_s, self._member.send))]
        if self.settings.outlives_servers:
            reporting.append(self._loop.create_task(self._report_lost_servers()))
        try:
            while True:
                message = await self._member.receive()
                if message["kind"] in ("server_departed", "server_returned"):
                    await self._note_change(message)
                self._on_message(message)
        except RendezvousError as error:
            # An abort, or the end of the scheduler. After our goodbye, it may go when it likes.
            if not self._leaving:
                self._reported = True
                self._on_message({"kind": "abort", "text": str(error)})
        except Exception as error:  # without a listener, nothing would be agreed any more, and everyone would wait
            text = "%s: a control message could not be applied: %s: %s" % (self.node, type(error).__name__, error)
            self.core.fail(messages.sendable(text))
            self.report(text)
            self._on_failure()
        finally:
            for task in (*reporting, *self._connecting.values()):
                task.cancel()

    async def _report_lost_servers(self) -> None:
        """The scheduler may not have noticed: perhaps only this worker does not reach one. Once of each."""
        while self.core.error is None:
            for rank in set(self.core.lost_servers()) - self._lost_servers:
                self._report_lost_server(rank)
            await asyncio.sleep(_LOOK_S)

    def _report_lost_server(self, rank: int) -> None:
        self._lost_servers.add(rank)
        self._member.send({"kind": "server_lost", "rank": rank, "changes": self.server_changes})

    # Servers that come back

    async def _note_change(self, message: dict) -> None:
        rank = message["rank"]
        self.server_changes = max(self.server_changes, message["changes"])
        if rank in self._connecting:  # lost again meanwhile
            await cancel(self._connecting.pop(rank))
        if message["kind"] == "server_returned":
            self._lost_servers.discard(rank)
            self._connecting[rank] = self._loop.create_task(self._take_back(rank, message))

    async def _take_back(self, rank: int, address: dict) -> None:
        """All other workers rest until this one has answered."""
        settings, server, done = self.settings, Node("server", rank, address["host"]), False
        try:
            connecting = connect(settings, settings.job_secret(), self.node, server, address)
            van = await asyncio.wait_for(connecting, settings.timeout_s / 2)
            self.core.take_back(rank, van.socket.detach(), ring=van.ring, tls=van.tls)
            done = True
        except Exception as error:  # whatever it is: all rest until they hear of it
            if self.core.error is None:  # else it says so itself
                log.warning("%s: no connection to %s, which has come back: %s", self.node, server,
                            error or "not within %g s (half of P3_TIMEOUT_S)" % (settings.timeout_s / 2))  # fmt: skip
                self._report_lost_server(rank)
        finally:
            self._member.send({"kind": "taken_back", "rank": rank, "done": done})

    def _on_core_event(self) -> None:
        self._loop.remove_reader(self.core.event_fd)
        error = self.core.error
        if error is not None and not self._leaving:
            if self.settings.outlives_workers and error.kind in ("peer_lost", "peer_silent"):
                # Perhaps only this worker is cut off, and the job goes on. If its peer is dead, others see it.
                self._reported = True
                self._member.abort()
            self.report(str(error))
            self._on_failure()
