"""Limits connections to a listener that have not proved yet that they know the job's secret.

A stranger may hold a connection for as long as a handshake takes (auth.HANDSHAKE_TIMEOUT_S). So there are only so many
such connections at a time; one more, and the oldest of the busiest address is reset. A flood therefore displaces
itself, and a node of the job gets in as long as it proves itself faster than its own address opens MAX_UNPROVED others,
or than so many addresses open one each; if it does not, it tries again until its deadline (channel.persistently). What
is logged of strangers is bounded, too.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import errno
import ipaddress
import logging
import os
import socket
import struct
import time
from typing import Awaitable, Callable, Dict, Optional, Tuple

MAX_UNPROVED = 256  # connections, for all listeners of a gate; more than a node's handshake lasts in a flood
LINES = 5  # of the log on refused connections, in so many seconds; then they are counted
LINES_S = 10.0
PACE_S = 0.005  # between two connections accepted while the job runs, when nobody is waited for

_NO_LINGER = struct.pack("ii", 1, 0)  # socket(7), SO_LINGER: on, for 0 s
_PEER_CREDENTIALS = struct.Struct("3i")  # socket(7), SO_PEERCRED: process, user, group


class Gate:
    """Accepts connections and starts a handler for each. Threads: the event loop's alone."""

    def __init__(self, label: str, log: logging.Logger) -> None:
        self.pace_s = 0.0  # after each connection
        self.refusals = 0
        self.shortage: Optional[str] = None  # why a connection could not be accepted
        self.tasks: set = set()  # every handler that runs
        self._unproved: Dict[asyncio.Task, Tuple[str, socket.socket]] = {}  # whence; the oldest first
        self._label, self._log = label, log
        self._window_ends = 0.0
        self._lines = 0

    async def serve(self, listener: socket.socket, handler: Callable[[socket.socket, str], Awaitable[None]]) -> None:
        """Until cancelled. The handler owns its socket, gets the sender's name for messages, calls proved() as soon as
        the peer is no stranger any more, and may be cancelled before."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(listener)
            except OSError as error:  # out of file descriptors, or the peer has gone again
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self.shortage = error.strerror
                self.refused("a stranger", "it could not be accepted: %s" % error.strerror)
                await asyncio.sleep(0.1)
                continue
            sock.setblocking(False)
            source = source_of(sock, address)
            if source is None:
                self.refused("another user's process", "this socket is for one user's processes")
                sock.close()
            else:
                task = loop.create_task(handler(sock, source))
                self.tasks.add(task)
                self._unproved[task] = source, sock
                task.add_done_callback(self._done)
                if len(self._unproved) > MAX_UNPROVED:
                    self._evict()
            # Even 0 lets the handler read what has come already: a full backlog must not evict it unheard.
            await asyncio.sleep(self.pace_s)

    def proved(self) -> None:
        """By a handler: its peer knows the secret."""
        self._unproved.pop(asyncio.current_task(), None)

    def refused(self, source: str, reason: object) -> None:
        """Counts a refusal, and logs it unless there have been many of late."""
        self.refusals += 1
        now = time.monotonic()
        if now >= self._window_ends:
            self._tell_rest()
            self._window_ends = now + LINES_S
        self._lines += 1
        if self._lines <= LINES:
            self._log.warning("%s: refused a connection from %s: %s", self._label, source, reason)

    async def close(self, timeout_s: float) -> None:
        """Gives the handlers that run a while to end, and cancels the others."""
        self._tell_rest()
        for task in self._unproved:
            task.cancel()
        if self.tasks:
            await asyncio.wait(self.tasks, timeout=timeout_s)
        for task in self.tasks:
            task.cancel()

    def _tell_rest(self) -> None:
        if self._lines > LINES:
            self._log.warning("%s: refused %d more connections like that", self._label, self._lines - LINES)
        self._lines = 0

    def _evict(self) -> None:
        busiest = collections.Counter(source for source, _ in self._unproved.values()).most_common(1)[0][0]
        task, sock = next((task, sock) for task, (source, sock) in self._unproved.items() if source == busiest)
        del self._unproved[task]
        reset(sock)
        task.cancel()
        self.refused(busiest, "%d others arrived before it had proved that it knows the secret" % MAX_UNPROVED)

    def _done(self, task: asyncio.Task) -> None:
        self.tasks.discard(task)
        self._unproved.pop(task, None)
        if not task.cancelled() and task.exception() is not None:
            self._log.error("%s: a connection's handler failed", self._label, exc_info=task.exception())


def reset(sock: socket.socket) -> None:
    """What closes the socket resets the connection: its peer sees that it was not refused, but broken off."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)


def source_of(sock: socket.socket, address: object) -> Optional[str]:
    """Whom a connection counts for: an IPv4 address, an IPv6 network of 64 bits, of which one host may have all, or a
    process of this machine. None: a process of another user, which cannot be a node of this job."""
    if sock.family == socket.AF_UNIX:
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
        process, user, _ = _PEER_CREDENTIALS.unpack(credentials)
        return "process %d" % process if user == os.getuid() else None
    host = ipaddress.ip_address(address[0].partition("%")[0])
    if host.version == 4:
        return str(host)
    return str(host.ipv4_mapped or ipaddress.ip_network((host, 64), strict=False))
