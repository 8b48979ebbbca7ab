"""Writes to standard output and error from a thread of its own: who gives it text never waits for who reads it.

A terminal that is stopped with Ctrl-S, or a pager that waits for its user, takes nothing for as long as it likes. What
is not written yet is kept, in order; `below` tells who gives much when to go on.
Threads: write() and below() belong to one event loop's, or to no loop's while none runs.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import select
import threading
from typing import Deque, List, Optional, Set, TextIO, Tuple


class Writer:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._texts: Deque[Tuple[int, bytes]] = collections.deque()  # by descriptor
        self._unwritten = 0  # bytes
        self._waiting: List[Tuple[int, asyncio.AbstractEventLoop, asyncio.Future]] = []
        self._thread: Optional[threading.Thread] = None
        self._closed = False

    def write(self, stream: TextIO, text: str) -> None:
        data = text.encode(stream.encoding or "ascii", "backslashreplace")
        with self._changed:
            self._texts.append((stream.fileno(), data))
            self._unwritten += len(data)
            self._changed.notify()
        if self._thread is None:
            # It may be stuck in a write for ever, which shall not keep us from our end.
            self._thread = threading.Thread(target=self._run, name="p3-writer", daemon=True)
            self._thread.start()

    async def below(self, count: int) -> None:
        """Returns when at most `count` bytes are not written yet."""
        with self._changed:
            if self._unwritten <= count:
                return
            loop = asyncio.get_running_loop()
            future = loop.create_future()
            self._waiting.append((count, loop, future))
        await future

    def is_below(self, count: int) -> bool:
        return self._unwritten <= count

    def close(self) -> None:
        """The thread ends, when all is written."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _run(self) -> None:
        gone: Set[int] = set()  # descriptors whose reader has gone; the job goes on
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._texts or self._closed)
                if not self._texts:
                    return
                descriptor, data = self._texts.popleft()
            while data and descriptor not in gone:
                try:
                    written = os.write(descriptor, data)
                except BlockingIOError:  # who has started us left it so
                    select.select([], [descriptor], [])
                    continue
                except OSError:
                    gone.add(descriptor)
                    break
                data = data[written:]
                self._took(written)
            self._took(len(data))

    def _took(self, count: int) -> None:
        with self._changed:
            self._unwritten -= count
            ready = [one for one in self._waiting if self._unwritten <= one[0]]
            self._waiting = [one for one in self._waiting if one not in ready]
        for _, loop, future in ready:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(lambda future=future: future.done() or future.set_result(None))
