"""Workers that depart (P3_ON_WORKER_LOSS=continue): which servers have dismissed each. No I/O.

The others hear of it when all servers have: another one is first then, and what it sends as the first, or others ask of
it, must find no server that still waits for the one before.
"""

from __future__ import annotations

from typing import Dict, Iterable, List, Set

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
        self._under_way: Dict[int, _Departure] = {}  # by rank

    def begin(self, worker: Node, is_member: bool, text: str, servers: Iterable[Node]) -> None:
        """`is_member`: false of one on its way into the job, of which no other worker knows. `servers`: that are alive,
        and are told."""
        self._under_way[worker.rank] = _Departure(worker, is_member, text, servers)

    def on_dismissed(self, server: Node, message: dict) -> List[_Departure]:
        """Of members, those that all servers have dismissed by now; they are over."""
        departure = self._under_way.get(message["rank"])
        if departure is None or server not in departure.unheard:
            raise ProtocolError("%s sent a %r message, which is not allowed now" % (server, message["kind"]))
        return self._without(server, [departure])

    def lose_server(self, server: Node) -> List[_Departure]:
        """The same."""
        return self._without(server, list(self._under_way.values()))

    def _without(self, server: Node, departures: List[_Departure]) -> List[_Departure]:
        for one in departures:
            one.unheard.discard(server)
            if not one.unheard:
                del self._under_way[one.worker.rank]
        return [one for one in departures if one.is_member and not one.unheard]
