"""Who a node is and where: its name in messages, its address, its machine."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import os
import socket
import struct
import threading
import time
from typing import List, NamedTuple, Optional, Sequence, Tuple

from p3.errors import ConfigError, RendezvousError
from p3.settings import Settings

_RESOLVE_TIMEOUT_S = 8.0
_CONNECT_TIMEOUT_S = 3.0
_RETRY_S = 0.2
_SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface


class Node(NamedTuple):
    role: str
    rank: int
    host: str

    def __str__(self) -> str:
        return "%s %d (%s)" % self


def machine_id() -> str:
    """Equal on two processes that can share memory and reach each other's AF_UNIX sockets, and on no others.

    That is: one boot, one network namespace, one IPC namespace, one user. The hosts of a laboratory of network
    namespaces are different machines, or local connections would bypass the network that is being measured.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        spaces = [os.stat("/proc/self/ns/" + name).st_ino for name in ("net", "ipc")]
    except OSError:  # no /proc: share with nobody
        return os.urandom(16).hex()
    return hashlib.sha256(repr((boot, spaces, os.getuid())).encode()).hexdigest()[:32]


def interface_address(interface: str) -> str:
    """The IPv4 address of a network interface. ConfigError lists the interfaces if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            request = struct.pack("256s", os.fsencode(interface)[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
        except OSError as error:
            known = ", ".join(name for _, name in socket.if_nameindex())
            raise ConfigError(
                "DMLC_INTERFACE=%s: %s. The interfaces of this host are %s." % (interface, error.strerror, known)
            ) from None


def address_as_set(settings: Settings) -> Optional[str]:
    """At which others reach this host, if DMLC_NODE_HOST or DMLC_INTERFACE says so."""
    if settings.node_host is not None:
        return settings.node_host
    return None if settings.interface is None else interface_address(settings.interface)


def resolve(host: str, port: int, variable: str) -> List[Tuple[int, tuple]]:
    """(family, address) pairs of a TCP endpoint; blocks at most 8 s. RendezvousError names the variable to mend."""
    found: list = []

    def look_up() -> None:
        try:
            found.extend(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            found.append(error)

    # In a thread of its own: the resolver has no deadline, and a daemon thread does not keep the process.
    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(_RESOLVE_TIMEOUT_S)
    if not found or isinstance(found[0], Exception):
        reason = getattr(found[0], "strerror", None) or found[0] if found else "no answer for 8 s"
        raise RendezvousError("%s=%s does not resolve to an address: %s" % (variable, host, reason))
    return [(entry[0], entry[4]) for entry in found]


async def connect(addresses: Sequence[Tuple[int, tuple]], deadline: float) -> Tuple[Optional[socket.socket], str]:
    """A connection to the first of them that answers; tries until `deadline` (of time.monotonic()) is over, then None,
    and why not. Takes longer than that by the last attempt."""
    while True:
        sock, reason = await _try_to_connect(addresses)
        if sock is not None or time.monotonic() >= deadline:
            return sock, reason
        await asyncio.sleep(_RETRY_S)


async def _try_to_connect(addresses: Sequence[Tuple[int, tuple]]) -> Tuple[Optional[socket.socket], str]:
    reason = ""
    for family, address in addresses:
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            await asyncio.wait_for(asyncio.get_running_loop().sock_connect(sock, address), _CONNECT_TIMEOUT_S)
            # A port of this host can connect to itself while nobody listens on it.
            if sock.getsockname() != sock.getpeername():
                return sock, ""
            reason = "connection refused"
        except asyncio.TimeoutError:
            reason = "no answer"
        except OSError as error:
            reason = (os.strerror(error.errno) if error.errno else str(error)).lower()
        except BaseException:
            sock.close()
            raise
        sock.close()
    return None, reason


def address_towards(host: str) -> Optional[str]:
    """This host's IPv4 address on the route to another; None if there is no route, or the name does not resolve."""
    # Connecting a datagram socket sends nothing, but chooses the route and so our address on it.
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return probe.getsockname()[0]
    return None


def listen_as_root(address: str, port: Optional[int]) -> socket.socket:
    """For the scheduler, or who stands in its place: at DMLC_PS_ROOT_PORT, or any port. ConfigError if it cannot."""
    try:
        return listen(address, port or 0, or_anywhere=True)
    except OSError as error:
        text = "cannot listen at %s, DMLC_PS_ROOT_PORT=%s: %s"
        raise ConfigError(text % (address, port or 0, error.strerror)) from None


def listen(host: str, port: int = 0, or_anywhere: bool = False) -> socket.socket:
    """A listening, non-blocking TCP socket. OSError as bind() gives it. `or_anywhere`: on all addresses if `host` is
    none of this host's, but a service's or one that is translated to ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        if or_anywhere and error.errno != errno.EADDRINUSE:
            return listen("::" if family == socket.AF_INET6 else "0.0.0.0", port)
        raise
    return listener
