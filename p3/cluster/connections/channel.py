"""Carries handshakes and messages over sockets, with a deadline on each step.

Until a socket's purpose is settled, bytes are read in exact counts from the bare non-blocking socket: a buffered
reader could swallow the first bytes that belong to the core. Only control connections become a `Stream`.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import logging
import os
import socket
import time
from typing import Awaitable, Callable, List, Optional, Sequence, Tuple, TypeVar, Union

from p3.cluster import messages
from p3.cluster.connections import auth
from p3.errors import AuthenticationError, ProtocolError

T = TypeVar("T")

log = logging.getLogger("p3.channel")


async def read_exactly(sock: socket.socket, count: int) -> bytes:
    """ConnectionError if the peer closes first."""
    loop = asyncio.get_running_loop()
    parts = []
    while count:
        part = await loop.sock_recv(sock, count)
        if not part:
            raise ConnectionResetError("the connection was closed")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


async def send(sock: socket.socket, data: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(sock, data)


async def until_ready(descriptor: Union[int, socket.socket], wanted: str) -> None:
    """Until it can be read or written: `wanted` is "read" or "write"."""
    loop = asyncio.get_running_loop()
    reads = wanted == "read"
    ready = loop.create_future()
    (loop.add_reader if reads else loop.add_writer)(descriptor, lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        (loop.remove_reader if reads else loop.remove_writer)(descriptor)


async def cancel(task: asyncio.Future) -> None:
    """Cancels the task, and returns when it has ended, however it does."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def stop_accepting(accepting: asyncio.Task, listener: socket.socket) -> None:
    """Cancels a task that waits in sock_accept() of `listener`, which stays open."""
    # First of all: asyncio would accept a connection that it has seen already, and log that nobody waits for it.
    # And Python 3.8 forgets this; its loop would take the next socket of the same number for the listener.
    asyncio.get_running_loop().remove_reader(listener.fileno())
    await cancel(accepting)


async def prove_to_acceptor(
    sock: socket.socket, secret: bytes, role: str, purpose: int, acceptor_role: str, encrypts: bool = False
) -> auth.Connector:
    """The connector's side of the handshake. AuthenticationError says which end is at fault and what to look at."""
    connector = auth.Connector(secret, role, purpose, acceptor_role, encrypts)

    async def handshake() -> None:
        try:
            await send(sock, connector.hello)
            challenge = await read_exactly(sock, auth.CHALLENGE_BYTES)
        except OSError:
            raise auth.Dropped(
                "it closed the connection without a handshake: is another program using that port?"
            ) from None
        try:
            await send(sock, connector.proof(challenge))
            proof = await read_exactly(sock, auth.PROOF_BYTES)
        except OSError as error:
            if error.errno in (errno.ECONNRESET, errno.EPIPE):
                raise auth.Dropped("it broke off the handshake: it may have reached its limit of connections") from None
            raise AuthenticationError(
                "it refused our proof of the job's secret: P3_SECRET or P3_SECRET_FILE must be the same on all nodes"
            ) from None
        connector.verify(proof)

    try:
        await asyncio.wait_for(handshake(), auth.CONNECTOR_TIMEOUT_S)
        return connector
    except asyncio.TimeoutError:
        raise auth.Dropped(
            "it did not answer the handshake within %g s: is another program using that port?"
            % auth.CONNECTOR_TIMEOUT_S
        ) from None


async def persistently(attempt: Callable[[], Awaitable[T]], deadline: float) -> T:
    """attempt(), again and again until `deadline` (of time.monotonic()) where the acceptor dropped it: one that
    strangers flood, or whose machine has too much to do, may do so."""
    told_at = time.monotonic() + auth.PATIENCE_S
    while True:
        try:
            return await attempt()
        except auth.Dropped as error:
            now = time.monotonic()
            if now >= deadline:
                raise
            if now >= told_at:
                log.warning("retrying a connection for up to %.0f s: %s", deadline - now, error)
                told_at = float("inf")
        await asyncio.sleep(auth.PATIENCE_S / 40)


async def connect_and_prove(
    connect: Callable[[], Awaitable[socket.socket]], secret: bytes, role: str, purpose: int, acceptor_role: str,
    deadline: float, encrypts: bool = False,
) -> Tuple[socket.socket, auth.Connector]:  # fmt: skip
    """What connect() makes, with both ends proved; persistently(). Errors as of connect() and prove_to_acceptor()."""

    async def attempt() -> Tuple[socket.socket, auth.Connector]:
        sock = await connect()
        try:
            return sock, await prove_to_acceptor(sock, secret, role, purpose, acceptor_role, encrypts)
        except BaseException:
            sock.close()
            raise

    return await persistently(attempt, deadline)


