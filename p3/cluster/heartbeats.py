"""The heartbeats of the nodes' cores, on watch connections: the scheduler echoes them, and notices when they cease."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Optional

from p3.cluster import channel, encryption, frames
from p3.cluster.roster import Entry, Roster
from p3.errors import ProtocolError


async def watch(
    sock: socket.socket,
    key: Optional[bytes],
    entry: Entry,
    roster: Roster,
    started: asyncio.Event,
    end: asyncio.Future,
    timeout_s: float,
) -> str:
    """Until they cease; returns what became of that node, in words that follow its name. `key`: to encrypt with."""
    tunnel: Optional[encryption.Tunnel] = None
    try:
        await channel.send_message(sock, {"kind": "accepted"})
        if key is not None:
            tunnel = encryption.Tunnel(await encryption.secure(sock, key, False))
            sock = tunnel.socket
        await started.wait()
        while True:
            frame = await asyncio.wait_for(channel.read_exactly(sock, frames.HEADER.size), timeout_s)
            entry.last_heard = time.monotonic()
            entry.last_round = frames.round_of(frame)
            await asyncio.wait_for(channel.send(sock, frame), timeout_s)
    except asyncio.TimeoutError:
        long_ago = time.monotonic() - timeout_s / 2
        others = [other for other in roster.entries.values() if not other.left and other is not entry]
        if others and all(other.last_heard < long_ago for other in others):
            return (
                "sent no heartbeat for %g s, nor did any other node: this host is cut off from the network, or they are"
                % timeout_s
            )
        return "sent no heartbeat for %g s: it is frozen or unreachable" % timeout_s
    except (OSError, ProtocolError):
        # The core has ended. Its process says why over the control connection, or closes that as well.
        if not entry.left:
            await asyncio.wait({end}, timeout=timeout_s)
        return "ended its data plane without a goodbye"
    finally:
        if tunnel is not None:
            sock.close()
            tunnel.close()
