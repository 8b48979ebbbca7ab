"""Attacks on the listeners of a job, by someone who does not know its secret.

    python tests/helpers/strangers.py HOST PORT [ATTACK ...]

    garbage          random bytes                           half_handshake   a proper hello, and nothing more
    silence          nothing at all                         wrong_proof      a whole handshake, with a guessed proof
    huge_length      a message of 4 GiB before any proof    reflected        the acceptor's own bytes, sent back to it
    http             a web browser                          replayed         a handshake that was overheard, again

and `flood`: as many connections as asked for, in waves that are held open, each wave another attack. Each attack opens
one connection and returns what the listener said before it closed. Only tests, and people with listeners of their own,
use it.
"""

from __future__ import annotations

import os
import random
import select
import socket
import struct
import sys
import time
from typing import Callable, Dict, List, Tuple, Union

Address = Union[str, Tuple[str, int]]  # of an AF_UNIX name, or a host and a port
DEADLINE_S = 20.0

HELLO = struct.Struct("<4sBBB?32s")


def hello(role: int = 3, purpose: int = 1, encrypts: bool = False) -> bytes:
    """What a node says first; any stranger can say it."""
    return HELLO.pack(b"P3ct", 2, purpose, role, encrypts, os.urandom(32))


def connect(address: Address) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
    sock.settimeout(DEADLINE_S)
    sock.connect(address)
    return sock


def answer(sock: socket.socket, limit: int = 1 << 16) -> bytes:
    """All that the listener says until it closes. TimeoutError if it never does."""
    said = b""
    try:
        while len(said) < limit:
            data = sock.recv(limit)
            if not data:
                break
            said += data
    except ConnectionError:
        pass
    return said


def say(sock: socket.socket, data: bytes) -> None:
    try:
        sock.sendall(data)
    except ConnectionError:
        pass  # it has closed; answer() sees what it said


def garbage(sock: socket.socket) -> None:
    say(sock, os.urandom(random.randrange(40, 4000)))


def silence(sock: socket.socket) -> None:
    pass


def huge_length(sock: socket.socket) -> None:
    say(sock, b"\xff\xff\xff\xff" + b"{" * 4096)


def http(sock: socket.socket) -> None:
    say(sock, b"GET / HTTP/1.1\r\nHost: p3\r\nUser-Agent: somebody/1.0\r\n\r\n")


def half_handshake(sock: socket.socket) -> None:
    say(sock, hello())


def wrong_proof(sock: socket.socket) -> None:
    say(sock, hello() + os.urandom(32) + b"\xff\xff\xff\xff")


def reflected(sock: socket.socket) -> None:
    say(sock, hello())
    try:
        challenge = sock.recv(33, socket.MSG_WAITALL)
    except ConnectionError:
        return
    say(sock, challenge[:32] + challenge)


ATTACKS: Dict[str, Callable[[socket.socket], None]] = {
    attack.__name__: attack
    for attack in (garbage, silence, huge_length, http, half_handshake, wrong_proof, reflected)
}


def attack(address: Address, name: str) -> bytes:
    """One connection, to its end; what the listener said."""
    with connect(address) as sock:
        ATTACKS[name](sock)
        return answer(sock)


def replay(address: Address, overheard: bytes) -> bytes:
    """What a node of the job once sent, sent again."""
    with connect(address) as sock:
        say(sock, overheard)
        return answer(sock)


def flood(address: Address, connections: int, wave: int = 500, names: Tuple[str, ...] = tuple(ATTACKS)) -> int:
    """Opens so many, each wave as fast as it can, and holds a wave open while the next one comes. Returns how many were
    let in by the kernel: a full backlog refuses some."""
    held: List[socket.socket] = []
    made = 0
    quick = [name for name in names if name != "reflected"] or ["silence"]  # which would wait for an answer
    while made < connections:
        new = []
        for turn in range(min(wave, connections - made)):
            sock = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
            sock.setblocking(False)
            try:
                sock.connect(address)
            except BlockingIOError:
                pass  # under way, or an AF_UNIX backlog that is full
            except OSError:
                sock.close()
                continue
            new.append((sock, quick[turn % len(quick)]))
        made += min(wave, connections - made)
        poller = select.poll()
        for sock, _ in new:
            poller.register(sock, select.POLLOUT)
        ready = {descriptor for descriptor, _ in poller.poll(200)}
        for sock, name in new:
            if sock.fileno() in ready:
                sock.setblocking(True)
                sock.settimeout(1)
                try:
                    ATTACKS[name](sock)
                except OSError:
                    pass
        for sock in held:
            sock.close()
        held = [sock for sock, _ in new]
    for sock in held:
        sock.close()
    return made


def main(arguments: List[str]) -> int:
    if len(arguments) < 2:
        sys.exit(__doc__)
    address = (arguments[0], int(arguments[1]))
    for name in arguments[2:] or [*ATTACKS, "flood"]:
        started = time.monotonic()
        if name == "flood":
            print("flood: %d connections in %.1f s" % (flood(address, 10000), time.monotonic() - started))
        else:
            said = attack(address, name)
            print("%s: closed after %.2f s, having said %d bytes" % (name, time.monotonic() - started, len(said)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
