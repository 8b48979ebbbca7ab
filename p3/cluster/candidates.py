"""A process that wants to be a node of a running job, from its `join` on until it may connect: what one that enters
(entrances.py) and one that comes back (returns.py) have in common. Threads: the event loop's alone."""

from __future__ import annotations

import asyncio
from typing import Optional

from p3.cluster.agreement import Mark
from p3.cluster.node import Node
from p3.cluster.roster import Entry, Roster


class Candidate:
    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.rank: Optional[int] = entry.join["rank"]  # that it wants; None: any
        self.place: asyncio.Future = asyncio.get_running_loop().create_future()  # the Node that it is to be
        self._told = ""

    def tell(self, why: str) -> None:
        """Why it waits, if that is news."""
        if why != self._told:
            self._told = why
            self.entry.tell({"kind": "waits", "text": why})

    async def wait(self, end: asyncio.Future) -> bool:
        """Until something has become of its place, or it or the job has ended. False: one of the two has."""
        hearing = asyncio.ensure_future(self.entry.stream.receive())  # nothing but its end
        try:
            await asyncio.wait({self.place, hearing, end}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            hearing.cancel()
            heard = (await asyncio.gather(hearing, return_exceptions=True))[0]
        return not end.done() and isinstance(heard, asyncio.CancelledError)

    def welcome(self, node: Node, mark: Mark, roster: Roster, outlived: bool) -> None:
        """It is that node in the roster from here on, and hears of nothing else before it has caught up."""
        self.entry.catches_up = True
        roster.replace(node, self.entry)
        entered = {"barrier": mark.number, "round": mark.round}
        self.entry.stream.send(
            {"kind": "welcome", "rank": node.rank, "entered": entered, "outlived": outlived}
        )
