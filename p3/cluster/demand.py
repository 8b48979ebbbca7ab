"""A snapshot that somebody asks for, outside the rounds at which all are taken: behind which step. No I/O.

Workers are not at the same step, and none can wait for another one without keeping it from its next step. So each is
asked how many steps are behind it, answers at once, and stops at the end of its next one until it hears the decision:
a step behind the furthest of them, which nobody has ended yet. While a worker has called join(), which takes no steps,
the demand rests. The snapshot may be one with which the job `ends`.
"""

from __future__ import annotations

from typing import Dict, List, Optional, Sequence, Set, Tuple

from p3.cluster.node import Node
from p3.errors import ProtocolError
from p3.snapshots.files import MAX_ROUND

Sent = List[Tuple[Node, dict]]


class Demand:
    def __init__(self, workers: Sequence[Node]) -> None:
        self._workers = workers
        self._number = 0  # of the question that was asked last
        self._marks: Optional[Dict[Node, int]] = None  # of a question under way: the answers
        self._round = 0  # what was decided, until it is over: the end of the first step from this one on
        self._rests = False  # it is there, and to be asked when nobody is absent
        self._ends = False

    def make(self, ends: bool, absent: Set[Node]) -> Sent:
        """`absent`: workers that take no steps now."""
        is_known = (self._marks is not None or self._round > 0) and self._ends >= ends
        self._ends |= ends
        return [] if is_known or self._marks is not None else self._ask(absent)

    def mark(self, node: Node, number: int, round: int) -> Sent:
        if number > self._number:
            raise ProtocolError("%s answered snapshot question %d, which nobody asked" % (node, number))
        if round > MAX_ROUND:
            raise ProtocolError("%s reports %d steps, more than a snapshot can have" % (node, round))
        if number < self._number or self._marks is None:
            return []  # withdrawn
        if node in self._marks:
            raise ProtocolError("%s answered snapshot question %d twice" % (node, number))
        self._marks[node] = round
        return self._decide_if_all_have_told()

    def _decide_if_all_have_told(self) -> Sent:
        is_whole = self._marks.keys() >= set(self._workers)
        return self._decide(max(self._marks.values()) + 1) if is_whole else []

    def depart(self, node: Node, was_first: bool, absent: Set[Node]) -> Sent:
        """A worker is none any more. What is not over goes on without it; if it `was_first`, which begins snapshots,
        the others may be past the step that was decided on."""
        if self._marks is None:
            asks = (was_first and self._round > 0) or (self._rests and not absent)  # it was the last in join()
            return self._ask(absent) if asks else []
        self._marks.pop(node, None)
        return self._decide_if_all_have_told()

    def enter(self, absent: Set[Node]) -> Sent:
        """A worker is one now, and has heard of nothing that is not over."""
        return self._ask(absent) if self._marks is not None or self._round > 0 else []

    def rest(self) -> Sent:
        """A worker has called join(): what is not over is withdrawn, and asked again later."""
        is_open = self._marks is not None or self._round > 0
        self._rests |= is_open
        return self._decide(0) if is_open else []

    def go_on(self, absent: Set[Node]) -> Sent:
        return self._ask(absent) if self._rests else []

    def drop(self) -> Sent:
        """A worker has left: what is not over is withdrawn for good."""
        withdrawn = self.rest()
        self._rests = self._ends = False
        return withdrawn

    def over(self, round: int, is_given_up: bool, absent: Set[Node]) -> Sent:
        """A snapshot was taken, or could not be written; or it was given up, as somebody takes no part any more."""
        if not 0 < self._round <= round:
            return []
        self._round = 0
        if is_given_up:
            return self._ask(absent)
        self._ends = False
        return []

    def _ask(self, absent: Set[Node]) -> Sent:
        self._rests, self._round = bool(absent), 0
        if self._rests:
            return []
        self._number += 1
        self._marks = {}
        return self._to_all({"kind": "snapshot_wanted", "number": self._number})

    def _decide(self, round: int) -> Sent:
        self._marks, self._round = None, round
        decided = {"number": self._number, "round": round, "ends": self._ends and round > 0}
        return self._to_all({"kind": "snapshot_at", **decided})

    def _to_all(self, message: dict) -> Sent:
        return [(worker, message) for worker in self._workers]
