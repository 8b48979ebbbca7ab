"""Between the supervisors of one machine: each learns when another one's worker, or that supervisor itself, has failed.

The first of the machine listens at an abstract AF_UNIX name, the others connect. Whoever has come to a good end says so
with one byte before it closes; a connection that closes without it is a failure, also of a process that was killed.
Nothing blocks: the supervisor's loop watches `sockets` and calls step().
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
from typing import List, Optional

from p3.cluster.connections.strangers import source_of
from p3.launch.launchers.place import Place

_GOOD = b"."


class Lifeline:
    def __init__(self, place: Place, root: str) -> None:
        """`root`: where the scheduler is, which makes the name this job's alone."""
        what = "\0".join([str(os.getuid()), place.job, place.machine, root])
        self._name = "\0p3-lifeline-" + hashlib.sha256(what.encode("utf-8", "surrogateescape")).hexdigest()[:32]
        self._listener: Optional[socket.socket] = None
        self._lines: List[socket.socket] = []
        self._to_connect = place.local_rank > 0
        self._failed = False
        if place.local_rank == 0 and place.local_size != 1:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.setblocking(False)
            self._listener.bind(self._name)
            self._listener.listen(1024)

    @property
    def sockets(self) -> List[socket.socket]:
        return self._lines + [self._listener] * (self._listener is not None)

    @property
    def waits(self) -> bool:
        """step() is worth calling again without any of the sockets being ready: the first one may listen by then."""
        return self._to_connect

    def step(self) -> bool:
        """Connects, accepts and reads what there is. False: another process of this machine has failed."""
        if self._to_connect:
            self._connect()
        with contextlib.suppress(BlockingIOError):
            while self._listener is not None:
                line, address = self._listener.accept()
                self._add(line, address)
        intact = True
        for line in list(self._lines):
            with contextlib.suppress(BlockingIOError):
                intact = intact and self._last_word_of(line) == _GOOD
                self._lines.remove(line)
                line.close()
        return intact

    def close(self, good: bool) -> None:
        """A failure is told to the first of the machine even if that does not listen yet: see `waits`."""
        self._to_connect, self._failed = self._to_connect and not good, not good
        for line in self._lines:
            with contextlib.suppress(OSError):
                if good:
                    line.send(_GOOD)
            line.close()
        self._lines.clear()
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _connect(self) -> None:
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            line.connect(self._name)
        except OSError:  # not there yet
            line.close()
            return
        self._to_connect = False
        if self._failed:
            line.close()
        else:
            self._add(line, None)

    def _add(self, line: socket.socket, address: object) -> None:
        if source_of(line, address) is None:  # another user's
            line.close()
            return
        line.setblocking(False)
        self._lines.append(line)

    @staticmethod
    def _last_word_of(line: socket.socket) -> bytes:
        try:
            return line.recv(1)
        except ConnectionError:
            return b""
