"""Who a node is and where: its name in messages, its address, its machine."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import ipaddress
import os
import socket
import struct
import threading
import time
from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple

from p3.errors import ConfigError, RendezvousError
from p3.settings import Settings

REFUSED = os.strerror(errno.ECONNREFUSED).lower()  # a reason of connect()
_RESOLVE_TIMEOUT_S = 8.0
_CONNECT_TIMEOUT_S = 3.0
_RETRY_S = 0.2
_SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface
_TEMPORARY = 0x01  # linux/if_addr.h, IFA_F_TEMPORARY: of IPv6, and another one tomorrow


class Node(NamedTuple):
    role: str
    rank: int
    host: str  # of the process that is this node now: it stays the same node if another one takes its place

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Node) and self[:2] == other[:2]

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self[:2])

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
    """The address of a network interface by which others reach it: IPv4, or IPv6 where it has no other. ConfigError
    lists the interfaces if it has none."""
    addresses = interface_addresses(interface)
    if not addresses:
        known = ", ".join(name for _, name in socket.if_nameindex())
        text = "DMLC_INTERFACE=%s: it has no address. The interfaces of this host are %s."
        raise ConfigError(text % (interface, known))
    return addresses[0]


def interface_addresses(interface: str) -> List[str]:
    """Its IPv4 address, then those of IPv6 that other hosts reach; stable ones first."""
    found = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", os.fsencode(interface)[:15])
        found.append(socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24]))
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as file:
        lines = [line.split() for line in file]  # address, index, prefix, scope, flags, name
        of_this = [line for line in lines if line[5] == interface and line[3] in ("00", "10")]  # global; a host's own
        of_this.sort(key=lambda line: int(line[4], 16) & _TEMPORARY)
        found += [str(ipaddress.IPv6Address(int(line[0], 16))) for line in of_this]
    return found


def address_as_set(settings: Settings) -> Optional[str]:
    """At which others reach this host, if DMLC_NODE_HOST or DMLC_INTERFACE says so."""
    if settings.node_host is not None:
        return settings.node_host
    return None if settings.interface is None else interface_address(settings.interface)


def address_beside(settings: Settings, connection: socket.socket) -> str:
    """At which others reach this node, which is connected to the scheduler: as set, or the address towards that. On the
    scheduler's own host that may be a loopback, as Debian's /etc/hosts has it; then the scheduler's name, by which they
    have reached this host already."""
    address = address_as_set(settings)
    if address is not None:
        return address
    own = plain(connection.getsockname())
    return settings.root_host if is_loopback(own) and not is_numeric(settings.root_host) else own


def plain(name: tuple) -> str:
    """The address of a socket's name: without the interface, and as IPv4 where it is that."""
    address = name[0].partition("%")[0]
    return address[7:] if address.startswith("::ffff:") and "." in address else address


def is_numeric(host: str) -> bool:
    """An address, and no name that each host may understand in its own way."""
    with contextlib.suppress(ValueError):
        return host == "localhost" or bool(ipaddress.ip_address(host.partition("%")[0]))
    return False


def is_loopback(host: str) -> bool:
    """That nobody on another machine can connect to."""
    return host == "localhost" or (is_numeric(host) and ipaddress.ip_address(host.partition("%")[0]).is_loopback)


def loopback() -> str:
    """This host's own; where it has no IPv4 at all, that of IPv6."""
    with contextlib.suppress(OSError):
        _listen(socket.AF_INET, "127.0.0.1", 0).close()
        return "127.0.0.1"
    return "::1"


def endpoint(host: str, port: int) -> str:
    """For messages."""
    return ("[%s]:%d" if ":" in host else "%s:%d") % (host, port)


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


async def connect(
    host: str, port: int, variable: str, deadline: float, retried: Callable[[str], None] = lambda reason: None
) -> Tuple[Optional[socket.socket], str]:
    """A connection to the first of the name's addresses that answers; tries until `deadline` (of time.monotonic()) is
    over, then None, and why not. Takes longer than that by the last attempt.

    The name is resolved for each attempt: a headless service has none before its pod runs, and another one when that
    has moved. `retried` is told, once, if it does not resolve.
    """
    loop = asyncio.get_running_loop()
    while True:
        sock = None
        try:
            addresses = await loop.run_in_executor(None, resolve, host, port, variable)
        except RendezvousError as error:
            reason = str(error)
            retried(reason)
            retried = lambda reason: None  # noqa: E731
        else:
            sock, reason = await connect_once(addresses)
        if sock is not None or time.monotonic() >= deadline:
            return sock, reason
        await asyncio.sleep(_RETRY_S)


