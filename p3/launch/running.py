"""A process of a job that was started: what it says, and how it ends."""

from __future__ import annotations

import asyncio
import logging
from typing import Sequence

from p3.launch.engines import Process
from p3.launch.output import Output, Source
from p3.launch.placement import Task

log = logging.getLogger("p3.run")

DRAIN_S = 1.0  # for output that a process's own children may still hold open
_TERMINATE_S = 5.0  # from SIGTERM to SIGKILL


class Pump:
    """Takes what a process says to its Source, as fast as our own output is read."""

    def __init__(self, reader: asyncio.StreamReader, source: Source, output: Output) -> None:
        self._output = output
        self._times_held = 0
        self._is_held = False
        self._task = asyncio.ensure_future(self._run(reader, source))

    async def _run(self, reader: asyncio.StreamReader, source: Source) -> None:
        try:
            while data := await reader.read(1 << 16):
                source.feed(data)
                if not self._output.has_room:
                    self._times_held += 1
                    self._is_held = True
                    await self._output.room()
                    self._is_held = False
        finally:
            source.end()

    @property
    def is_over(self) -> bool:
        """It has taken all, or will take no more."""
        return self._task.done()

    async def end(self) -> bool:
        """Of a process that has ended: whether this has, too. It waits a little for what is still to come, and then
        for no more, unless it is held up."""
        before = self._times_held
        _, late = await asyncio.wait({self._task}, timeout=DRAIN_S)
        if late and not self._is_held and self._times_held == before:
            self._task.cancel()  # something that it has started holds the pipe open
            return True
        return not late


class Running:
    """A started process."""

    def __init__(self, task: Task, process: Process, output: Output) -> None:
        self.task, self.process = task, process
        self.errors: Source = output.source(task.name)
        self.sources = (output.source(task.name), self.errors)
        self._told = False
        self._pumps = [Pump(*ends, output) for ends in zip((process.stdout, process.stderr), self.sources)]

    async def ended(self) -> Running:
        """When it has, and what it said has been taken up, unless that is held up: read_out() gets the rest."""
        await self.process.wait()
        await asyncio.gather(*(pump.end() for pump in self._pumps))
        if not self._told:
            self._told = True
            log.info("%s ended with %s", self.task.name, self.process.how())
        return self

    @property
    def is_read_out(self) -> bool:
        return all(pump.is_over for pump in self._pumps)

    async def read_out(self) -> None:
        """Of one that has ended: all that it said, however long nobody takes that from us."""
        for pump in self._pumps:
            while not await pump.end():
                pass

    def obituary(self) -> str:
        last = "; its last line: %s" % self.errors.last_line if self.errors.last_line else ""
        where = "" if self.task.host.is_local else " on %s" % self.task.host.name
        return "%s%s ended with %s%s" % (self.task.name, where, self.process.how(), last)


def signal_all(group: Sequence[Running], number: int) -> None:
    for running in group:
        running.process.signal(number)


async def all_ended(group: Sequence[Running]) -> None:
    if group:
        await asyncio.wait({asyncio.ensure_future(r.ended()) for r in group}, timeout=_TERMINATE_S)
