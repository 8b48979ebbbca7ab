"""TLS between two nodes that have proved themselves to each other (P3_TLS=1), over TCP alone.

The core's TlsStream does it, with OpenSSL, for control, data and watch connections alike: its key comes from the
handshake that went before (auth.py), so there are no certificates to make, to pass on and to trust. Python's ssl can
take such a key only from 3.13 on. A data or watch connection goes to the core as it is; control messages go through a
`Tunnel`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Callable

from p3.cluster.connections import auth
from p3.cluster.connections.channel import until_ready
from p3.errors import ConfigError, ProtocolError
from p3.settings import Settings

log = logging.getLogger("p3.tls")


def require(settings: Settings) -> None:
    """ConfigError if P3_TLS=1 cannot be had here."""
    if settings.tls:
        from p3._core import TLS_BUILT_IN  # here: without TLS the scheduler needs no core

        if not TLS_BUILT_IN:
            raise ConfigError(
                "P3_TLS=1: P3 was built without OpenSSL. Run: apt-get install libssl-dev (or: dnf install "
                "openssl-devel), and build P3 again: in its source, pip install --force-reinstall --no-deps ."
            )


async def secure(sock: socket.socket, key: bytes, connects: bool):
    """The p3._core.Tls that has taken the place of `sock`. ProtocolError if the other end has not the same key;
    ConnectionError if it ends meanwhile."""
    from p3._core import P3Error, Tls

    tls = Tls(sock.detach(), key, connects)

    async def handshake() -> None:
        wanted = tls.handshake()
        while wanted != "done":
            await until_ready(tls.read_fd if wanted == "read" else tls.write_fd, wanted)
            wanted = tls.handshake()

    try:
        await asyncio.wait_for(handshake(), auth.CONNECTOR_TIMEOUT_S)
    except BaseException as error:
        tls.close()
        if isinstance(error, asyncio.TimeoutError):
            raise ProtocolError("TLS: no answer for %g s" % auth.CONNECTOR_TIMEOUT_S) from None
        if isinstance(error, P3Error):
            if error.kind == "peer_lost":
                raise ConnectionResetError(str(error)) from None
            raise ProtocolError("%s: something between the nodes alters their messages" % error) from None
        raise
    log.info("a connection is encrypted")
    return tls


class Tunnel:
    """`socket` is one end of a pair: what goes in and out there in plain crosses the network encrypted. An end of
    either side is one of the other, and so is an error: who waits for a message learns that none will come."""

    def __init__(self, tls) -> None:
        self.socket, self._outer = socket.socketpair()
        self._tls = tls
        for end in (self.socket, self._outer):
            end.setblocking(False)
        loop = asyncio.get_running_loop()
        self._pumps = [loop.create_task(self._pump(step)) for step in (self._outwards, self._inwards)]
        for pump in self._pumps:
            pump.add_done_callback(self._ended)

    def close(self) -> None:
        """At once, whatever is under way; not `socket`."""
        for pump in self._pumps:
            pump.cancel()

    def abandon_after_fork(self) -> None:
        for end in (self.socket, self._outer, self._tls):
            end.close()

    def _ended(self, _pump: asyncio.Task) -> None:
        if all(pump.done() for pump in self._pumps):  # and so no reader of these is left in the event loop
            self._outer.close()
            self._tls.close()

    async def _pump(self, step: Callable) -> None:
        from p3._core import P3Error

        try:
            await step()
        except ConnectionError:  # who reads `socket` knows whether it may end now
            self.close()
        except (OSError, P3Error) as error:
            log.warning("a control connection has ended: %s", error)
            self.close()

    async def _outwards(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            data = await loop.sock_recv(self._outer, 1 << 16)
            if not data:
                self._tls.end_writing()
                return
            while data:
                try:
                    written = self._tls.write(data)
                except BrokenPipeError:  # what had come from it before is still passed on, and then its end
                    return
                data = data[written:]
                if data and not written:
                    await until_ready(self._tls.write_fd, "write")

    async def _inwards(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            data = self._tls.read(1 << 16)
            if data is None:
                await until_ready(self._tls.read_fd, "read")
            elif data:
                await loop.sock_sendall(self._outer, data)
            else:
                self._outer.shutdown(socket.SHUT_WR)
                return
