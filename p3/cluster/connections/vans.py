"""Opens the data connections: every worker to every server, and the workers of one machine to its leader, the worker of
lowest rank there (P3_LOCAL_AGGREGATION), or all of a group to each other (P3_GROUPS). Proved at both ends, ready to be
handed to the core.

On one machine the connection is an AF_UNIX socket, and over it who connects passes the descriptors of a shared memory
ring, through which the core then moves its slices (P3_LOCAL=shm); the socket stays, to tell the end of the peer.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from typing import Any, Callable, Collection, Dict, List, NamedTuple, Optional, Set, Tuple

from p3.cluster.connections import auth, channel, descriptors, encryption
from p3.cluster.connections.strangers import Gate
from p3.cluster.node import Node, connect_once, listen_for_workers, machine_id, resolve
from p3.errors import AuthenticationError, ProtocolError, RendezvousError
from p3.settings import Settings

log = logging.getLogger("p3.vans")

_CONNECT_TIMEOUT_S = 5.0
_FAREWELL_S = 1.0  # for those who are being refused
_SEVERAL_ADDRESSES = (
    " If it has several addresses, set DMLC_NODE_HOST or DMLC_INTERFACE there to one that this host reaches."
)
_RING_BYTES = 512 << 10  # each way: larger rings hold more slices that a more urgent one cannot overtake
_RING_DESCRIPTORS = 5  # of a core's ring: its memory and four eventfds


class Van(NamedTuple):
    """A proved connection."""

    socket: socket.socket
    ring: List[int]  # its descriptors; none for a plain socket
    tls: Any = None  # the p3._core.Tls that has taken the socket's place

    def close(self) -> None:
        self.socket.close()
        if self.tls is not None:
            self.tls.close()
        for descriptor in self.ring:
            os.close(descriptor)


def provide_for(settings: Settings, label: str, others: int, role: str, local: int) -> None:
    """Room for vans to so many nodes of that role, and so many of them, or more, on this machine. ConfigError if there
    is none."""
    each = descriptors.PER_VAN_TLS if settings.tls else descriptors.PER_VAN
    count = each * (others - local) + descriptors.PER_LOCAL_VAN * local
    descriptors.provide(count, label, "%d %s" % (others, role), descriptors.PER_LOCAL_VAN * (others + 1))


class DoorStep(NamedTuple):
    """Where a node can be reached: a server, and a worker of a group, at a TCP port; all, for workers of the same
    machine, at an abstract AF_UNIX name."""

    listeners: List[socket.socket]
    port: int
    local: str

    @classmethod
    def open(cls, settings: Settings, host: Optional[str]) -> DoorStep:
        """Listens at `host`, the node's own address, as listen_for_workers() has it. None: at the AF_UNIX name
        alone."""
        listeners, port = [], 0
        if host is not None:
            tcp = listen_for_workers(settings, host)
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
    door: DoorStep,
    secret: bytes,
    label: str,
    ranks: Collection[int],
    role: str = "server",
    settings: Settings = Settings(),
) -> Dict[int, Van]:
    """One van per worker of those ranks, accepted by a node of `role`. Never returns if one stays away: the caller
    holds the deadline. Leaves the door open."""
    found: Dict[int, Van] = {}
    complete = asyncio.Event()

    def arrived(rank: int, van: Van) -> None:
        found[rank] = van
        if len(found) == len(ranks):
            complete.set()

    awaited = {rank: object() for rank in ranks}
    admitting = asyncio.ensure_future(admit_workers(door, secret, label, awaited, arrived, role, settings))
    try:
        await complete.wait()
    finally:
        await channel.cancel(admitting)
    return found


async def admit_workers(
    door: DoorStep,
    secret: bytes,
    label: str,
    awaited: Dict[int, object],
    arrived: Callable[[int, Van], None],
    role: str = "server",
    settings: Settings = Settings(),
    pace_s: float = 0.0,
) -> None:
    """Calls `arrived` for each van of a worker whose rank is in `awaited` by then, and takes the rank out of it. Until
    cancelled; leaves the door open. `pace_s`: Gate's.

    Who takes a rank out of `awaited` and puts it back with another object waits for another process: a van that the
    former one had begun to open does not arrive any more, whatever has come of it by then.
    """
    loop = asyncio.get_running_loop()
    gate = Gate(label, log)
    gate.pace_s = pace_s
    opening: Set[object] = set()  # the objects of those whose van is on its way

    async def admit(sock: socket.socket, source: str) -> None:
        van, wait = Van(sock, []), None
        try:
            encrypts = settings.tls and sock.family != socket.AF_UNIX
            peer = await channel.prove_to_connector(sock, secret, role, encrypts)
            gate.proved()
            if peer.role != "worker" or peer.purpose != auth.DATA:
                raise ProtocolError("it is not a worker's data connection")
            hello = await channel.read_message(sock, "van")
            rank = hello["rank"]
            if rank not in awaited or awaited[rank] in opening:
                raise ProtocolError("unexpected worker rank %d" % rank)
            wait = awaited[rank]
            opening.add(wait)
            if hello["ring"]:
                if sock.family != socket.AF_UNIX or hello["ring"] != _RING_DESCRIPTORS:
                    raise ProtocolError("it offers shared memory that is not allowed here")
                van = van._replace(ring=await channel.receive_descriptors(sock, _RING_DESCRIPTORS))
            await channel.send_message(sock, {"kind": "accepted"})
            if encrypts:
                key = peer.key(_subject(rank, label))
                van = van._replace(tls=await encryption.secure(sock, key, False))
            if awaited.get(rank) is not wait:
                raise ProtocolError("worker %d was lost again while it connected" % rank)
            del awaited[rank]
            kept, van = van, None
            arrived(rank, kept)
        except (AuthenticationError, ProtocolError, OSError) as error:
            gate.refused(source, error)
        finally:
            opening.discard(wait)
            if van is not None:
                van.close()

    accepting = [loop.create_task(gate.serve(listener, admit)) for listener in door.listeners]
    try:
        await asyncio.gather(*accepting)
    finally:
        for task, listener in zip(accepting, door.listeners):
            await channel.stop_accepting(task, listener)
        await gate.close(_FAREWELL_S)


def _subject(rank: int, acceptor: str) -> str:
    """What a data connection's key is for: a message that was altered on its way makes another key."""
    return "data of worker %d to %s" % (rank, acceptor)


