"""One host under examination: joins the doctor, opens a Door, and does what it is asked until the doctor hangs up.

    python -m p3.doctor.examiner

Anybody may start it, once on each host: it finds the doctor by DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT, proves itself by
P3_SECRET or P3_SECRET_FILE, and P3_RANK says which host it is, if that has been agreed on.

Requests and answers are lines of JSON, so that hosts whose versions differ understand each other. What it is asked:

    {"do": "clock"}                                         {"wall_s"}
    {"do": "open", "token"}                                 {}; datagrams with that token are answered from now on
    {"do": "reach", "address", "port", "udp", "token"}      paths.ping() and the largest packet, or {"error"}
    {"do": "rate", "address", "port", "seconds", "trip_s"}  {"mbit"}, or {"error"}
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
from typing import Callable, Dict, Optional

from p3.cluster.connections import auth, channel
from p3.cluster.node import address_beside, connect, connect_once, endpoint, resolve
from p3.doctor import paths
from p3.doctor.door import TOKEN_BYTES, Door
from p3.doctor.facts import facts
from p3.errors import AuthenticationError, ConfigError, RendezvousError
from p3.settings import Settings

MOST_BYTES = 1 << 20  # of a line
JOIN_TIMEOUT_S = 20.0  # for a doctor that is still starting


async def examine(settings: Settings, timeout_s: float = JOIN_TIMEOUT_S, name: Optional[str] = None) -> None:
    """Returns when the doctor has hung up. RendezvousError if it cannot be reached in `timeout_s`, ConfigError for a
    wrong setting. `name`: of this host, if the doctor does not have one for it."""
    settings.require("root_host", "root_port")
    secret = settings.job_secret()
    sock = await _join(settings, secret, timeout_s)
    address = address_beside(settings, sock)
    try:
        door = Door(settings, secret, address)
    except ConfigError:
        sock.close()
        raise
    try:
        reader, writer = await asyncio.open_connection(sock=sock, limit=MOST_BYTES)
        known = await _in_thread(facts, address)  # which may have to read much from a slow disk
        port, udp = door.ports
        named = {} if name is None else {"name": name}
        chosen = {"port": port, "udp": udp, "server_ports": settings.server_ports}
        _write(writer, {"host": settings.rank, **named, **chosen, **known})
        while line := await reader.readline():
            request = json.loads(line)
            if request["do"] == "open":
                door.token = bytes.fromhex(request["token"])
            _write(writer, await _done(secret, request, known["mtu"]))
    except OSError:
        pass  # the doctor has gone
    finally:
        await door.close()


async def _join(settings: Settings, secret: bytes, timeout_s: float) -> socket.socket:
    where = endpoint(settings.root_host, settings.root_port)
    deadline = time.monotonic() + timeout_s

    async def connected() -> socket.socket:
        sock, reason = await connect(settings.root_host, settings.root_port, "DMLC_PS_ROOT_URI", deadline)
        if sock is None:
            raise RendezvousError("cannot reach the doctor at %s for %g s: %s" % (where, timeout_s, reason))
        return sock

    try:
        sock, _ = await channel.connect_and_prove(connected, secret, "worker", auth.CONTROL, "scheduler", deadline)
        return sock
    except AuthenticationError as error:
        raise RendezvousError("the doctor at %s: %s" % (where, error)) from None


async def _done(secret: bytes, request: dict, mtu: Optional[int]) -> dict:
    if request["do"] == "clock":
        return {"wall_s": time.time()}
    if request["do"] == "open":
        return {}
    try:
        if request["do"] == "reach":
            found = await _with_connection(secret, request, paths.ping)
            if mtu is not None:
                token = bytes.fromhex(request["token"])[:TOKEN_BYTES]
                of_other = request["address"], request["udp"], token
                found["passes"] = await _in_thread(paths.largest_packet, *of_other, mtu, found["round_trip_s"])
            return found
        if request["do"] == "rate":
            seconds, trip_s = request["seconds"], request["trip_s"]
            mbit = await _with_connection(secret, request, lambda sock: paths.rate_mbit(sock, seconds, trip_s))
            return {"mbit": mbit}
    except (AuthenticationError, RendezvousError, OSError) as error:
        return {"error": text_of(error)}
    return {"error": "P3 %s does not know how to %r" % (facts("")["p3"], request["do"])}


async def _with_connection(secret: bytes, request: dict, learn: Callable[[socket.socket], object]):
    """learn(a connection to another host's Door), in a thread."""
    addresses = await _in_thread(resolve, request["address"], request["port"], "the other host's address")
    sock, reason = await connect_once(addresses, paths.CONNECT_TIMEOUT_S)
    if sock is None:
        raise ConnectionError(reason)
    with sock:
        await channel.prove_to_acceptor(sock, secret, "worker", auth.DATA, "server")
        sock.settimeout(paths.STEP_TIMEOUT_S)
        return await _in_thread(learn, sock)


async def _in_thread(function: Callable, *arguments):
    return await asyncio.get_running_loop().run_in_executor(None, function, *arguments)


def _write(writer: asyncio.StreamWriter, message: Dict[str, object]) -> None:
    writer.write(json.dumps(message).encode() + b"\n")


def text_of(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def main() -> int:
    try:
        asyncio.run(examine(Settings.from_env(os.environ)))
        return 0
    except (ConfigError, RendezvousError) as error:
        print("p3 doctor: %s" % error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
