"""What a host offers to the others while it is examined: a TCP port as P3's servers have one, and a UDP port.

Whoever connects proves first that it knows the secret, as for a server of a job. Then it sends one REQUEST:

    PING    each byte comes back
    RATE    it sends without end; after `seconds` it is told how many bytes came in how many seconds of them

A datagram that begins with the token of the examination is answered by its first bytes, however long it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
import struct
import time
from typing import List, Set, Tuple

from p3.cluster.connections import channel
from p3.cluster.node import listen_for_workers
from p3.errors import AuthenticationError
from p3.settings import Settings

PING, RATE = 1, 2
REQUEST = struct.Struct("<Bd")  # what, seconds
RESULT = struct.Struct("<dd")  # bytes, seconds
TOKEN_BYTES = 16
ANSWER_BYTES = TOKEN_BYTES + 4  # the token, and the number of the attempt

STEP_TIMEOUT_S = 10.0  # for the next bytes to come or go, on any connection
# Of a measurement, at first, not counted: TCP starts slowly, and token buckets let a burst pass.
_UNCOUNTED = 0.3
_PARTS = 3  # of the rest; the one in the middle counts: when a host pauses, little comes in one part, much in the next


class Door:
    """Threads: the event loop's; each connection is served in one of the loop's executor."""

    def __init__(self, settings: Settings, secret: bytes, address: str) -> None:
        """As listen_for_workers() has it: ConfigError if nothing can listen at `address`."""
        self._secret = secret
        self._tcp = listen_for_workers(settings, address)
        bound = self._tcp.getsockname()[0]
        self._udp = socket.socket(self._tcp.family, socket.SOCK_DGRAM)
        self._udp.bind((bound, 0))
        self._udp.setblocking(False)
        self.token = b""  # set it before the others are told the ports
        self._serving: Set[asyncio.Task] = set()
        asyncio.get_running_loop().add_reader(self._udp, self._answer)
        self._accepting = asyncio.get_running_loop().create_task(self._accept())

    @property
    def ports(self) -> Tuple[int, int]:
        """TCP, UDP."""
        return self._tcp.getsockname()[1], self._udp.getsockname()[1]

    async def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._udp)
        await channel.stop_accepting(self._accepting, self._tcp)
        for task in list(self._serving):
            await channel.cancel(task)
        self._tcp.close()
        self._udp.close()

    async def _accept(self) -> None:
        while True:
            sock, _ = await asyncio.get_running_loop().sock_accept(self._tcp)
            task = asyncio.get_running_loop().create_task(self._let_in(sock))
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)

    async def _let_in(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(AuthenticationError, OSError):
            sock.setblocking(False)
            await channel.prove_to_connector(sock, self._secret, "server")
            sock.settimeout(STEP_TIMEOUT_S)
            await asyncio.get_running_loop().run_in_executor(None, _serve, sock)

    def _answer(self) -> None:
        with contextlib.suppress(OSError):
            data, sender = self._udp.recvfrom(1 << 16)
            if len(self.token) == TOKEN_BYTES and hmac.compare_digest(data[:TOKEN_BYTES], self.token):
                self._udp.sendto(data[:ANSWER_BYTES], sender)


def read(sock: socket.socket, count: int) -> bytes:
    """From a blocking socket. ConnectionError if it ends before."""
    data = b""
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            raise ConnectionResetError("the connection was closed")
        data += part
    return data


def _serve(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    what, seconds = REQUEST.unpack(read(sock, REQUEST.size))
    if what == PING:
        while True:
            sock.sendall(read(sock, 1))
    if what == RATE:
        sock.sendall(RESULT.pack(*_count(sock, seconds)))
        # Closing while bytes are unread would reset the connection, and destroy the result with it.
        deadline = time.monotonic() + STEP_TIMEOUT_S
        while time.monotonic() < deadline and sock.recv(1 << 18):
            pass


def _count(sock: socket.socket, seconds: float) -> Tuple[float, float]:
    """Bytes that come, and the time that they take, in one part of the `seconds` behind the first ones."""
    buffer = bytearray(1 << 18)
    parts: List[Tuple[float, float]] = []
    total, since, part_s = 0, 0.0, _UNCOUNTED * seconds
    while len(parts) < 1 + _PARTS:
        received = sock.recv_into(buffer)
        now = time.monotonic()
        if not received:
            raise ConnectionResetError("the connection was closed")
        since = since or now
        total += received
        if now - since >= part_s and now > since:
            parts.append((total, now - since))
            total, since, part_s = 0, now, (1 - _UNCOUNTED) / _PARTS * seconds
    return sorted(parts[1:], key=lambda part: part[0] / part[1])[_PARTS // 2]
