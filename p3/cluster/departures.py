"""Workers that depart (P3_ON_WORKER_LOSS=continue): which servers have dismissed each. No I/O.

The others hear of it when all servers have: another one is first then, and what it sends as the first, or others ask of
it, must find no server that still waits for the one before.
"""

from __future__ import annotations

from typing import Iterable, List, Set

from p3.cluster.node import Node
from p3.errors import ProtocolError


class _Departure:
    def __init__(self, worker: Node, is_member: bool, text: str, servers: Iterable[Node]) -> None:
        self.worker, self.is_member = worker, is_member
        self.text = text  # how it was lost
        self.unheard: Set[Node] = set(servers)


class Departures:
    """Of one job."""

    def __init__(self) -> None:
        self._under_way: List[_Departure] = []  # of a rank maybe several: another process came in its place, and went

    def begin(self, worker: Node, is_member: bool, text: str, servers: Iterable[Node]) -> None:
        """`is_member`: false of one on its way into the job, of which no other worker knows. `servers`: that are alive,
        and are told."""
        self._under_way.append(_Departure(worker, is_member, text, servers))

    def on_dismissed(self, server: Node, message: dict) -> List[_Departure]:
        """Of members, those that all servers have dismissed by now; they are over."""
        its = [one for one in self._under_way if one.worker.rank == message["rank"] and server in one.unheard]
        if not its:
            raise ProtocolError("%s sent a %r message, which is not allowed now" % (server, message["kind"]))
        return self._without(server, its[:1])

    def lose_server(self, server: Node) -> List[_Departure]:
        """The same."""
        return self._without(server, self._under_way)

    def _without(self, server: Node, departures: List[_Departure]) -> List[_Departure]:
        for one in departures:
            one.unheard.discard(server)
        over = [one for one in departures if not one.unheard]
        self._under_way = [one for one in self._under_way if one.unheard]
        return [one for one in over if one.is_member]
