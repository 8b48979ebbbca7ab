"""Which server serves what, when some are lost (P3_ON_SERVER_LOSS=continue): what the scheduler decides. No I/O.

Each rank of a server names slices for good. A lost server's, and those that it had inherited, go to the next one that
is alive, its heir. That is told to `inherit` each of these ranks, and says `inherited`; only then are the workers told
of the heir (`server_departed`), as what they send to it from then on must find its slice. A process that takes the
rank of a lost server serves that one again (returns.py). docs/replicated-servers.md has the rest.
"""

from __future__ import annotations

from typing import Dict, List, Optional, Sequence, Set, Tuple

from p3.cluster.node import Node
from p3.errors import DisagreementError, ProtocolError

Sent = List[Tuple[Node, dict]]


class _Estate:
    """What a lost server leaves, until the workers know who has it."""

    def __init__(self, lost: Node, ranks: Set[int], changes: int) -> None:
        self.lost, self.ranks, self.changes = lost, ranks, changes
        self.heir: Node
        self.unanswered: Set[int]


class Heirs:
    def __init__(self, workers: Sequence[Node], servers: Sequence[Node]) -> None:
        """`workers`: a list that changes with the job; `servers`: by rank."""
        self._workers, self._servers = workers, list(servers)
        self._alive = list(servers)
        # Who has the slices of that rank: as the workers know, or are told before anything else becomes of it.
        self._serves = {node.rank: node for node in servers}
        self._estates: List[_Estate] = []
        self.changes = 0  # how often a server was lost or came back
        self._returned_at: Dict[int, int] = {}  # of a rank that came back: which change that was

    @property
    def lost(self) -> List[int]:
        """Ranks."""
        return [node.rank for node in self._servers if node not in self._alive]

    def is_alive(self, server: Node) -> bool:
        return server in self._alive

    @property
    def are_known(self) -> bool:
        """The workers have been told of all."""
        return not self._estates

    def heir_of(self, server: Node) -> Optional[Node]:
        """Who serves what a lost server did, as the workers have been told; None: it is alive."""
        return None if self.is_alive(server) else self._serves[server.rank]

    def lose(self, server: Node) -> Sent:
        """What follows. DisagreementError if no other one is left."""
        self._alive.remove(server)
        if not self._alive:
            raise DisagreementError("no other server is left")
        self.changes += 1
        ranks = {rank for rank, one in self._serves.items() if one == server}
        told = self._leave(_Estate(server, ranks, self.changes), server)
        for estate in [one for one in self._estates if one.heir == server]:
            told += self._leave(estate, server)
        return told

    def _leave(self, estate: _Estate, former: Node) -> Sent:
        """To the one behind `former`, or the first."""
        if estate not in self._estates:
            self._estates.append(estate)
        estate.heir = min(self._alive, key=lambda one: (one.rank - former.rank) % len(self._servers))
        estate.unanswered = set(estate.ranks)
        return [(estate.heir, {"kind": "inherit", "rank": rank}) for rank in sorted(estate.ranks)]

    def on_inherited(self, server: Node, message: dict) -> Sent:
        estate = next((one for one in self._estates if one.heir == server and message["rank"] in one.unanswered), None)
        if estate is None:
            raise ProtocolError("%s has inherited what nobody left it" % (server,))
        estate.unanswered.remove(message["rank"])
        if estate.unanswered:
            return []
        self._estates.remove(estate)
        self._serves.update(dict.fromkeys(estate.ranks, server))
        departed = {"kind": "server_departed", "rank": estate.lost.rank, "heir": server.rank,
                    "ranks": sorted(estate.ranks), "changes": estate.changes}  # fmt: skip
        return [(worker, departed) for worker in self._workers]

    def take_back(self, server: Node) -> Node:
        """A process is that lost server from here on; all workers know its heir, which is returned."""
        heir = self._serves[server.rank]
        self._servers[server.rank] = self._serves[server.rank] = server
        self._alive = [one for one in self._servers if one in self._alive or one == server]
        self.changes += 1
        self._returned_at[server.rank] = self.changes
        return heir

    def was_former(self, rank: int, changes: int) -> bool:
        """Whether a server of that rank, of which was spoken behind so many changes, is another one than there is."""
        return changes < self._returned_at.get(rank, 0)
