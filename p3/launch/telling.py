"""What `p3 run` says of a job while it runs: a line every so often (P3_WATCH_S), and one at SIGUSR2.

It watches as `p3 top` does, so nothing depends on it: where a view cannot be had, there is no line.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Callable, Set

from p3.cluster.watching import watcher, words
from p3.cluster.watching.history import LONGEST_S
from p3.errors import ConfigError, RendezvousError
from p3.settings import Settings

log = logging.getLogger("p3.run")


class Telling:
    """Threads: the event loop's alone."""

    def __init__(self, settings: Settings, say: Callable[[str], None]) -> None:
        """`settings`: with the scheduler's address and the job's secret."""
        self._settings, self._say = settings, say
        self._tasks: Set[asyncio.Task] = set()

    def begin(self) -> None:
        """The job runs: from here on a line every so often."""
        if self._settings.watch_s > 0:
            self._do(self._tell_again_and_again())

    def tell_once(self) -> None:
        """At once; also what a job waits for that has not begun."""
        self._do(self._tell_once())

    def end(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _do(self, work) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tell_again_and_again(self) -> None:
        every_s = self._settings.watch_s
        while True:
            is_first = True  # there is nothing to say yet
            try:
                async for view in watcher.views(self._settings, every_s, min(every_s, LONGEST_S)):
                    if not is_first:
                        self._say(words.line(view))
                    is_first = False
            except watcher.Ended as end:
                log.debug("no more lines: %s", end)
                return
            except (ConfigError, RendezvousError) as error:
                log.debug("no line: %s", error)
                await asyncio.sleep(every_s)

    async def _tell_once(self) -> None:
        try:
            text = words.line(await watcher.look(self._settings, LONGEST_S))
        except (ConfigError, RendezvousError, watcher.Ended) as error:
            text = str(error)
        self._say(text)
