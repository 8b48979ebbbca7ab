"""What a host learns of the way to another's Door: can it be reached, how far is it, which packets pass, how fast.

All of it blocks, for one thread of its own; every step has a deadline, and OSError says what went wrong.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import statistics
import struct
import time
from typing import Dict, Optional

from p3.doctor.door import ANSWER_BYTES, PING, RATE, REQUEST, RESULT, STEP_TIMEOUT_S, TOKEN_BYTES, read
from p3.placement import PACKET_BYTES, SHORT_ROUND_TRIP_S

CONNECT_TIMEOUT_S = 5.0
_PINGS = 9
_IP_MTU_DISCOVER, _IP_PMTUDISC_PROBE = 10, 3  # linux/in.h: never cut up, and believe no earlier message about the path
_UDP_HEADERS = 28  # IPv4's and UDP's
LARGEST_PACKET = 65535  # that IPv4 has; a loopback's MTU is one more
_SMALL_PACKET = 576  # what every IPv4 host takes
_TRIES = 3
_PACKET_TIMEOUT_S = 0.25
_CHUNK = bytes(1 << 18)


def ping(sock: socket.socket) -> Dict[str, object]:
    """Round trip in seconds, the congestion control that P3's connection would have, and TCP's segment."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.sendall(REQUEST.pack(PING, 0.0))
    trips = []
    for _ in range(_PINGS):
        begun = time.monotonic()
        sock.sendall(b"p")
        read(sock, 1)
        trips.append(time.monotonic() - begun)
    return {
        "round_trip_s": statistics.median(trips),
        "congestion": _congestion(sock, min(trips)),
        "segment_bytes": sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG),
    }


def rate_mbit(sock: socket.socket, seconds: float, round_trip_s: float) -> float:
    """What one connection, with the congestion control that P3 would choose, gets through: Mbit/s on the wire, with the
    headers of packets, towards the other host."""
    _congestion(sock, round_trip_s)
    # When it is over, what the kernel still has is not sent: it would disturb the next measurement.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.sendall(REQUEST.pack(RATE, seconds))
    sock.setblocking(False)
    deadline = time.monotonic() + seconds + 2 * STEP_TIMEOUT_S
    while True:
        readable, writable, _ = select.select([sock], [sock], [], max(0.0, deadline - time.monotonic()))
        if readable:
            break
        if not writable or time.monotonic() > deadline:
            raise TimeoutError("nothing came through for %g s" % STEP_TIMEOUT_S)
        with contextlib.suppress(BlockingIOError):
            sock.send(_CHUNK)
    sock.settimeout(STEP_TIMEOUT_S)
    segment = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
    count, spent_s = RESULT.unpack(read(sock, RESULT.size))
    return count * (1 + PACKET_BYTES / segment) * 8 / 1e6 / spent_s


def largest_packet(address: str, port: int, token: bytes, mtu: int, round_trip_s: float) -> Optional[int]:
    """The largest IP packet, of `mtu` bytes at most, that passes whole; None if not even a small datagram is answered,
    so that nothing can be told. IPv4 alone."""
    if ":" in address or len(token) != TOKEN_BYTES:
        return None
    mtu = min(mtu, LARGEST_PACKET)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _IP_PMTUDISC_PROBE)
        probe.connect((address, port))
        timeout_s = max(_PACKET_TIMEOUT_S, 4 * round_trip_s)

        def passes(size: int) -> bool:
            return any(_answered(probe, token, size, timeout_s) for _ in range(_TRIES))

        if not passes(min(_SMALL_PACKET, mtu)):
            return None
        if passes(mtu):
            return mtu
        good, bad = min(_SMALL_PACKET, mtu), mtu
        while bad - good > 1:
            middle = (good + bad) // 2
            good, bad = (middle, bad) if passes(middle) else (good, middle)
        return good


def _answered(probe: socket.socket, token: bytes, size: int, timeout_s: float) -> bool:
    attempt = token + os.urandom(ANSWER_BYTES - TOKEN_BYTES)
    try:
        probe.send(attempt + bytes(size - _UDP_HEADERS - ANSWER_BYTES))
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            probe.settimeout(max(1e-3, deadline - time.monotonic()))
            if probe.recv(ANSWER_BYTES) == attempt:
                return True
    except OSError:  # too large for the interface, refused, or no answer in time
        pass
    return False


def _congestion(sock: socket.socket, round_trip_s: float) -> str:
    """Chooses as src/transport/streams/socket_stream.cc does, and returns what the connection has then."""

    def name() -> str:
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).partition(b"\0")[0].decode()

    is_short = round_trip_s <= SHORT_ROUND_TRIP_S
    if (name() == "bbr") == is_short:
        for better in (b"cubic", b"reno") if is_short else (b"bbr",):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, better)
                break
    return name()
