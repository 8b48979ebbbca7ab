"""One who watches a job: what `p3 top` and `p3 run` see of it, from its scheduler.

    async for view in views(settings, every_s=2, span_s=10):
        ...                                       # `view` of messages.py

It proves that it knows the job's secret, as a node does, and from then on only reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from typing import AsyncIterator

from p3.cluster import messages
from p3.cluster.connections import auth, channel, encryption
from p3.cluster.node import connect_once, endpoint, resolve
from p3.errors import AuthenticationError, ProtocolError, RendezvousError
from p3.settings import Settings

_PATIENCE_S = 5.0  # for the scheduler to answer at all
_SILENCE_S = 10.0  # for a view to come, beyond the time between two


class Ended(Exception):
    """The job is over, `failure` says of what if it has failed."""

    def __init__(self, failure: str) -> None:
        super().__init__(failure or "the job has ended")
        self.failure = failure


async def views(settings: Settings, every_s: float, span_s: float) -> AsyncIterator[dict]:
    """The first one at once. Ended when the job is over; RendezvousError or AuthenticationError if it cannot be
    reached, or not any more. Goes on with a scheduler that takes the place of one that has died. Whoever leaves it
    before its end calls aclose()."""
    from p3 import __version__

    where = endpoint(settings.root_host, settings.root_port)
    look = {"version": __version__, "protocol": messages.PROTOCOL_VERSION, "every_s": every_s, "span_s": span_s}
    has_died = False  # the last one, without a view of the next
    while True:
        with contextlib.ExitStack() as at_end:
            try:
                sock = await _connect(settings, where, at_end)
                await channel.send_message(sock, {"kind": "look", **look})
                stream = await channel.Stream.over(sock)
                at_end.callback(stream.abort)
                while True:
                    message = await asyncio.wait_for(stream.receive(), every_s + _SILENCE_S)
                    if message is None:
                        break
                    if message["kind"] == "ended":
                        raise Ended(message["text"])
                    if message["kind"] != "view":
                        raise ProtocolError("a message %r instead of a view" % message["kind"])
                    has_died = False
                    yield message
            except asyncio.TimeoutError:
                raise RendezvousError("the scheduler at %s no longer answers" % where) from None
            except (OSError, ProtocolError) as error:
                raise RendezvousError("watching the job at %s failed: %s" % (where, error)) from None
            except (RendezvousError, AuthenticationError):
                if not has_died:
                    raise
                break
        if has_died:
            break
        has_died = True
    raise RendezvousError("the scheduler at %s closed the connection: the job has ended" % where)


async def _connect(settings: Settings, where: str, at_end: contextlib.ExitStack) -> socket.socket:
    async def connected() -> socket.socket:
        loop = asyncio.get_running_loop()
        ends = await loop.run_in_executor(None, resolve, settings.root_host, settings.root_port, "DMLC_PS_ROOT_URI")
        sock, reason = await connect_once(ends)
        if sock is None:
            raise RendezvousError("no job at %s: %s" % (where, reason))
        return sock

    secret, deadline = settings.job_secret(), time.monotonic() + _PATIENCE_S
    try:
        sock, proved = await channel.connect_and_prove(
            connected, secret, "watcher", auth.LOOK, "scheduler", deadline, settings.tls
        )
    except AuthenticationError as error:
        raise AuthenticationError("the scheduler at %s: %s" % (where, error)) from None
    at_end.callback(sock.close)
    if settings.tls:
        tunnel = encryption.Tunnel(await encryption.secure(sock, proved.key("look"), True))
        at_end.callback(tunnel.close)
        at_end.callback(tunnel.socket.close)
        sock = tunnel.socket
    return sock


async def look(settings: Settings, span_s: float) -> dict:
    """One view. Errors as of views()."""
    watching = views(settings, _SILENCE_S, span_s)
    try:
        return await watching.__anext__()
    finally:
        await watching.aclose()