async def prove_to_connector(sock: socket.socket, secret: bytes, role: str, encrypts: bool = False) -> auth.Acceptor:
    """The acceptor's side: returns what the peer proved. AuthenticationError if it did not, within 5 s."""

    async def handshake() -> auth.Acceptor:
        acceptor = auth.Acceptor(secret, role, await read_exactly(sock, auth.HELLO_BYTES), encrypts)
        await send(sock, acceptor.challenge)
        await send(sock, acceptor.accept(await read_exactly(sock, auth.PROOF_BYTES)))
        acceptor.agree()
        return acceptor

    try:
        return await asyncio.wait_for(handshake(), auth.HANDSHAKE_TIMEOUT_S)
    except asyncio.TimeoutError:
        raise AuthenticationError("it sent no proof within %g s" % auth.HANDSHAKE_TIMEOUT_S) from None
    except OSError:
        raise AuthenticationError("it closed the connection during the handshake") from None


async def send_message(sock: socket.socket, message: dict) -> None:
    """One message on a bare socket, at most 4 KiB, within the handshake's time. OSError or ProtocolError."""
    data = messages.encode(message, messages.MAX_BYTES_BEFORE_JOIN)
    await _in_time(send(sock, data), message["kind"])


async def read_message(sock: socket.socket, kind: str) -> dict:
    """The next message on a bare socket, which must be of that kind; limits as send_message()."""

    async def read() -> dict:
        length = await read_exactly(sock, 4)
        return messages.decode(await read_exactly(sock, messages.body_bytes(length, messages.MAX_BYTES_BEFORE_JOIN)))

    message = await _in_time(read(), kind)
    if message["kind"] != kind:
        raise ProtocolError("a control message %r instead of %s" % (message["kind"], kind))
    return message


async def send_descriptors(sock: socket.socket, descriptors: Sequence[int]) -> None:
    """Passes file descriptors over an AF_UNIX socket, with one byte; ours stay open."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
    sock.sendmsg([b"\0"], rights)  # one byte always fits: this is the connection's third message


async def receive_descriptors(sock: socket.socket, count: int) -> List[int]:
    """What send_descriptors() sent. ProtocolError if it was not exactly `count`."""
    await _in_time(until_ready(sock, "read"), "descriptor")
    found = array.array("i")
    data, ancillary, _, _ = sock.recvmsg(1, socket.CMSG_SPACE(count * found.itemsize), socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(content[: len(content) - len(content) % found.itemsize])
    if data != b"\0" or len(found) != count:
        for descriptor in found:
            os.close(descriptor)
        raise ProtocolError("%d descriptors instead of %d" % (len(found), count))
    return list(found)


async def _in_time(step, kind: str):
    try:
        return await asyncio.wait_for(step, auth.CONNECTOR_TIMEOUT_S)
    except asyncio.TimeoutError:
        raise ProtocolError("no %r message within %g s" % (kind, auth.CONNECTOR_TIMEOUT_S)) from None


class Stream:
    """A control connection after the node has joined. Threads: the event loop's alone."""

    def __init__(self, sock: socket.socket, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.socket, self._reader, self._writer = sock, reader, writer
        self._body_bytes: Optional[int] = None  # of the message whose length has been read
        self._finished = False

    @classmethod
    async def over(cls, sock: socket.socket) -> Stream:
        return cls(sock, *await asyncio.open_connection(sock=sock))

    async def receive(self) -> Optional[dict]:
        """The next message; None when the peer has closed. Waits as long as it takes: others watch for life.

        May be cancelled: what has been read of a message is kept for the next call. Other tasks have a turn before
        each message: a reader hands out messages that are here already without letting any other task run, and the keys
        of a large model are so many that heartbeats would go unanswered.
        """
        await asyncio.sleep(0)
        try:
            if self._body_bytes is None:
                self._body_bytes = messages.body_bytes(await self._reader.readexactly(4))
            body = await self._reader.readexactly(self._body_bytes)
            self._body_bytes = None
            return messages.decode(body)
        except (asyncio.IncompleteReadError, OSError):
            return None

    @property
    def _is_open(self) -> bool:
        return not self._finished and not self._writer.transport.is_closing()

    def send(self, message: dict) -> None:
        """Queues the message and returns at once; drops it if the connection has ended, which receive() reports.

        A peer that reads nothing is cut off before it fills our memory.
        """
        if self._is_open:
            self.send_encoded(messages.encode(message))

    def send_encoded(self, message: bytes) -> None:
        """The same of one that messages.encode() has made, for all who get the same."""
        if not self._is_open:
            return
        self._writer.write(message)
        if self._writer.transport.get_write_buffer_size() > 4 * messages.MAX_BYTES:
            self._writer.transport.abort()

    async def close(self, timeout_s: float) -> None:
        """Sends what is queued and nothing more; then waits for the peer to do the same, at most `timeout_s`. No
        receive() may be under way.

        Closing while the peer's bytes are unread would reset the connection, and destroy our last message with it.
        """
        if self._is_open:
            try:
                self._writer.write_eof()
            except OSError:  # the peer has reset the connection, and asyncio has not noticed yet
                self._writer.transport.abort()
        self._finished = True

        async def drain() -> None:
            while await self._reader.read(1 << 16):
                pass

        with contextlib.suppress(asyncio.TimeoutError, OSError):
            await asyncio.wait_for(drain(), timeout_s)
        self.abort()

    def abort(self) -> None:
        """Ends the connection at once."""
        self._writer.transport.abort()
