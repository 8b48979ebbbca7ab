"""What a scheduler leaves to the one that takes its place when it dies.

What a job's nodes have agreed on is a function of what they have said, in its order (agreement.py does no I/O). So the
scheduler writes each message that counts into its journal before it acts on it, and its successor reads the journal,
decides the same again, and knows what each node was told, or was about to be. Both sides number the messages that
count. A node that comes back says how many it had heard, and gets the others; it is told how many of its own are in
the journal, and sends the others again. So no message is lost, and none counts twice, whenever the scheduler died.

The journal begins when all nodes are connected: a scheduler that dies before that ends the job. It is a file without a
name, in memory where Python knows how, which whoever starts schedulers holds (`p3 run`), and passes on to each.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections import deque
from typing import Deque, Iterator, List, Optional, Tuple

from p3.cluster.node import Node

MAX_BYTES = 64 << 20  # far more than jobs come to; a job that does cannot outlive its scheduler from there on

_LENGTH = struct.Struct("<I")


class Journal:
    """Threads: the event loop's alone. Nobody else writes to its file."""

    def __init__(self, descriptor: int) -> None:
        """`descriptor`: of the file, which may have been another scheduler's."""
        self._descriptor = descriptor
        self._bytes = os.fstat(descriptor).st_size
        self._is_broken = False

    @staticmethod
    def make() -> int:
        """The descriptor of a new one, for __init__. OSError if there is no room for one anywhere."""
        with contextlib.suppress(AttributeError, OSError):  # Pythons that were built for an older libc do not know it
            return os.memfd_create("p3-journal", os.MFD_CLOEXEC)
        import tempfile  # here: it loads much, for what hardly any Python needs

        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())

    @property
    def has_begun(self) -> bool:
        return self._bytes > 0

    @property
    def is_full(self) -> bool:
        """What comes is left out from here on: it must not be another scheduler's any more."""
        return self._is_broken or self._bytes >= MAX_BYTES

    def begin(self, members: List[Tuple[Node, dict]], strategy: Optional[List[str]] = None) -> None:
        """With all nodes and how they joined, in the order of joining. `strategy`: of the job, its text and path."""
        self._append({"members": [[*node, join] for node, join in members], "strategy": strategy})

    def add(self, node: Node, message: dict) -> None:
        """Before anything follows from it."""
        self._append([node.role, node.rank, message])

    def add_demand(self, ends: bool) -> None:
        """A snapshot that somebody outside the job has asked for."""
        self._append(ends)

    def _append(self, record) -> None:
        if self.is_full:
            return
        body = json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode()
        data = _LENGTH.pack(len(body)) + body
        written = 0
        try:
            while written < len(data):  # what lies behind a whole record does not count, if we die here
                written += os.pwrite(self._descriptor, data[written:], self._bytes + written)
        except OSError:  # no memory
            self._is_broken = True
            return
        self._bytes += len(data)

    def read(self) -> Iterator:
        """Its records: {"members": ..., "strategy": ...}, as begin() has them; then (node's role, rank, message), or a
        demand's `ends`. Drops a last one that was not written whole."""
        size, self._bytes = self._bytes, 0
        while self._bytes + _LENGTH.size <= size:
            (length,) = _LENGTH.unpack(os.pread(self._descriptor, _LENGTH.size, self._bytes))
            body = os.pread(self._descriptor, length, self._bytes + _LENGTH.size)
            if len(body) < length:
                break
            yield json.loads(body)
            self._bytes += _LENGTH.size + length
        os.ftruncate(self._descriptor, self._bytes)


class Outbox:
    """One end's messages that count, from the first that the other end may have to hear again."""

    def __init__(self) -> None:
        self._first = 0  # number of the first message that is kept
        self._messages: Deque[dict] = deque()

    def add(self, message: dict) -> None:
        self._messages.append(message)

    def forget(self, count: int) -> None:
        """So many, since the first ever, will not be asked for."""
        while self._first < count and self._messages:
            self._messages.popleft()
            self._first += 1

    def after(self, count: int) -> List[dict]:
        """All behind so many; forgets those."""
        self.forget(count)
        return list(self._messages)

    def __len__(self) -> int:
        return len(self._messages)
