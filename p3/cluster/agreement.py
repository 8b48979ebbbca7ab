"""What the nodes of a running job agree on: keys, options of stores, the forward order, barriers, the end. No I/O.

The scheduler runs one `Agreement`; so does an embedded session, without any scheduler. receive() takes one message of
one node and returns what must be sent to whom. Agreement on a key is no barrier: workers announce in any order, rank
0's word decides, and the others' are compared with it whenever both are known. Options are agreed in the same way;
where a store's first key settles an option, announcing the key is a word on that option too, and the first push is one
on the optimizer.
"""

from __future__ import annotations

import math
from typing import Any, Dict, Hashable, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple, Union

from p3 import key_plan
from p3.cluster.node import Node
from p3.cluster.snapshot_parts import SnapshotParts
from p3.errors import DisagreementError, ProtocolError
from p3.key_plan import KeyPlan

# What one worker may have the scheduler keep: far more than jobs come to.
MAX_CLAIM_BYTES = 64 << 20  # of keys and options, as text
_MAX_BARRIERS = 1000  # that it has entered and others have not
_MAX_COUNTS = 100  # that it has asked for and servers have not answered
_MAX_DIMENSIONS = 32  # NumPy 1's

_FROM = dict(  # who may send what
    worker="announce option order barrier repartition moved count bye captured snapshot_written resume joined".split(),
    server="defined option_set counted snapshot_written".split(),
)

Sent = List[Tuple[Node, dict]]
Identity = Tuple[int, Hashable]  # of a key or an option: store and name
Claims = Dict[Identity, Dict[Node, dict]]


class _Question(NamedTuple):
    """What servers have been asked, and who hears of it when they all have answered."""

    unanswered: Set[Node]
    receivers: Sequence[Node]
    outcome: dict


