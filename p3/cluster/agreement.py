"""What the nodes of a running job agree on: keys, options of stores, the forward order, barriers, the end. No I/O.

The scheduler runs one `Agreement`; so does an embedded session, without any scheduler. receive() takes one message of
one node and returns what must be sent to whom. Agreement on a key is no barrier: workers announce in any order, rank
0's word decides, and the others' are compared with it whenever both are known. Options are agreed in the same way;
where a store's first key settles an option, announcing the key is a word on that option too, and the first push is one
on the optimizer. A store's strategy is such an option, of which no server hears. So it is with clipping: a worker's
first key of a store says whether the servers are to tell its norm.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, Dict, Hashable, List, NamedTuple, Optional, Sequence, Set, Tuple, Union

from p3.cluster.demand import Demand
from p3.cluster.heirs import Heirs
from p3.cluster.node import Node
from p3.cluster.snapshot_parts import SnapshotParts
from p3.cluster.strategies import Strategies
from p3.codecs import Ways
from p3.errors import DisagreementError, ProtocolError
from p3.plan import combinations, key_plan, options, planner
from p3.plan.key_plan import Axes, KeyPlan, SliceSize
from p3.plan.strategy import Cut, Strategy

# What one worker may have the scheduler keep: far more than jobs come to.
MAX_CLAIM_BYTES = 64 << 20  # of keys and options, as text
_MAX_BARRIERS = 1000  # that it has entered and others have not
_MAX_COUNTS = 100  # that it has asked for and servers have not answered
_MAX_DIMENSIONS = 32  # NumPy 1's

_OF_SNAPSHOTS = "snapshot_written snapshot_failed snapshot_checked progress"
_FROM = dict(  # who may send what
    worker=("announce option order barrier repartition moved replan release count bye joined captured snapshot_taken "
            "check_snapshot resume load_snapshot demand_snapshot mark " + _OF_SNAPSHOTS).split(),
    server=("loaded defined option_set dropped counted inherited recut_done " + _OF_SNAPSHOTS).split(),
)  # fmt: skip

Sent = List[Tuple[Node, dict]]
Identity = Tuple[int, Hashable]  # of a key or an option: store and name
Claims = Dict[Identity, Dict[Node, dict]]


class _Question(NamedTuple):
    """What servers have been asked, and who hears of it when they all have answered."""

    unanswered: Set[Node]
    receivers: Sequence[Node]
    outcome: dict


class Mark(NamedTuple):
    """A barrier that all workers are in, and at which a process may enter in a place that is vacant, or come back as a
    server that is lost."""

    number: int
    round: int  # as the script counts: so many steps are behind it
    problem: str  # why no worker can enter this job; "": nothing speaks against it


class Agreement:
    def __init__(
        self,
        workers: List[Node],
        servers: List[Node],
        slice_elements: Union[int, str] = "auto",
        partitions: Union[int, str] = "auto",
        strategy: Strategy = Strategy(),
        vacant: Sequence[int] = (),
    ) -> None:
        """Nodes by rank. `partitions` of a key of rows: "auto" begins with one for each turn of the servers.
        `strategy`: of these servers, for all stores; it goes before the other two. `vacant`: ranks of workers that
        may come later."""
        self._workers, self._servers = list(workers), list(servers)  # the first worker's word decides
        self._num_servers = len(servers)  # of the job, which names slices by them: also of those that are lost
        self._heirs = Heirs(self._workers, servers)
        self._slice_size = SliceSize(slice_elements, len(servers))
        self._partitions = partitions
        self._strategies = Strategies(strategy, len(servers))
        self._strategy_texts: Claims = {}  # of stores, as rank 0 has told them; what they take is counted here
        self._keys: Claims = {}  # what each worker announced
        self._options: Claims = {}  # what each worker asked for; {} if it goes without
        self._norms: Claims = {}  # of each store: who has its norm told; {}: who goes without
        self._slices: Dict[Tuple[int, ...], int] = {}  # of all keys so far, by the servers that they go to in turn
        self._wire_keys = 0
        self._plans: Dict[Identity, KeyPlan] = {}  # of each decided key, the latest
        self._agreed: Dict[int, dict] = {}  # by wire key, as the workers were told
        self._loaded: Dict[int, Set[Node]] = {}  # by wire key: servers that have its first value from a snapshot
        self._orders: Dict[int, dict] = {}  # by store, the latest
        self._leaving: Dict[int, Tuple[Identity, Set[Node]]] = {}  # former plans of sparse keys: who still uses them
        self._resting: Dict[Node, dict] = {}  # who rests for another strategy, and what it has said
        self._replans = 0  # that all workers have rested for
        self._releasing: Dict[int, Set[Node]] = {}  # by store: the workers that have done with it
        self._questions: Dict[Hashable, _Question] = {}
        self._barriers: Dict[int, Set[Node]] = {}  # of those under way: who has arrived
        self._barriers_entered: Dict[Node, int] = {}
        self._marks: Dict[int, Dict[Node, Optional[dict]]] = {}  # of barriers under way: what each says of entering
        self.mark: Optional[Mark] = None  # which nobody leaves before end_mark()
        self._vacant = list(vacant)  # ranks of those that have departed, or have not come yet
        self._snapshots = SnapshotParts(self._workers, self._servers)
        self._demand = Demand(self._workers)
        self._joined: Counter[Node] = Counter()  # calls of join() that not all have come to yet
        self._claim_bytes: Dict[Node, int] = {}
        self._left: Set[Node] = set()

    def receive(self, node: Node, message: dict) -> Sent:
        """Raises DisagreementError, or ProtocolError if the node may not say that now; both fail the job."""
        if message["kind"] not in _FROM[node.role] or node in self._left:
            raise ProtocolError("%s sent a %r message, which is not allowed now" % (node, message["kind"]))
        if node.role == "worker" and node in self._releasing.get(message.get("store"), ()):
            raise ProtocolError("%s sent a %r message of store %d, which it has released"
                                % (node, message["kind"], message["store"]))  # fmt: skip
        return getattr(self, "_on_" + message["kind"])(node, message)

    def entries_unused(self) -> List[str]:
        """Names in the strategy that no key of the job has had so far."""
        return self._strategies.entries_unused()

    # Going on without a worker

    def depart(self, node: Node) -> Sent:
        """It is gone, and the others are the job. DisagreementError if they cannot be."""
        was_first = node == self._workers[0]
        self._workers.remove(node)
        if not self._workers:
            raise DisagreementError("no other worker is left")
        self._vacant.append(node.rank)
        if was_first:
            self._take_over(node, self._workers[0])
        self._forget_claims(node)
        told = [sent for number in sorted(self._barriers) for sent in self._without_in_barrier(number, node)]
        for store in sorted(self._releasing):
            self._releasing[store].discard(node)
            if self._releasing[store]:
                told += self._drop_if_released(store)
            else:
                del self._releasing[store]
        self._resting.pop(node, None)
        told += self._replan_if_all_rest()
        self._joined.pop(node, None)
        told += self._end_join()
        told += self._snapshot_without(self._snapshots.depart(node, self._workers[0])) + self._checks_without(node)
        told += self._demand.depart(node, was_first, self._absent())
        stop = self._stop_if_all_have_left()
        if not stop:
            self._check_nobody_waits_for_the_gone()  # for the word of who is first now
        return told + stop

    def _take_over(self, former: Node, first: Node) -> None:
        """What the former first worker has said, the first one counts as having said."""
        for table in (self._keys, self._options, self._norms, self._strategy_texts):
            for identity, claims in table.items():
                if former in claims and first not in claims:
                    claims[first] = claims[former]
                    self._claim_bytes[first] = (
                        self._claim_bytes.get(first, 0) + _claim_bytes(identity, claims[former])
                    )
                elif former not in claims and any(claims.values()) and first in claims:
                    raise DisagreementError(
                        "%s waits for its word on %r of store %d" % (first, identity[1], identity[0])
                    )

    def _forget_claims(self, node: Node) -> None:
        """Another process of its rank will speak for itself."""
        for table in (self._keys, self._options, self._norms, self._strategy_texts):
            for claims in table.values():
                claims.pop(node, None)
        self._claim_bytes.pop(node, None)

    def _without_in_barrier(self, number: int, node: Node) -> Sent:
        self._barriers[number].discard(node)
        self._marks[number].pop(node, None)
        if self._barriers[number]:
            return self._end_barrier(number)
        del self._barriers[number], self._marks[number]
        if self.mark is not None and self.mark.number == number:
            self.mark = None
        return []

    # Going on without a server (see heirs.py)

    def depart_server(self, node: Node) -> Sent:
        """It is lost, and another one serves what it did. DisagreementError if there is none."""
        told = self._heirs.lose(node)
        self._servers.remove(node)
        told += self._snapshot_without(self._snapshots.depart_server(node))
        for (answer, identity), question in list(self._questions.items()):
            if node in question.unanswered:
                told += self._answered(node, answer, identity)
                if answer == "dropped" and (answer, identity) not in self._questions:
                    self._forget(identity)
        return told

    @property
    def all_rest(self) -> bool:
        """All workers are in the barrier of the mark, also those that have entered at it: nothing is under way."""
        return self.mark is not None and self._barriers[self.mark.number] >= set(self._workers)

    def take_back_server(self, node: Node) -> Tuple[List[dict], Node]:
        """While all_rest: a process is that lost server from here on. What it must be told: all keys, in the order in
        which they were defined; and its heir, which is to hand over."""
        self._servers = sorted([*self._servers, node])
        self._snapshots.enter(node)
        dropped = {identity for answer, identity in self._questions if answer == "dropped"}
        plans = sorted(self._plans.items(), key=lambda item: item[1].wire_key)
        keys = [plan.define(*identity, plan.wire_key) for identity, plan in plans if identity[0] not in dropped]
        return keys, self._heirs.take_back(node)

    @property
    def heirs(self) -> Heirs:
        """To be asked, not to be told anything."""
        return self._heirs

    def _on_inherited(self, node: Node, message: dict) -> Sent:
        return self._heirs.on_inherited(node, message)

    # Letting another process in, while all wait at a mark (see entrances.py)

    @property
    def workers(self) -> List[Node]:
        """In the order of coming; the first one does what one does for all."""
        return list(self._workers)

    @property
    def vacant(self) -> List[int]:
        """Ranks that no worker has: those that none has had yet, then in the order of departing."""
        return list(self._vacant)

    def enter(self, node: Node) -> List[dict]:
        """A process takes part as this node, whose place was vacant, from the mark on. What it is told of the past."""
        self._vacant.remove(node.rank)
        self._workers.append(node)  # the last to become the first
        self._barriers_entered[node] = self.mark.number
        self._snapshots.enter(node)
        return self._past()

    def _past(self) -> List[dict]:
        """What is being decided, who enters hears as the others do."""
        told = [
            dict(agreed, catches_up=True)
            for wire_key, agreed in sorted(self._agreed.items())
            if ("defined", wire_key) not in self._questions
        ]
        for (store, name), claims in sorted(self._options.items()):
            value = claims.get(self._workers[0])
            if value and ("option_set", (store, name)) not in self._questions:
                told.append({"kind": "option_agreed", "store": store, "name": name, "value": value})
        return told + list(self._orders.values())

    def demand_anew(self) -> Sent:
        """Behind enter(): a snapshot that somebody waits for is asked for again, of all."""
        return self._demand.enter(self._absent())

    def end_mark(self) -> Sent:
        mark, self.mark = self.mark, None
        return self._done(mark.number)

    # From workers

    def _on_announce(self, node: Node, message: dict) -> Sent:
        identity = (message["store"], message["name"])
        shape, is_sparse = message["shape"], message["sparse"]
        if is_sparse and (not shape or 0 in shape[1:]):
            raise ProtocolError("%s announced the sparse key %.100r without rows" % (node, message["name"]))
        if len(shape) > _MAX_DIMENSIONS or math.prod([max(1, length) for length in shape]) >= 1 << 63:
            raise ProtocolError("%s announced key %.100r with a shape that no array has" % (node, message["name"]))
        kind = {field: message[field] for field in ("dtype", "sparse", "staleness", "gathered", "norm")}
        if kind["gathered"] and math.prod(shape) == 0:
            raise ProtocolError("%s announced the key of factors %.100r without elements" % (node, message["name"]))
        if kind["norm"] and (tuple(shape), kind["dtype"]) != (key_plan.norm_shape(self._num_servers), "float64"):
            raise ProtocolError("%s announced the key of norms %.100r with another shape" % (node, message["name"]))
        try:
            options.validate_of_key(message["options"])
        except ValueError as error:
            raise ProtocolError("%s announced key %.100r with %s" % (node, message["name"], error)) from None
        value = {"shape": shape, **kind, **message["options"]}
        self._claim_norm(node, message)
        decided = self._claim(self._keys, identity, "key %.100r" % (message["name"],), node, value)
        for option in message["defaults"]:
            self._claim_option(message["store"], option, node, {})
        if not decided:
            return []
        cut = self._strategies.cut(message["store"], message["name"], is_sparse)
        if message["norm"]:
            cut = Cut(slice=key_plan.NORM_ELEMENTS)
        elif not message["gathered"]:  # what brings the weight's first value has had its word
            own = self._options_of(message)
            ways = Ways(own.get("compression") or None, own.get("value_compression") or None)
            self._strategies.require_followed(message["store"], message["name"], ways, message["staleness"])
        elements = math.prod(shape)
        whole = cut.slice or self._slice_size.of(elements)
        servers = cut.servers or ()
        of_job: int = len(servers) or self._num_servers if self._partitions == "auto" else self._partitions
        partitions = cut.partitions or of_job
        plan = KeyPlan(
            wire_key=self._wire_keys,
            dtype=message["dtype"],
            elements=elements,
            first_slice=self._slices.get(servers, 0),
            slice_elements=key_plan.even_slices(elements, whole) if message["gathered"] else whole,
            row_elements=math.prod(shape[1:]) if is_sparse else 0,
            partitions=max(1, min(partitions, shape[0])) if is_sparse else 0,
            parts=len(self._workers) if message["gathered"] else 0,
            servers=servers,
            **self._axes(message)._asdict(),
        )
        problem = combinations.contradiction(plan)
        if problem:
            raise ProtocolError("%s announced key %.100r: %s" % (node, message["name"], problem))
        self._agreed[plan.wire_key] = plan.agreed(*identity, shape)
        return self._define(identity, plan, self._agreed[plan.wire_key], predecessor=plan.wire_key)

    def _axes(self, announced: dict) -> Axes:
        """`announced`: by rank 0, which has settled the store's options."""
        key = {field: announced[field] for field in ("shape", "dtype", "sparse", "staleness", "gathered", "norm")}
        return planner.axes(options=self._options_of(announced), **key)

    def _options_of(self, announced: dict) -> Dict[str, Any]:
        """The planner's: the key's own, or its store's."""
        leader = self._workers[0]
        of_store = {name: self._options.get((announced["store"], name), {}).get(leader) for name in planner.OPTIONS}
        return {**of_store, **announced["options"]}

    def _define(self, identity: Identity, plan: KeyPlan, outcome: dict, predecessor: int) -> Sent:
        """Has the servers define the latest plan of a key; then the workers get the outcome."""
        self._take(identity, plan)
        self._questions["defined", plan.wire_key] = _Question(set(self._servers), self._workers, outcome)
        return self._to(self._servers, plan.define(*identity, predecessor))

    def _take(self, identity: Identity, plan: KeyPlan) -> None:
        """The latest of the key."""
        self._plans[identity] = plan
        self._wire_keys += 1
        self._slices[plan.servers] = plan.first_slice + plan.slices

    def _on_repartition(self, node: Node, message: dict) -> Sent:
        """Another number of partitions, once all workers have done with the plan before."""
        identity, partitions = (message["store"], message["name"]), message["partitions"]
        plan = self._plans.get(identity)
        if node.rank != 0 or plan is None or not plan.row_elements or plan.staleness > 0:
            raise ProtocolError("%s may not change the partitions of key %.100r" % (node, message["name"]))
        former = plan.wire_key
        is_moving = any(identity == moving for moving, _ in self._leaving.values())
        if not 1 <= partitions <= plan.rows or is_moving or ("defined", former) in self._questions:
            raise ProtocolError("%s cannot have %d partitions of key %.100r now" % (node, partitions, message["name"]))
        self._leaving[former] = identity, set(self._workers)
        turn = self._slices[plan.servers]
        successor = plan._replace(wire_key=self._wire_keys, first_slice=turn, partitions=partitions)
        return self._define(identity, successor, successor.repartitioned(*identity), former)

    def _on_moved(self, node: Node, message: dict) -> Sent:
        identity, staying = self._leaving.get(message["wire_key"], (None, set()))
        if node not in staying:
            raise ProtocolError("%s left plan %d, which it did not use" % (node, message["wire_key"]))
        staying.remove(node)
        if staying:
            return []
        del self._leaving[message["wire_key"]]
        settled = {"kind": "settled", "store": identity[0], "name": identity[1]}
        dropped = {"kind": "drop", "wire_key": message["wire_key"]}
        return self._to(self._servers, dropped) + self._to(self._workers, settled)

    def _on_replan(self, node: Node, message: dict) -> Sent:
        if node in self._resting:
            raise ProtocolError("%s rests twice for another strategy" % (node,))
        self._resting[node] = message
        return self._replan_if_all_rest()

    def _replan_if_all_rest(self) -> Sent:
        """Between two rounds of all keys of some stores: they are cut by another strategy, and the servers keep nothing
        of the cut before. If who was to tell the strategy has departed, they stay as they are."""
        if not self._resting:
            return []
        if not self._resting.keys() >= set(self._workers):
            self._check_nobody_waits_for_the_gone()
            return []
        words, self._resting, first = self._resting, {}, self._workers[0]
        for node in sorted(words):
            _compare("the stores and rounds behind which a strategy changes", first, _at(words[first]), node,
                     _at(words[node]))  # fmt: skip
            told = words[node]["strategy"]
            if told and words[first]["strategy"]:
                _compare("the strategy to change to", first, _sha256(words[first]), node, _sha256(words[node]))
        self._replans += 1
        keys = self._cut_anew(first, words[first]) if words[first]["strategy"] else []
        done = {"kind": "replanned", "number": self._replans, "keys": keys}
        if not keys:
            return self._to(self._workers, done)
        self._questions["recut_done", self._replans] = _Question(set(self._servers), self._workers, done)
        plans = [{field: value for field, value in key.items() if field not in ("store", "name")} for key in keys]
        return self._to(self._servers, {"kind": "recut", "number": self._replans, "keys": plans})

    def _cut_anew(self, first: Node, word: dict) -> List[dict]:
        """The keys of these stores whose cut is another one by the strategy of the word, as `replanned` tells them."""
        keys, rounds = [], dict(zip(word["keys"], word["rounds"]))
        for store in word["stores"]:
            self._strategies.change(first, store, word["strategy"])
        for identity, plan in sorted(self._plans.items(), key=lambda item: item[1].wire_key):
            if identity[0] not in word["stores"] or not plan.can_be_recut:
                continue
            if plan.wire_key not in rounds or ("defined", plan.wire_key) in self._questions:
                raise ProtocolError("%s does not tell the round of key %.100r" % (first, identity[1]))
            cut = self._strategies.cut(*identity, sparse=False)
            servers, most = cut.servers or (), cut.slice or self._slice_size.of(plan.elements)
            if (servers, most) == (plan.servers, plan.slice_elements):
                continue
            turn = self._slices.get(servers, 0)
            other = plan._replace(wire_key=self._wire_keys, first_slice=turn, slice_elements=most, servers=servers)
            agreed = self._agreed.pop(plan.wire_key)
            self._agreed[other.wire_key] = other.agreed(*identity, agreed["shape"])
            self._loaded.pop(plan.wire_key, None)
            self._take(identity, other)
            told = other.recut(plan.wire_key, rounds[plan.wire_key])
            keys.append({"store": identity[0], "name": identity[1], **told})
        return keys

    def _on_release(self, node: Node, message: dict) -> Sent:
        """A store is gone when every worker has released it, and every server has then dropped it."""
        store = message["store"]
        if any(node in workers for workers in self._releasing.values()):
            raise ProtocolError("%s released store %d before another one was gone" % (node, store))
        done = self._releasing.setdefault(store, set())
        done.add(node)
        told = self._to(self._workers, {"kind": "releasing", "store": store, "worker": node.rank})
        return told + self._drop_if_released(store)

    def _drop_if_released(self, store: int) -> Sent:
        if not self._releasing[store] >= set(self._workers):
            self._check_nobody_waits_for_the_gone()
            return []
        if ("dropped", store) in self._questions:
            return []
        self._questions["dropped", store] = _Question(
            set(self._servers), self._workers, {"kind": "released", "store": store}
        )
        return self._to(self._servers, {"kind": "drop_store", "store": store})

    def _forget(self, store: int) -> None:
        """What it took of each worker's claims is free again."""
        del self._releasing[store]
        self._orders.pop(store, None)
        self._strategies.forget(store)
        for table in (self._keys, self._options, self._norms, self._strategy_texts):
            for identity in [one for one in table if one[0] == store]:
                for node, value in table.pop(identity).items():
                    self._claim_bytes[node] -= _claim_bytes(identity, value)
        self._plans = {identity: plan for identity, plan in self._plans.items() if identity[0] != store}
        self._agreed = {wire_key: agreed for wire_key, agreed in self._agreed.items() if agreed["store"] != store}
        self._leaving = {former: one for former, one in self._leaving.items() if one[0][0] != store}

    def _on_option(self, node: Node, message: dict) -> Sent:
        store, name, value = message["store"], message["name"], message["value"]
        if name == planner.STRATEGY:
            return self._on_strategy(node, message)
        if not self._claim_option(store, name, node, value) or not value:
            return []
        agreed = dict(message, kind="option_agreed")
        self._questions["option_set", (store, name)] = _Question(set(self._servers), self._workers, agreed)
        return self._to(self._servers, dict(message, kind="set_option"))

    def _on_strategy(self, node: Node, message: dict) -> Sent:
        store, told = message["store"], message["value"]
        compared = {"sha256": told.get("sha256")}
        if not self._claim_option(store, planner.STRATEGY, node, compared):
            return []
        identity = store, planner.STRATEGY
        self._count_claim(node, identity, told)
        self._strategy_texts[identity] = {node: told}
        self._strategies.take(node, store, told)
        return self._to(self._workers, dict(message, kind="option_agreed", value=compared))

    def _on_order(self, node: Node, message: dict) -> Sent:
        self._require_first(node, message)
        self._orders[message["store"]] = message
        return self._to(self._workers, message)

    def _on_barrier(self, node: Node, message: dict) -> Sent:
        number = message["number"]
        if number != self._barriers_entered.get(node, 0) + 1:
            raise ProtocolError("%s entered barrier %d out of turn" % (node, number))
        if len(self._barriers) >= _MAX_BARRIERS and number not in self._barriers:
            raise ProtocolError("%s is %d barriers ahead of others" % (node, len(self._barriers)))
        self._barriers_entered[node] = number
        self._barriers.setdefault(number, set()).add(node)
        self._marks.setdefault(number, {})[node] = message["mark"]
        return self._end_barrier(number)

    def _end_barrier(self, number: int) -> Sent:
        """If all have entered it. Where a process may enter, not before end_mark()."""
        if self.mark is not None and self.mark.number == number:
            return []
        if not self._barriers[number] >= set(self._workers):
            self._check_nobody_waits_for_the_gone()
            return []
        self._require_one_mark(number)
        mark = self._marks[number][self._workers[0]]
        if mark is not None and (self._vacant or self._heirs.lost):
            self.mark = Mark(number, mark["round"], mark["problem"])
            return []
        return self._done(number)

    def _done(self, number: int) -> Sent:
        waiting = self._barriers.pop(number)
        del self._marks[number]
        entered = [node.rank for node in self._workers if node not in waiting]
        members = sorted(node.rank for node in self._workers)
        done = {"kind": "barrier_done", "number": number, "members": members, "entered": entered}
        return self._to([node for node in self._workers if node in waiting], done)

    def _require_one_mark(self, number: int) -> None:
        marks, first = self._marks[number], self._workers[0]
        for node in self._workers:
            rounds = [None if mark is None else mark["round"] for mark in (marks[first], marks[node])]
            if rounds[0] != rounds[1]:
                shown = tuple("no round" if round is None else "round %d" % round for round in rounds)
                raise DisagreementError("%s and %s disagree about members(): %s is given on the first, and %s on the "
                                        "second" % (first, node, *shown))  # fmt: skip

    def _on_count(self, node: Node, message: dict) -> Sent:
        identity = (node.rank, message["number"])
        if ("counted", identity) in self._questions:
            raise ProtocolError("%s asked twice for count %d" % (node, message["number"]))
        if sum(kind == "counted" and asked[0] == node.rank for kind, asked in self._questions) >= _MAX_COUNTS:
            raise ProtocolError("%s asks for more than %d counts at once" % (node, _MAX_COUNTS))
        unheard = [{"late_s": []} for _ in range(self._num_servers)]  # what stays of a server that is lost
        counters = {"kind": "counters", "number": message["number"], "servers": unheard}
        self._questions["counted", identity] = _Question(set(self._servers), [node], counters)
        return self._to(self._servers, {"kind": "count_for", "worker": node.rank, "number": message["number"]})

    def _on_bye(self, node: Node, _message: dict) -> Sent:
        self._left.add(node)
        stop = self._stop_if_all_have_left()
        if stop:
            return stop
        self._check_nobody_waits_for_the_gone()
        self._snapshots.leave(node)
        return self._given_up_snapshot() + self._checks_without(node) + self._demand.drop()

    def _stop_if_all_have_left(self) -> Sent:
        return self._to(self._servers, {"kind": "stop"}) if self._left >= set(self._workers) else []

    # From servers

    def _on_loaded(self, node: Node, message: dict) -> Sent:
        wire_key = message["wire_key"]
        self._question(node, "defined", wire_key)
        loaded = self._loaded.setdefault(wire_key, set())
        loaded.add(node)
        return self._to(self._workers[:1], message) if len(loaded) == self._num_servers else []

    def _on_defined(self, node: Node, message: dict) -> Sent:
        return self._answered(node, "defined", message["wire_key"])

    def _on_recut_done(self, node: Node, message: dict) -> Sent:
        return self._answered(node, "recut_done", message["number"])

    def _on_option_set(self, node: Node, message: dict) -> Sent:
        return self._answered(node, "option_set", (message["store"], message["name"]))

    def _on_dropped(self, node: Node, message: dict) -> Sent:
        told = self._answered(node, "dropped", message["store"])
        if told:
            self._forget(message["store"])
        return told

    def _on_counted(self, node: Node, message: dict) -> Sent:
        identity = (message["worker"], message["number"])
        question = self._question(node, "counted", identity)
        question.outcome["servers"][node.rank] = dict(message["counters"], label=str(node))
        return self._answered(node, "counted", identity)

    def _question(self, node: Node, answer: str, identity: Hashable) -> _Question:
        question = self._questions.get((answer, identity))
        if question is None or node not in question.unanswered:
            raise ProtocolError("%s sent %r for %.200s, which nobody asked for" % (node, answer, identity))
        return question

    def _answered(self, node: Node, answer: str, identity: Hashable) -> Sent:
        question = self._question(node, answer, identity)
        question.unanswered.remove(node)
        if question.unanswered:
            return []
        del self._questions[answer, identity]
        return self._to(question.receivers, question.outcome)

    # Snapshots: the first worker begins and completes them, and chooses the one to resume from

    def _on_captured(self, node: Node, message: dict) -> Sent:
        self._require_first(node, message)
        round = message["round"]
        problem = self._snapshots.begin(node, round, is_torn=message["changes"] < self._heirs.changes)
        asked = self._to(self._servers, {"kind": "write_snapshot", "round": round})
        return asked + (self._given_up_snapshot() if problem is None else self._snapshot_failed(round, problem))

    def _on_snapshot_written(self, node: Node, message: dict) -> Sent:
        round = message["round"]
        parts = self._snapshots.add(node, round, message["bytes"], message["sha256"])
        if parts is None:
            return []
        return self._to(self._workers[:1], {"kind": "snapshot_complete", "round": round, "parts": parts})

    def demand_snapshot(self, ends: bool) -> Sent:
        """Behind the next step, if the script says where steps end. `ends`: and then the job is to end."""
        return self._demand.make(ends, self._absent())

    def _on_demand_snapshot(self, _node: Node, message: dict) -> Sent:
        return self.demand_snapshot(message["ends"])

    def _on_mark(self, node: Node, message: dict) -> Sent:
        return self._demand.mark(node, message["number"], message["round"])

    def _on_snapshot_failed(self, node: Node, message: dict) -> Sent:
        is_news = self._snapshots.fail(node, message["round"], message["text"])
        return self._snapshot_failed(message["round"], message["text"]) if is_news else []

    def _on_snapshot_taken(self, node: Node, message: dict) -> Sent:
        self._require_first(node, message)
        self._snapshots.take(node, message["round"])
        return self._to(self._workers, message) + self._demand.over(message["round"], False, self._absent())

    def _on_check_snapshot(self, node: Node, message: dict) -> Sent:
        self._require_first(node, message)
        question = "snapshot_checked", message["round"]
        if any(name[0] == "snapshot_checked" and asked.receivers == [node] for name, asked in self._questions.items()):
            raise ProtocolError("%s asked to check two snapshots at once" % (node,))
        if question in self._questions:  # by a first worker that has departed
            self._questions[question] = self._questions[question]._replace(receivers=[node])
            return []
        nodes = [other for other in self._workers + self._servers if not self._snapshots.has_left(other)]
        verdict = {"kind": "snapshot_checked", "round": message["round"], "problem": ""}
        self._questions[question] = _Question(set(nodes), self._workers[:1], verdict)
        return self._to(nodes, message)

    def _on_snapshot_checked(self, node: Node, message: dict) -> Sent:
        question = self._question(node, "snapshot_checked", message["round"])
        question.outcome["problem"] = question.outcome["problem"] or message["problem"]
        return self._answered(node, "snapshot_checked", message["round"])

    def _checks_without(self, node: Node) -> Sent:
        """Nobody waits for a worker that is gone."""
        asked = [name for name, question in self._questions.items()
                 if name[0] == "snapshot_checked" and node in question.unanswered]  # fmt: skip
        return [sent for _, round in asked for sent in self._answered(node, "snapshot_checked", round)]

    def _on_progress(self, node: Node, message: dict) -> Sent:
        """The first worker waits for all nodes, and the others wait for it."""
        is_first = node == self._workers[0]
        return self._to(self._workers[1:] if is_first else self._workers[:1], message)

    def _on_resume(self, node: Node, message: dict) -> Sent:
        self._require_first(node, message)
        return self._to(self._workers, message)

    def _on_load_snapshot(self, node: Node, message: dict) -> Sent:
        self._require_first(node, message)
        return self._to(self._servers, message)

    def _on_joined(self, node: Node, message: dict) -> Sent:
        if message["worker"] != node.rank:
            raise ProtocolError("%s says that worker %d has joined" % (node, message["worker"]))
        self._joined[node] += 1  # perhaps its next call: servers end a join() before all of these words are here
        over = self._end_join()
        demanded = self._demand.rest() if self._joined else over
        return self._to(self._workers, message) + self._given_up_snapshot() + demanded

    def _end_join(self) -> Sent:
        """If all have called it."""
        if not self._joined or not self._joined.keys() >= set(self._workers):
            return []
        self._joined -= Counter(self._joined.keys())
        return self._demand.go_on(self._absent())

    def _absent(self) -> Set[Node]:
        """Workers that come to no end of a step now."""
        return {node for node in self._workers if node in self._joined or self._snapshots.has_left(node)}

    def _given_up_snapshot(self) -> Sent:
        return self._snapshot_without(self._snapshots.given_up(set(self._joined)))

    def _snapshot_without(self, round: Optional[int]) -> Sent:
        """Of that round there is none, as somebody takes no part any more; None: nothing has changed."""
        return [] if round is None else self._snapshot_failed(round, "")

    def _snapshot_failed(self, round: int, text: str) -> Sent:
        failed = {"kind": "snapshot_failed", "round": round, "text": text}
        return self._to(self._workers, failed) + self._demand.over(round, text == "", self._absent())

    def _require_first(self, node: Node, message: dict) -> None:
        if node != self._workers[0]:
            raise ProtocolError("%s sent a %r message; only %s may" % (node, message["kind"], self._workers[0]))

    # What they have in common

    def _claim_option(self, store: int, name: str, node: Node, value: dict) -> bool:
        return self._claim(self._options, (store, name), "the %.100s of store %d" % (name, store), node, value)

    def _claim_norm(self, node: Node, announced: dict) -> None:
        """A worker that clips alone would wait for norms, or for rounds that others never begin."""
        store, tells = announced["store"], announced["norm"]
        known = self._norms.get((store, "norm"), {})
        if node in known and not tells:
            return
        if node in known and not known[node]:
            raise ProtocolError("%s announced the key of norms of store %d behind other keys of it" % (node, store))
        what = "the norm to clip the gradients of store %d by, which all workers ask for or none (max_grad_norm or " \
               "grad_scaler in PyTorch, set_clipping() in MXNet)" % store  # fmt: skip
        self._claim(self._norms, (store, "norm"), what, node, {"it": "asked for"} if tells else {})

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
        total = self._claim_bytes.get(node, 0) + _claim_bytes(identity, value)
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
        gone = self._left - self._resting.keys()
        if self._resting and gone:
            raise DisagreementError(
                "%s left the job while %s waits for all workers to change the strategy"
                % (min(gone), min(self._resting))
            )
        for store, done in sorted(self._releasing.items()):
            gone = self._left - done
            if gone:
                raise DisagreementError(
                    "%s left the job while %s waits for all workers to release store %d" % (min(gone), min(done), store)
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


def _at(word: dict) -> dict:
    """Where a worker rests for another strategy, which all must do at the same point."""
    return {"stores": word["stores"], **{"key %d" % key: done for key, done in zip(word["keys"], word["rounds"])}}


def _sha256(word: dict) -> dict:
    return {"sha256": word["strategy"].get("sha256")}


def _claim_bytes(identity: Identity, value: dict) -> int:
    return len(repr((identity, value)))


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
    if value == {}:
        return "none"
    return str(tuple(value)) if isinstance(value, list) else str(value)
