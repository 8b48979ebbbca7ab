"""The ceiling to judge a store by: the same bytes between the same hosts over plain TCP, and nothing else done to them.

A worker sends each server its share of the model and receives as much back, both at once, from and into memory of the
model's size. The server returns what it reads at once, at most a slice at a time. Nothing is cut, ordered, summed or
agreed, and Python does no more than start large system calls, so this runs at the speed of C.
A store that shares memory with the server of its own host may beat it: here that share crosses the loopback interface.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import List, Tuple

CHUNK_BYTES = 200_000  # a slice of 50,000 float32
CONNECT_TIMEOUT_S = 30.0

# "ADDRESS:PORT,..." of all servers, in the environment of servers and workers.
SERVERS_VARIABLE = "RAW_TCP_SERVERS"


def servers_from_env() -> List[Tuple[str, int]]:
    pairs = (entry.rsplit(":", 1) for entry in os.environ[SERVERS_VARIABLE].split(","))
    return [(address, int(port)) for address, port in pairs]


class RawTcp:
    """A worker's connections to all servers. `outgoing` and `landing` are writable byte views of one length, a share of
    which goes to each server; they are borrowed while `exchange` runs."""

    def __init__(self, outgoing: memoryview, landing: memoryview):
        self._connections = [_connect(server) for server in servers_from_env()]
        count = len(self._connections)
        edges = [len(outgoing) // CHUNK_BYTES * i // count * CHUNK_BYTES for i in range(count)] + [len(outgoing)]
        self._shares = [(outgoing[a:b], landing[a:b]) for a, b in zip(edges, edges[1:])]
        self._threads = ThreadPoolExecutor(max_workers=2 * count)

    def exchange(self) -> None:
        pending = []
        for connection, (outgoing, landing) in zip(self._connections, self._shares):
            pending.append(self._threads.submit(connection.sendall, outgoing))
            pending.append(self._threads.submit(_receive_exactly, connection, landing))
        for future in pending:
            future.result()

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        self._threads.shutdown()


def serve(port: int, num_workers: int) -> None:
    """Returns the bytes of `num_workers` connections until all are closed."""
    with socket.create_server(("", port)) as listener:
        connections = [listener.accept()[0] for _ in range(num_workers)]
    threads = [threading.Thread(target=_return_bytes, args=(connection,)) for connection in connections]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _return_bytes(connection: socket.socket) -> None:
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with connection:
        while True:
            count = connection.recv_into(buffer)
            if count == 0:
                return
            connection.sendall(buffer[:count])


def _receive_exactly(connection: socket.socket, landing: memoryview) -> None:
    while landing:
        count = connection.recv_into(landing)
        if count == 0:
            raise ConnectionError(f"raw TCP server {connection.getpeername()} closed the connection inside a round")
        landing = landing[count:]


def _connect(server: Tuple[str, int]) -> socket.socket:
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    while True:
        try:
            connection = socket.create_connection(server, timeout=CONNECT_TIMEOUT_S)
        except ConnectionRefusedError:  # the server's process is still starting
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
            continue
        connection.settimeout(None)
        return connection


if __name__ == "__main__":
    serve(port=int(sys.argv[1]), num_workers=int(sys.argv[2]))
