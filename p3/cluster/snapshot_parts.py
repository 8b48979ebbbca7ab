"""Which parts of a snapshot are written: the scheduler's book of them. No I/O.

The first worker begins a snapshot when the servers hold their copies; the other workers may have reported their parts
before. It is whole when every node has reported and the first worker has completed it. It is given up when a node says
that it cannot write its part; when one that has not reported takes no part any more, as it has joined or left; or when
the first worker begins the next one, or has departed.
"""

from __future__ import annotations

from typing import Dict, List, Optional, Sequence, Set

from p3.cluster.node import Node
from p3.errors import ProtocolError

_MAX_AHEAD = 4  # snapshots that a worker may report before they are begun; rounds need both, so it is hardly one


class SnapshotParts:
    def __init__(self, workers: Sequence[Node], servers: Sequence[Node]) -> None:
        self._first, self._nodes = workers[0], {*workers, *servers}
        self._awaited = set(self._nodes)  # of these, who has a part of the last one that was begun
        self._round = 0  # of the snapshot that was begun last
        self._begun_by: Optional[Node] = None
        self._reported: Dict[int, Dict[Node, dict]] = {}  # by round; of those that have not ended
        self._failed: Dict[int, str] = {}  # of those that were not begun: why they cannot be whole
        self._is_written = False  # all parts of the last one are; it is to be completed
        self._left: Set[Node] = set()

    def begin(self, node: Node, round: int, is_torn: bool = False) -> Optional[str]:
        """Why it cannot be whole, if that is known already; "": it is given up, and another one may be asked for, as a
        first worker that has departed had begun it. `is_torn`: so it is, too, as a server was lost or came back while
        the servers made their copies."""
        if round == self._round and node != self._begun_by:
            return ""
        if round <= self._round:
            raise ProtocolError("%s began the snapshot of round %d after that of %d" % (node, round, self._round))
        self._round, self._begun_by, self._is_written = round, node, False
        self._awaited = set(self._nodes)
        for other in [other for other in self._reported if other < round]:
            del self._reported[other]
        self._reported.setdefault(round, {})
        problem = "" if is_torn else self._failed.get(round)
        self._failed = {other: text for other, text in self._failed.items() if other > round}
        if problem is not None:
            del self._reported[round]
        return problem

    def leave(self, node: Node) -> None:
        self._left.add(node)

    def depart(self, node: Node, first: Node) -> Optional[int]:
        """It is no part of the job any more, whose first worker is `first`. The round of the snapshot that has become
        impossible, if one has: which lacks its part, or which it was to complete."""
        self._nodes.discard(node)
        if node == self._first:
            self._first = first
            under_way = self._round in self._reported or self._is_written
            self._reported.pop(self._round, None)
            self._is_written = False
            return self._round if under_way else None
        if node in self._reported.get(self._round, {node}):
            return None
        del self._reported[self._round]
        return self._round

    def depart_server(self, node: Node) -> Optional[int]:
        """As depart(), of a server: what it had written is a part all the same."""
        self._nodes.discard(node)
        if node not in self._awaited or node in self._reported.get(self._round, {node}):
            return None
        del self._reported[self._round]
        return self._round

    def enter(self, node: Node) -> None:
        """It takes part in snapshots that are begun from here on."""
        self._nodes.add(node)

    def has_left(self, node: Node) -> bool:
        return node in self._left

    def given_up(self, joined: Set[Node]) -> Optional[int]:
        """The round of the snapshot that has just become impossible, if it has. `joined`: who has, and not all have."""
        parts = self._reported.get(self._round)
        if parts is None or joined | self._left <= parts.keys():
            return None
        del self._reported[self._round]
        return self._round

    def add(self, node: Node, round: int, size: int, sha256: str) -> Optional[List[dict]]:
        """All parts, if this is the last one that was missing."""
        if round < self._round or (round == self._round and round not in self._reported):
            return None  # given up
        parts = self._reported.setdefault(round, {})
        is_early = node.role == "server" and round != self._round
        if is_early or node in parts or len(self._reported) > _MAX_AHEAD:
            self._refuse(node, round)
        parts[node] = {"role": node.role, "rank": node.rank, "bytes": size, "sha256": sha256}
        if not parts.keys() >= self._awaited & self._nodes:
            return None
        del self._reported[round]
        self._is_written = True
        return [parts[each] for each in sorted(parts)]

    def fail(self, node: Node, round: int, text: str) -> bool:
        """This node cannot write its part, or the first worker not complete the snapshot. Whether that is the end of
        it, of which nobody has heard yet."""
        if round > self._round and node == self._first and self.begin(node, round):
            return True  # as another node had failed before, of which nobody could be told yet
        if round > self._round:
            if node.role == "server":
                self._refuse(node, round)
            self._failed[round] = text
            self._failed = dict(sorted(self._failed.items())[-_MAX_AHEAD:])
            return False
        if round < self._round or (round not in self._reported and not self._is_written):
            return False
        self._reported.pop(round, None)
        self._is_written = False
        return True

    def take(self, node: Node, round: int) -> None:
        """The first worker has completed it."""
        if round != self._round or not self._is_written:
            self._refuse(node, round)
        self._is_written = False

    @staticmethod
    def _refuse(node: Node, round: int) -> None:
        text = "%s reported its part of the snapshot of round %d, which is not allowed now"
        raise ProtocolError(text % (node, round))
