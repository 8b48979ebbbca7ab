"""Opens the data connections: every worker to every server, and the workers of one machine to its leader, the worker of
lowest rank there (P3_LOCAL_AGGREGATION). Proved at both ends, ready to be handed to the core.

On one machine the connection is an AF_UNIX socket, and over it who connects passes the descriptors of a shared memory
ring, through which the core then moves its slices (P3_LOCAL=shm); the socket stays, to tell the end of the peer.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from typing import Collection, Dict, List, NamedTuple, Optional

from p3.cluster import auth, channel
from p3.cluster.node import Node, listen, machine_id, resolve
from p3.errors import AuthenticationError, ConfigError, ProtocolError, RendezvousError
from p3.settings import Settings

log = logging.getLogger("p3.vans")

_CONNECT_TIMEOUT_S = 5.0
_MAX_STRANGERS = 64
_SEVERAL_ADDRESSES = (
    ". If it has several addresses, set DMLC_NODE_HOST or DMLC_INTERFACE there to one that this host reaches."
)
_RING_DESCRIPTORS = 5  # of a core's ring: its memory and four eventfds


class Van(NamedTuple):
    """A proved connection; the descriptors of its ring, none for a plain socket."""

    socket: socket.socket
    ring: List[int]

    def close(self) -> None:
        self.socket.close()
        for descriptor in self.ring:
            os.close(descriptor)


class DoorStep(NamedTuple):
    """Where a node can be reached: a server at a TCP port; both, for workers of the same machine, at an abstract AF_UNIX
    name."""

    listeners: List[socket.socket]
    port: int
    local: str

    @classmethod
    def open(cls, settings: Settings, host: Optional[str]) -> DoorStep:
        """Listens on a free port of `host`, the server's own address; on all addresses if DMLC_NODE_HOST names one
        that is only translated to ours. None: at the AF_UNIX name alone."""
        listeners, port = [], 0
        if host is not None:
            try:
                tcp = listen(host)
            except OSError as error:
                if settings.node_host is None:
                    raise ConfigError("server (%s): cannot listen there: %s" % (host, error.strerror)) from None
                tcp = listen("0.0.0.0")
            listeners, port = [tcp], tcp.getsockname()[1]
        local = "p3-" + os.urandom(16).hex()
        unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        unix.bind("\0" + local)
        unix.listen(1024)
        unix.setblocking(False)
        return cls([*listeners, unix], port, local)

    def close(self) -> None:
        for listener in self.listeners:
            listener.close()


async def accept_workers(
    door: DoorStep, secret: bytes, label: str, ranks: Collection[int], role: str = "server"
) -> Dict[int, Van]:
    """One van per worker of those ranks, accepted by a node of `role`. Never returns if one stays away: the caller holds
    the deadline."""
    loop = asyncio.get_running_loop()
    found: Dict[int, Van] = {}
    complete = asyncio.Event()
    strangers = asyncio.Semaphore(_MAX_STRANGERS)
    tasks = set()

    async def admit(sock: socket.socket) -> None:
        kept = False
        try:
            sock.setblocking(False)
            peer = await channel.prove_to_connector(sock, secret, role)
            if peer.role != "worker" or peer.purpose != auth.DATA:
                raise ProtocolError("it is no worker's data connection")
            hello = await channel.read_message(sock, "van")
            rank, ring = hello["rank"], []
            if rank not in ranks or rank in found:
                raise ProtocolError("there is no need of a worker %d" % rank)
            if hello["ring"]:
                if sock.family != socket.AF_UNIX or hello["ring"] != _RING_DESCRIPTORS:
                    raise ProtocolError("it offers shared memory that cannot be")
                ring = await channel.receive_descriptors(sock, _RING_DESCRIPTORS)
            found[rank] = Van(sock, ring)
            kept = True
            await channel.send_message(sock, {"kind": "accepted"})
            if len(found) == len(ranks):
                complete.set()
        except (AuthenticationError, ProtocolError, OSError) as error:
            log.warning("%s: refused a data connection: %s", label, error)
        finally:
            strangers.release()
            if not kept:
                sock.close()

    async def accept(listener: socket.socket) -> None:
        while True:
            await strangers.acquire()
            sock, _ = await loop.sock_accept(listener)
            task = loop.create_task(admit(sock))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    accepting = [loop.create_task(accept(listener)) for listener in door.listeners]
    try:
        await complete.wait()
        if tasks:
            await asyncio.wait(tasks)  # the last answers
    finally:
        for task, listener in zip(accepting, door.listeners):
            await channel.stop_accepting(task, listener)
    return found


async def connect_to_server(settings: Settings, secret: bytes, node: Node, rank: int, server: dict) -> Van:
    """A proved van from worker `node` to server `rank`, at the address the scheduler gave for it.

    Local if both are on one machine, unless P3_LOCAL=tcp. RendezvousError names both nodes.
    """
    peer = Node("server", rank, server["host"])
    if settings.local != "tcp" and server["machine"] == machine_id():
        return await _connect(settings, secret, node, peer, socket.AF_UNIX, "\0" + server["local"])
    family, address = resolve(server["host"], server["port"], "the address of server %d" % rank)[0]
    return await _connect(settings, secret, node, peer, family, address)


async def connect_to_leader(settings: Settings, secret: bytes, node: Node, rank: int, leader: dict) -> Van:
    """The same to worker `rank` of the same machine, whose door is the one that the scheduler told."""
    peer = Node("worker", rank, leader["host"])
    return await _connect(settings, secret, node, peer, socket.AF_UNIX, "\0" + leader["local"])


async def _connect(settings: Settings, secret: bytes, node: Node, peer: Node, family: int, address) -> Van:
    ring: List[int] = []
    if family == socket.AF_UNIX and settings.local == "shm":
        ring = _make_ring(settings)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await asyncio.wait_for(asyncio.get_running_loop().sock_connect(sock, address), _CONNECT_TIMEOUT_S)
        await channel.prove_to_acceptor(sock, secret, "worker", auth.DATA, peer.role)
        await channel.send_message(sock, {"kind": "van", "rank": node.rank, "ring": len(ring)})
        if ring:
            await channel.send_descriptors(sock, ring)
        await channel.read_message(sock, "accepted")
        return Van(sock, ring)
    except (asyncio.TimeoutError, OSError, AuthenticationError, ProtocolError) as error:
        Van(sock, ring).close()
        reason = str(error) or "no answer for %g s" % _CONNECT_TIMEOUT_S
        if isinstance(error, OSError) and error.errno:
            reason = os.strerror(error.errno)
        raise RendezvousError(
            "%s: cannot connect to %s, %s: %s%s"
            % (
                (node, peer, "its local socket", reason, ".")
                if family == socket.AF_UNIX
                else (node, peer, "port %d" % address[1], reason, _SEVERAL_ADDRESSES)
            )
        ) from None


def _make_ring(settings: Settings) -> List[int]:
    from p3._core import make_ring  # here: the scheduler, which loads no core, knows this module too

    try:
        return make_ring(settings.ring_bytes)
    except ValueError as error:
        log.warning("no shared memory with processes of this machine, a socket serves instead: %s", error)
        return []