async def connect_once(
    addresses: Sequence[Tuple[int, Any]], timeout_s: float = _CONNECT_TIMEOUT_S
) -> Tuple[Optional[socket.socket], str]:
    """To the first of (family, address) that answers within `timeout_s`; or None, and why the last one does not."""
    reason = ""
    for family, address in addresses:
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            await asyncio.wait_for(asyncio.get_running_loop().sock_connect(sock, address), timeout_s)
            # A port of this host can connect to itself while nobody listens on it.
            if sock.getsockname() != sock.getpeername():
                return sock, ""
            reason = REFUSED
        except asyncio.TimeoutError:
            reason = "no answer within %g s" % timeout_s
        except OSError as error:
            reason = (os.strerror(error.errno) if error.errno else str(error)).lower()
        except BaseException:
            sock.close()
            raise
        sock.close()
    return None, reason


def address_towards(host: str) -> Optional[str]:
    """This host's address on the route to another, IPv4 if there is one; None if there is no route, or the name does
    not resolve."""
    with contextlib.suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
        for family, kind, _, _, address in sorted(found, key=lambda one: one[0] != socket.AF_INET):
            # Connecting a datagram socket sends nothing, but chooses the route and so our address on it.
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)
                return plain(probe.getsockname())
    return None


def listen_as_root(host: str, port: Optional[int]) -> socket.socket:
    """For the scheduler, or who stands in its place: at DMLC_PS_ROOT_PORT, or any port. ConfigError if it cannot."""
    try:
        return listen(host, port or 0, or_anywhere=True)
    except OSError as error:
        text = "cannot listen on %s, DMLC_PS_ROOT_PORT=%s: %s. Stop the program that uses the port, or choose another"
        raise ConfigError(text % (host, port or 0, error.strerror)) from None


def listen(host: str, port: int = 0, or_anywhere: bool = False) -> socket.socket:
    """A listening, non-blocking TCP socket. OSError as bind() gives it. On all addresses of this host if `host` is a
    name, which may stand for the loopback here and for another address elsewhere; and, `or_anywhere`, if it is an
    address of none of our interfaces, but a service's or one that is translated to ours."""
    if not is_numeric(host):
        return _listen_anywhere(port)
    try:
        return _listen(socket.AF_INET6 if ":" in host else socket.AF_INET, host, port)
    except OSError as error:
        if or_anywhere and error.errno != errno.EADDRINUSE:
            return _listen_anywhere(port)
        raise


def listen_for_workers(settings: Settings, host: str) -> socket.socket:
    """As a server, or a worker of a group, listens at `host`, its own address: at one of P3_SERVER_PORTS; on all
    addresses if DMLC_NODE_HOST is one that is only translated to ours. ConfigError if it cannot."""
    ports, role = settings.server_ports or (0,), settings.role or "server"
    for port in ports:
        try:
            return listen(host, port, or_anywhere=settings.node_host is not None)
        except OSError as error:
            if port == 0 or error.errno != errno.EADDRINUSE:
                at = "there" if port == 0 else "on port %d of P3_SERVER_PORTS" % port
                raise ConfigError("%s (%s): cannot listen %s: %s" % (role, host, at, error.strerror)) from None
    shown = ", ".join(map(str, ports)) if len(ports) <= 8 else "%d to %d" % (min(ports), max(ports))
    raise ConfigError(
        "%s (%s): none of P3_SERVER_PORTS is free here: %s. Each server on a host needs one of its own, and with "
        "P3_GROUPS each worker: give more ports, or stop what holds them: ss -tlnp" % (role, host, shown)
    )


def _listen_anywhere(port: int) -> socket.socket:
    try:
        return _listen(socket.AF_INET6, "::", port)  # of both families
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise
        return _listen(socket.AF_INET, "0.0.0.0", port)  # there is no IPv6


def _listen(family: int, host: str, port: int) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if host == "::":
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((host, port))
        listener.listen(1024)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
