"""What the nodes of a running job agree on: keys, optimizers, the forward order, barriers, the end. No I/O.

The scheduler runs one `Agreement`; so does an embedded session, without any scheduler. receive() takes one message of
one node and returns what must be sent to whom. Agreement on a key is no barrier: workers announce in any order, rank
0's word decides, and the others' are compared with it whenever both are known.
"""

from __future__ import annotations

from typing import Any, Dict, Hashable, List, Sequence, Set, Tuple

from p3.cluster.node import Node
from p3.errors import DisagreementError, ProtocolError

Sent = List[Tuple[Node, dict]]
Claims = Dict[Hashable, Dict[Node, dict]]


def slice_count(elements: int, slice_elements: int) -> int:
    """As the core's: an empty key has one empty slice, so that its rounds complete like any other's."""
    return max(1, -(-elements // slice_elements))


class Agreement:
    def __init__(self, workers: Sequence[Node], servers: Sequence[Node], slice_elements: int) -> None:
        """Nodes by rank."""
        self._workers = list(workers)
        self._servers = list(servers)
        self._slice_elements = slice_elements
        self._keys: Claims = {}  # (store, name) -> what each worker announced
        self._optimizers: Claims = {}  # store -> what each worker asked for
        self._slices = 0  # of all keys so far
        self._wire_keys = 0
        self._waits: Dict[Hashable, Tuple[Set[Node], dict]] = {}  # servers yet to answer, and what workers get then
        self._barriers: Dict[int, Set[Node]] = {}  # of those under way: who has arrived
        self._barriers_entered: Dict[Node, int] = {}
        self._left: Set[Node] = set()

    def receive(self, node: Node, message: dict) -> Sent:
        """Raises DisagreementError, or ProtocolError if the node may not say that now; both fail the job."""
        role = {
            "announce": "worker",
            "optimizer": "worker",
            "order": "worker",
            "barrier": "worker",
            "bye": "worker",
            "defined": "server",
            "optimizer_set": "server",
        }.get(message["kind"])
        if role != node.role or node in self._left:
            raise ProtocolError("%s sent a %r message, which it may not now" % (node, message["kind"]))
        return getattr(self, "_on_" + message["kind"])(node, message)

    # From workers

    def _on_announce(self, node: Node, message: dict) -> Sent:
        identity = (message["store"], message["name"])
        value = {"shape": message["shape"], "dtype": message["dtype"]}
        if not self._claim(self._keys, identity, "key %r" % (message["name"],), node, value):
            return []
        elements = 1
        for length in message["shape"]:
            elements *= length
        plan = {
            "wire_key": self._wire_keys,
            "first_slice": self._slices,
            "slice_elements": self._slice_elements,
            "store": message["store"],
            "name": message["name"],
            "dtype": message["dtype"],
        }
        self._wire_keys += 1
        self._slices += slice_count(elements, self._slice_elements)
        self._waits["defined", plan["wire_key"]] = (
            set(self._servers),
            dict(plan, kind="agreed", shape=message["shape"]),
        )
        return self._to(self._servers, dict(plan, kind="define", elements=elements))

    def _on_optimizer(self, node: Node, message: dict) -> Sent:
        store, description = message["store"], message["description"]
        if not self._claim(self._optimizers, store, "the optimizer of store %d" % store, node, description):
            return []
        self._waits["optimizer_set", store] = (
            set(self._servers),
            {"kind": "optimizer_agreed", "store": store, "description": description},
        )
        return self._to(self._servers, {"kind": "set_optimizer", "store": store, "description": description})

    def _on_order(self, node: Node, message: dict) -> Sent:
        if node.rank != 0:
            raise ProtocolError("%s announced an order; only worker 0 may" % (node,))
        return self._to(self._workers, message)

    def _on_barrier(self, node: Node, message: dict) -> Sent:
        number = message["number"]
        if number != self._barriers_entered.get(node, 0) + 1:
            raise ProtocolError("%s entered barrier %d out of turn" % (node, number))
        self._barriers_entered[node] = number
        arrived = self._barriers.setdefault(number, set())
        arrived.add(node)
        if len(arrived) < len(self._workers):
            self._check_nobody_waits_for_the_gone()
            return []
        del self._barriers[number]
        return self._to(self._workers, {"kind": "barrier_done", "number": number})

    def _on_bye(self, node: Node, _message: dict) -> Sent:
        self._left.add(node)
        if len(self._left) == len(self._workers):
            return self._to(self._servers, {"kind": "stop"})
        self._check_nobody_waits_for_the_gone()
        return []

    # From servers

    def _on_defined(self, node: Node, message: dict) -> Sent:
        return self._answered(node, "defined", message["wire_key"])

    def _on_optimizer_set(self, node: Node, message: dict) -> Sent:
        return self._answered(node, "optimizer_set", message["store"])

    def _answered(self, node: Node, kind: str, number: int) -> Sent:
        awaited, outcome = self._waits.get((kind, number), (set(), {}))
        if node not in awaited:
            raise ProtocolError("%s sent %r for %d, which nobody asked for" % (node, kind, number))
        awaited.remove(node)
        if awaited:
            return []
        del self._waits[kind, number]
        return self._to(self._workers, outcome)

    # What they have in common

    def _claim(self, table: Claims, key: Hashable, what: str, node: Node, value: dict) -> bool:
        """Notes what a worker says of something that must be equal everywhere. True if it has just been decided."""
        claims = table.setdefault(key, {})
        repeated = node in claims
        if repeated:
            _compare(what, node, claims[node], node, value)
        claims[node] = value
        leader = self._workers[0]
        if leader not in claims:
            if leader in self._left:
                self._check_nobody_waits_for_the_gone()
            return False
        for other in sorted(claims) if node == leader else [node]:
            _compare(what, leader, claims[leader], other, claims[other])
        return node == leader and not repeated

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
        for table, text in ((self._keys, "declared key %r"), (self._optimizers, "set an optimizer for store %r")):
            for key, claims in table.items():
                waiting = claims.keys() - self._left
                if leader not in claims and waiting:
                    shown = key[1] if isinstance(key, tuple) else key
                    raise DisagreementError("%s %s, but %s left without it" % (min(waiting), text % (shown,), leader))

    @staticmethod
    def _to(nodes: Sequence[Node], message: dict) -> Sent:
        return [(node, message) for node in nodes]


def _compare(what: str, node: Node, value: Dict[str, Any], other: Node, other_value: Dict[str, Any]) -> None:
    for field in sorted(value.keys() | other_value.keys()):
        if value.get(field) != other_value.get(field):
            raise DisagreementError(
                "%s and %s disagree about %s: %s is %s on the first and %s on the second"
                % (node, other, what, field, _shown(value.get(field)), _shown(other_value.get(field)))
            )


def _shown(value: Any) -> str:
    return str(tuple(value)) if isinstance(value, list) else str(value)
