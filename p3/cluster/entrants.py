"""Who enters a running job (P3_ON_WORKER_LOSS=continue), in the place of a worker that has departed or in one that none
has had yet (P3_MAX_WORKERS), and how far each is: what the scheduler decides. No I/O.

A process that wants to enter waits. When all workers are in a barrier at which the script says how far it is (a mark),
no round is under way, and none begins before the barrier ends. There the scheduler gives whoever waits a rank that is
vacant, and tells the servers (`admit`). When all have answered (`admitted`), the process may connect; when
its connections stand, and those of all who were admitted before it, or these are gone, it has entered: it is a worker
as any other, for the agreement, the servers and the divisor of means. So all have one order of workers, whose front is
the first worker: servers have it from `admit`. The barrier ends when nobody is on the way any more.

But it is *on trial* until it comes to the next barrier, in which the others wait for it, and give it what it lacks
meanwhile: whatever goes wrong with it up to there, it departs again, and the job is as it was.
"""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

from p3.cluster.agreement import Agreement, Sent
from p3.cluster.node import Node
from p3.errors import ProtocolError


class _Admission:
    """Of one that is on the way at the mark. `servers`: that are alive."""

    def __init__(self, servers: Sequence[Node]) -> None:
        self.unheard: Set[Node] = set(servers)
        self.problem = ""  # in the words of the first server that has one
        self.is_ready = False  # its connections stand


class Outcome(NamedTuple):
    """What all servers have said of one."""

    node: Node
    problem: str  # why it cannot enter now; "": it may connect


class Entrants:
    """Of one job. Who waits is anything with a `rank`: the one that it wants, or None for any."""

    def __init__(self, agreement: Agreement, workers: Sequence[Node], servers: Sequence[Node]) -> None:
        """`workers`: all that there may be."""
        self._agreement, self._servers = agreement, servers
        self._of_rank = {node.rank: node for node in workers}
        self.waiting: List = []  # in the order of coming
        self._admissions: Dict[Node, _Admission] = {}
        self._on_trial: Set[Node] = set()
        self._chosen_at = 0  # the number of the last mark at which anybody was admitted

    @property
    def free(self) -> List[int]:
        """Ranks that one who waits may have. A place that none has had comes before those of lost workers, for which
        `p3 run --rejoin` starts others."""
        # Who is on the way may be so since the mark before, if all have gone that waited there.
        return [rank for rank in self._agreement.vacant if self._of_rank[rank] not in self._admissions]

    @property
    def may_enter(self) -> bool:
        """False: a server is lost, and not all know yet who serves what it did."""
        return self._agreement.heirs.are_known

    def choose(self) -> List[Tuple[object, Node]]:
        """Once at each mark: who of those who wait enters, and as whom."""
        mark = self._agreement.mark
        if mark is None or mark.problem or mark.number == self._chosen_at or not self.may_enter:
            return []
        free, chosen = self.free, []
        for one in sorted(self.waiting, key=lambda one: one.rank is None):  # those that want just one come first
            rank = one.rank if one.rank is not None else next(iter(free), None)
            if rank in free:
                free.remove(rank)
                chosen.append((one, self._of_rank[rank]))
        return chosen

    def admit(self, node: Node) -> Sent:
        servers = [one for one in self._servers if self._agreement.heirs.is_alive(one)]
        self._admissions[node] = _Admission(servers)
        self._chosen_at = self._agreement.mark.number
        return [(server, {"kind": "admit", "rank": node.rank}) for server in servers]

    def on_admitted(self, server: Node, message: dict) -> Optional[Outcome]:
        """The outcome, when all servers have answered."""
        node = self._of_rank.get(message["rank"])
        admission = self._admissions.get(node)
        if admission is None or server not in admission.unheard:
            raise ProtocolError("%s sent a %r message, which is not allowed now" % (server, message["kind"]))
        admission.unheard.remove(server)
        if message["problem"]:
            admission.problem = admission.problem or "%s: %s" % (server, message["problem"])
        return None if admission.unheard else Outcome(node, admission.problem)

    def is_awaited(self, node: Node, server: Node) -> bool:
        """Whether the server is still to answer."""
        return server in self._admissions[node].unheard

    def is_answered(self, node: Node) -> bool:
        """By all servers. Who is on the way is dropped no sooner, or an answer would be taken for another's."""
        return not self._admissions[node].unheard

    def is_on_the_way(self, node: Optional[Node]) -> bool:
        return node in self._admissions

    @property
    def on_the_way(self) -> List[Node]:
        return list(self._admissions)

    def note_ready(self, node: Node) -> None:
        """The connections of one that is on the way stand."""
        self._admissions[node].is_ready = True

    def is_ready(self, node: Node) -> bool:
        return self._admissions[node].is_ready

    @property
    def next_in(self) -> Optional[Node]:
        """Who enters now."""
        node, admission = next(iter(self._admissions.items()), (None, None))
        return node if admission is not None and admission.is_ready else None

    def enter(self, node: Node) -> List[dict]:
        """What it must be told of the past."""
        del self._admissions[node]
        self._on_trial.add(node)
        return self._agreement.enter(node)

    def end_trial(self, node: Node) -> bool:
        """It is where the others are. False: it was already."""
        was_on_trial = node in self._on_trial
        self._on_trial.discard(node)
        return was_on_trial

    def is_on_trial(self, node: Optional[Node]) -> bool:
        return node in self._on_trial

    @property
    def on_trial(self) -> List[Node]:
        return sorted(self._on_trial)

    def drop(self, node: Node) -> bool:
        """It is gone, or must not stay. True if it was on the way, and so none of the job yet."""
        self._on_trial.discard(node)
        return self._admissions.pop(node, None) is not None

    @property
    def lets_mark_end(self) -> bool:
        """All workers wait at a mark, and nobody enters any more."""
        return self._agreement.mark is not None and not self._admissions
