"""A worker's end of the socket by which its benchmark controls it (p3/measure/jobs/controlled.py)."""

from __future__ import annotations

import json
import os
import socket
from typing import Optional

VARIABLE = "BENCH_CONTROL"  # the socket's path, in the environment


class Control:
    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(os.environ[VARIABLE])

    def say(self, **message) -> None:
        self._socket.send(json.dumps(message).encode())

    def hear(self) -> Optional[dict]:
        """The next message; None when the benchmark has closed the socket."""
        packet = self._socket.recv(1 << 16)
        return json.loads(packet) if packet else None
