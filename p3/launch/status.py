"""What the scheduler says of its job to the launcher that started it, through a pipe: one JSON object a line."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from typing import Callable


class Status:
    """Threads: the event loop's alone."""

    def __init__(self, descriptor: int, take: Callable[[dict], None]) -> None:
        """Each object goes to `take` when it has come. `descriptor`: the pipe's, to read from; ours from now on."""
        self._descriptor, self._take = descriptor, take
        self._unfinished = b""  # line
        self._is_over = asyncio.Event()
        os.set_blocking(descriptor, False)
        asyncio.get_running_loop().add_reader(descriptor, self.read)

    def read(self) -> None:
        """Takes at once what has been said by now. What follows from that, like the end of a process, may be noticed
        sooner than the pipe is: who judges by it reads first."""
        with contextlib.suppress(BlockingIOError):
            while not self._is_over.is_set():
                data = os.read(self._descriptor, 1 << 16)
                if not data:
                    self.close()
                *lines, self._unfinished = (self._unfinished + data).split(b"\n")
                for line in lines:
                    self._take(json.loads(line))

    async def over(self) -> None:
        """Returns when the scheduler has ended, and all that it said is taken."""
        await self._is_over.wait()

    def close(self) -> None:
        if not self._is_over.is_set():
            self._is_over.set()
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