async def connect(settings: Settings, secret: bytes, node: Node, peer: Node, address: dict) -> Van:
    """A proved van from worker `node` to a server, or to another worker, at the address the scheduler gave.

    It is local if both are on one machine; to a server, unless P3_LOCAL=tcp. RendezvousError names both nodes.
    """
    is_local = address["machine"] == machine_id() and (peer.role == "worker" or settings.local != "tcp")
    if is_local:
        ends: List[Tuple[int, Any]] = [(socket.AF_UNIX, "\0" + address["local"])]
    else:
        ends = resolve(address["host"], address["port"], "the address of %s %d" % (peer.role, peer.rank))
    ring = _make_ring() if is_local and settings.local == "shm" else []
    encrypts = settings.tls and not is_local

    async def attempt() -> Van:
        sock, reason = await connect_once(ends, _CONNECT_TIMEOUT_S)
        if sock is None:
            raise ConnectionError(reason)
        try:
            proved = await channel.prove_to_acceptor(sock, secret, "worker", auth.DATA, peer.role, encrypts)
            await channel.send_message(sock, {"kind": "van", "rank": node.rank, "ring": len(ring)})
            if ring:
                await channel.send_descriptors(sock, ring)
            await channel.read_message(sock, "accepted")
            tls = None
            if encrypts:
                tls = await encryption.secure(sock, proved.key(_subject(node.rank, str(peer))), True)
            return Van(sock, ring, tls)
        except BaseException:
            sock.close()
            raise

    try:
        return await channel.persistently(attempt, time.monotonic() + settings.rendezvous_timeout_s)
    except BaseException as error:
        for descriptor in ring:
            os.close(descriptor)
        if not isinstance(error, (OSError, AuthenticationError, ProtocolError)):
            raise
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        where, hint = ("its local socket", "") if is_local else ("port %d" % address["port"], _SEVERAL_ADDRESSES)
        raise RendezvousError("%s: cannot connect to %s, %s: %s.%s" % (node, peer, where, reason, hint)) from None


def _make_ring() -> List[int]:
    from p3._core import make_ring  # here: the scheduler, which loads no core, knows this module too

    try:
        return make_ring(_RING_BYTES)
    except ValueError as error:
        log.warning("no shared memory with processes of this machine, using a socket instead: %s", error)
        return []