class Agreement:
    def __init__(
        self,
        workers: List[Node],
        servers: List[Node],
        slice_elements: Union[int, str] = "auto",
        partitions: Union[int, str] = "auto",
    ) -> None:
        """Nodes by rank. `partitions` of a key of rows: "auto" begins with as many as there are servers."""
        self._workers, self._servers = workers, servers
        self._slice_elements = key_plan.slice_elements(slice_elements, len(servers))
        self._partitions: int = len(self._servers) if partitions == "auto" else partitions
        self._keys: Claims = {}  # what each worker announced
        self._options: Claims = {}  # what each worker asked for; {} if it goes without
        self._slices = 0  # of all keys so far
        self._wire_keys = 0
        self._plans: Dict[Identity, KeyPlan] = {}  # of each decided key, the latest
        self._agreed: Dict[int, dict] = {}  # by wire key, as the workers were told
        self._orders: Dict[int, dict] = {}  # by store, the latest
        self._leaving: Dict[int, Tuple[Identity, Set[Node]]] = {}  # former plans of sparse keys: who still uses them
        self._questions: Dict[Hashable, _Question] = {}
        self._barriers: Dict[int, Set[Node]] = {}  # of those under way: who has arrived
        self._barriers_entered: Dict[Node, int] = {}
        self._snapshots = SnapshotParts(self._workers + self._servers)
        self.resumed = 0  # the round of the snapshot that the job began with
        self.joins = 0  # times that all workers have called join()
        self.joined_at = 0  # and the steps that were behind the job by then
        self.is_uneven = False  # workers have called it behind different steps
        self._joined_at: Dict[Node, int] = {}  # of those who have called it since: behind which step
        self._claim_bytes: Dict[Node, int] = {}
        self._left: Set[Node] = set()

    def receive(self, node: Node, message: dict) -> Sent:
        """Raises DisagreementError, or ProtocolError if the node may not say that now; both fail the job. The scheduler
        may speak for a lost worker."""
        if message["kind"] not in _FROM[node.role] or node in self._left:
            raise ProtocolError("%s sent a %r message, which is not allowed now" % (node, message["kind"]))
        return getattr(self, "_on_" + message["kind"])(node, message)

    # Replacing a worker (see losses.py)

    def stores(self) -> Dict[int, int]:
        """Of each key that the servers have been told to define: its store, by wire key."""
        return {wire_key: agreed["store"] for wire_key, agreed in self._agreed.items()}

    def barriers_entered(self, node: Node) -> int:
        return self._barriers_entered.get(node, 0)

    def lose(self, node: Node) -> Sent:
        """A worker is gone, and does not write its part of a snapshot that is under way."""
        self._snapshots.leave(node)
        return self._given_up_snapshot()

    def joined(self, node: Node) -> Optional[int]:
        """Behind which step it has called the join() that is not over; None: it has not."""
        return self._joined_at.get(node)

    def joins_called(self, node: Node) -> int:
        return self.joins + (node in self._joined_at)

    def barriers(self) -> List[Tuple[int, Set[Node]]]:
        """Those under way, and who has entered them."""
        return sorted(self._barriers.items())

    def catch_up(self, node: Node, step: int, rounds: Mapping[int, int]) -> List[dict]:
        """What a worker that has taken a lost one's place, behind that step and these rounds of the keys, must be told
        of the past. What is being decided, it hears as the others do."""
        self._snapshots.come_back(node, step)
        told = [
            dict(agreed, catch_up=rounds.get(wire_key, 0))
            for wire_key, agreed in sorted(self._agreed.items())
            if ("defined", wire_key) not in self._questions
        ]
        for (store, name), claims in sorted(self._options.items()):
            value = claims.get(self._workers[0])
            if value and ("option_set", (store, name)) not in self._questions:
                told.append({"kind": "option_agreed", "store": store, "name": name, "value": value})
        joined = [joined_message(other, step) for other, step in sorted(self._joined_at.items())]
        return told + list(self._orders.values()) + joined

    # From workers

    def _on_announce(self, node: Node, message: dict) -> Sent:
        identity = (message["store"], message["name"])
        shape, is_sparse = message["shape"], message["sparse"]
        if is_sparse and (not shape or 0 in shape[1:]):
            raise ProtocolError("%s announced the sparse key %r without rows" % (node, message["name"]))
        if len(shape) > _MAX_DIMENSIONS or math.prod([max(1, length) for length in shape]) >= 1 << 63:
            raise ProtocolError("%s announced key %.100r with a shape that no array has" % (node, message["name"]))
        kind = {field: message[field] for field in ("dtype", "sparse", "staleness", "gathered")}
        could_gather = kind["dtype"] == "float32" and not is_sparse and kind["staleness"] == 0 and math.prod(shape) > 0
        if kind["gathered"] and not could_gather:
            raise ProtocolError("%s announced key %r as one of factors, which it cannot be" % (node, message["name"]))
        value = {"shape": shape, **kind}
        decided = self._claim(self._keys, identity, "key %r" % (message["name"],), node, value)
        for option in message["defaults"]:
            self._claim_option(message["store"], option, node, {})
        if not decided:
            return []
        plan = KeyPlan(
            wire_key=self._wire_keys,
            dtype=message["dtype"],
            elements=math.prod(shape),
            first_slice=self._slices,
            slice_elements=self._slice_elements,
            row_elements=math.prod(shape[1:]) if is_sparse else 0,
            partitions=max(1, min(self._partitions, shape[0])) if is_sparse else 0,
            staleness=message["staleness"],
            is_vector=len(shape) <= 1,
            parts=len(self._workers) if message["gathered"] else 0,
        )
        self._agreed[plan.wire_key] = plan.agreed(*identity, shape)
        return self._define(identity, plan, self._agreed[plan.wire_key], predecessor=plan.wire_key)

    def _define(self, identity: Identity, plan: KeyPlan, outcome: dict, predecessor: int) -> Sent:
        """Has the servers define the latest plan of a key; then the workers get the outcome."""
        self._plans[identity] = plan
        self._wire_keys += 1
        self._slices += plan.slices
        self._questions["defined", plan.wire_key] = _Question(set(self._servers), self._workers, outcome)
        return self._to(self._servers, plan.define(*identity, predecessor))

    def _on_repartition(self, node: Node, message: dict) -> Sent:
        """Another number of partitions, once all workers have done with the plan before."""
        identity, partitions = (message["store"], message["name"]), message["partitions"]
        plan = self._plans.get(identity)
        if node.rank != 0 or plan is None or not plan.row_elements or plan.staleness > 0:
            raise ProtocolError("%s may not change the partitions of key %r" % (node, message["name"]))
        former = plan.wire_key
        is_moving = any(identity == moving for moving, _ in self._leaving.values())
        if not 1 <= partitions <= plan.rows or is_moving or ("defined", former) in self._questions:
            raise ProtocolError("%s cannot have %d partitions of key %r now" % (node, partitions, message["name"]))
        self._leaving[former] = identity, set(self._workers)
        successor = plan._replace(wire_key=self._wire_keys, first_slice=self._slices, partitions=partitions)
        return self._define(identity, successor, successor.repartitioned(*identity), former)

    def _on_moved(self, node: Node, message: dict) -> Sent:
        identity, staying = self._leaving.get(message["wire_key"], (None, set()))
        if node not in staying:
            raise ProtocolError("%s left a plan (%d) that it did not use" % (node, message["wire_key"]))
        staying.remove(node)
        if staying:
            return []
        del self._leaving[message["wire_key"]]
        settled = {"kind": "settled", "store": identity[0], "name": identity[1]}
        dropped = {"kind": "drop", "wire_key": message["wire_key"]}
        return self._to(self._servers, dropped) + self._to(self._workers, settled)

    def _on_option(self, node: Node, message: dict) -> Sent:
        store, name, value = message["store"], message["name"], message["value"]
        if not self._claim_option(store, name, node, value) or not value:
            return []
        agreed = dict(message, kind="option_agreed")
        self._questions["option_set", (store, name)] = _Question(set(self._servers), self._workers, agreed)
        return self._to(self._servers, dict(message, kind="set_option"))

    def _on_order(self, node: Node, message: dict) -> Sent:
        self._require_rank_0(node, message)
        self._orders[message["store"]] = message
        return self._to(self._workers, message)

    def _on_barrier(self, node: Node, message: dict) -> Sent:
        number = message["number"]
        if number != self._barriers_entered.get(node, 0) + 1:
            raise ProtocolError("%s entered barrier %d out of turn" % (node, number))
        if len(self._barriers) >= _MAX_BARRIERS and number not in self._barriers:
            raise ProtocolError("%s is %d barriers ahead of others" % (node, len(self._barriers)))
        self._barriers_entered[node] = number
        arrived = self._barriers.setdefault(number, set())
        arrived.add(node)
        if len(arrived) < len(self._workers):
            self._check_nobody_waits_for_the_gone()
            return []
        del self._barriers[number]
        return self._to(self._workers, {"kind": "barrier_done", "number": number})

    def _on_count(self, node: Node, message: dict) -> Sent:
        identity = (node.rank, message["number"])
        if ("counted", identity) in self._questions:
            raise ProtocolError("%s asked twice for count %d" % (node, message["number"]))
        if sum(kind == "counted" and asked[0] == node.rank for kind, asked in self._questions) >= _MAX_COUNTS:
            raise ProtocolError("%s asks for more than %d counts at once" % (node, _MAX_COUNTS))
        counters = {"kind": "counters", "number": message["number"], "servers": [{} for _ in self._servers]}
        self._questions["counted", identity] = _Question(set(self._servers), [node], counters)
        return self._to(self._servers, {"kind": "count_for", "worker": node.rank, "number": message["number"]})

    def _on_bye(self, node: Node, _message: dict) -> Sent:
        self._left.add(node)
        if len(self._left) == len(self._workers):
            return self._to(self._servers, {"kind": "stop"})
        self._check_nobody_waits_for_the_gone()
        self._snapshots.leave(node)
        return self._given_up_snapshot()

    # From servers

    def _on_defined(self, node: Node, message: dict) -> Sent:
        return self._answered(node, "defined", message["wire_key"])

    def _on_option_set(self, node: Node, message: dict) -> Sent:
        return self._answered(node, "option_set", (message["store"], message["name"]))

    def _on_counted(self, node: Node, message: dict) -> Sent:
        identity = (message["worker"], message["number"])
        question = self._question(node, "counted", identity)
        question.outcome["servers"][node.rank] = dict(message["counters"], label=str(node))
        return self._answered(node, "counted", identity)

    def _question(self, node: Node, answer: str, identity: Hashable) -> _Question:
        question = self._questions.get((answer, identity))
        if question is None or node not in question.unanswered:
            raise ProtocolError("%s sent %r for %s, which nobody asked for" % (node, answer, identity))
        return question

    def _answered(self, node: Node, answer: str, identity: Hashable) -> Sent:
        question = self._question(node, answer, identity)
        question.unanswered.remove(node)
        if question.unanswered:
            return []
        del self._questions[answer, identity]
        return self._to(question.receivers, question.outcome)

    # Snapshots: worker 0 begins and completes them

    def _on_captured(self, node: Node, message: dict) -> Sent:
        self._require_rank_0(node, message)
        self._snapshots.begin(node, message["round"])
        asked = {"kind": "write_snapshot", "round": message["round"]}
        return self._to(self._servers, asked) + self._given_up_snapshot()

    def _on_snapshot_written(self, node: Node, message: dict) -> Sent:
        parts = self._snapshots.add(node, message["round"], message["bytes"], message["sha256"])
        return [] if parts is None else self._snapshot_complete(message["round"], parts)

    def _on_resume(self, node: Node, message: dict) -> Sent:
        self._require_rank_0(node, message)
        self.resumed = message["round"]
        return self._to(self._workers, message)

    def _on_joined(self, node: Node, message: dict) -> Sent:
        if message["worker"] != node.rank:
            raise ProtocolError("%s says that worker %d has joined" % (node, message["worker"]))
        if node in self._joined_at:  # or the one whose place it has taken had
            return []
        self._joined_at[node] = message["step"]
        self.is_uneven |= len(set(self._joined_at.values())) > 1
        if len(self._joined_at) == len(self._workers):
            self.joins += 1
            self.joined_at = max(self._joined_at.values())
            self._joined_at.clear()
        return self._to(self._workers, message) + self._given_up_snapshot()

    def _given_up_snapshot(self) -> Sent:
        round = self._snapshots.given_up(set(self._joined_at))
        return [] if round is None else self._snapshot_complete(round, [])

    def _snapshot_complete(self, round: int, parts: List[dict]) -> Sent:
        return self._to(self._workers[:1], {"kind": "snapshot_complete", "round": round, "parts": parts})

    @staticmethod
    def _require_rank_0(node: Node, message: dict) -> None:
        if node.rank != 0:
            raise ProtocolError("%s sent a %r message; only worker 0 may" % (node, message["kind"]))

    # What they have in common

    def _claim_option(self, store: int, name: str, node: Node, value: dict) -> bool:
        return self._claim(self._options, (store, name), "the %s of store %d" % (name, store), node, value)

    def _claim(self, table: Claims, identity: Identity, what: str, node: Node, value: dict) -> bool:
        """Notes what a worker says of something that must be equal everywhere. True if it has just been decided."""
        claims = table.setdefault(identity, {})
        repeated = node in claims
        if repeated:
            _compare(what, node, claims[node], node, value)
        else:
            self._count_claim(node, identity, value)
        claims[node] = value
        leader = self._workers[0]
        if leader not in claims:
            if leader in self._left:
                self._check_nobody_waits_for_the_gone()
            return False
        for other in sorted(claims) if node == leader else [node]:
            _compare(what, leader, claims[leader], other, claims[other])
        return node == leader and not repeated

    def _count_claim(self, node: Node, identity: Identity, value: dict) -> None:
        total = self._claim_bytes.get(node, 0) + len(repr((identity, value)))
        if total > MAX_CLAIM_BYTES:
            raise ProtocolError("%s announced more than %d bytes of keys and options" % (node, MAX_CLAIM_BYTES))
        self._claim_bytes[node] = total

    def _check_nobody_waits_for_the_gone(self) -> None:
        for number, arrived in sorted(self._barriers.items()):
            gone = self._left - arrived
            if gone:
                raise DisagreementError(
                    "%s left the job while %s waits in barrier %d" % (min(gone), min(arrived), number)
                )
        leader = self._workers[0]
        if leader not in self._left:
            return
        for table, text in ((self._keys, "declared key {1!r}"), (self._options, "set the {1} of store {0}")):
            for identity, claims in table.items():
                waiting = {node for node, value in claims.items() if value} - self._left
                if leader not in claims and waiting:
                    did = text.format(*identity)
                    raise DisagreementError("%s %s, but %s left without doing so" % (min(waiting), did, leader))

    @staticmethod
    def _to(nodes: Sequence[Node], message: dict) -> Sent:
        return [(node, message) for node in nodes]


def joined_message(node: Node, step: int) -> dict:
    return {"kind": "joined", "worker": node.rank, "step": step}


def _compare(what: str, node: Node, value: Dict[str, Any], other: Node, other_value: Dict[str, Any]) -> None:
    for field in {**value, **other_value}:  # as they were given: a name or type that differs explains what follows it
        if value.get(field) != other_value.get(field):
            raise DisagreementError(
                "%s and %s disagree about %s: %s is %s on the first and %s on the second"
                % (node, other, what, field, _shown(value.get(field)), _shown(other_value.get(field)))
            )


def _shown(value: Any) -> str:
    if value is None:
        return "not set"
    return str(tuple(value)) if isinstance(value, list) else str(value)
