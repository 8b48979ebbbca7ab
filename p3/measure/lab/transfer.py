"""A short transfer between two hosts, which shows the rate that a link really has.

    measure(hosts[0], hosts[1], seconds=0.3) -> Mbit/s

Counted are Ethernet frames, as the token buckets count them, and only what comes when the buckets are empty. Both ends
are this file again, run on the hosts without P3 and what it imports.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import List

TIMEOUT_S = 30.0  # of silence, and of a whole transfer besides what its rate lets it take
CHUNK = bytes(1 << 16)
# What passes at full speed at first: a token bucket at each end of the link, and the queue behind it.
UNCOUNTED_BYTES = 4 * (96 << 10)
# TCP with timestamps puts 1448 bytes of payload in a frame of 1514.
FRAME_SHARE = 1448 / 1514


def measure(source, sink, seconds: float) -> float:
    """Mbit/s from one host to another, for about `seconds`. OSError says what went wrong."""
    rates = [host.rate_mbit for host in (source, sink) if host.rate_mbit is not None]
    bytes_per_s = min(rates, default=10_000) * 1e6 / 8
    size = UNCOUNTED_BYTES + int(bytes_per_s * seconds)
    timeout_s = TIMEOUT_S + 2 * size / bytes_per_s
    python = [sys.executable, "-I", "-S", str(Path(__file__).resolve())]
    with contextlib.ExitStack() as started:  # ends the sender first, or it would complain of a receiver that has gone
        receiver = _start(started, sink.command(*python, "receive"), stdout=subprocess.PIPE, universal_newlines=True)
        port = receiver.stdout.readline().strip()
        sender = _start(started, source.command(*python, "send", sink.address, port, str(size)))
        try:
            answer = receiver.communicate(timeout=timeout_s)[0]
            if sender.wait(timeout_s) != 0 or not answer:
                raise OSError(f"the transfer from {source.name} to {sink.name} failed")
        except subprocess.TimeoutExpired:
            message = f"the transfer from {source.name} to {sink.name} did not end in {timeout_s:.0f} s"
            raise OSError(message) from None
    return float(answer)


def _start(started: contextlib.ExitStack, command: List[str], **options) -> subprocess.Popen:
    """A process that `started` ends, even if a signal comes while it is being started."""
    from p3.measure.lab.signals import signals_held  # not on the hosts

    with signals_held():
        process = subprocess.Popen(command, **options)
        started.callback(process.communicate)  # reads and waits; called last
        started.callback(process.kill)
    return process


def _receive() -> None:
    with socket.create_server(("", 0)) as listener:
        listener.settimeout(TIMEOUT_S)
        print(listener.getsockname()[1], flush=True)
        connection = listener.accept()[0]
    with connection:
        connection.settimeout(TIMEOUT_S)
        buffer = bytearray(1 << 16)
        total = counted_from = 0
        start = time.monotonic()
        while True:
            received = connection.recv_into(buffer)
            if not received:
                break
            total += received
            if not counted_from and total >= UNCOUNTED_BYTES:
                start, counted_from = time.monotonic(), total
        seconds = time.monotonic() - start
    print((total - counted_from) * 8 / 1e6 / FRAME_SHARE / seconds)


def _send(address: str, port: str, size: str) -> None:
    with socket.create_connection((address, int(port)), TIMEOUT_S) as connection:
        left = int(size)
        while left:
            left -= connection.send(CHUNK[:left])


if __name__ == "__main__":
    {"receive": _receive, "send": _send}[sys.argv[1]](*sys.argv[2:])
