"""What all nodes of a job agree on for a key: how it is cut into slices, or a sparse one's rows into partitions, and
how its rounds go.

Here are also its forms in messages and in snapshots; so whoever adds a field does it here, and in messages.py.
"""

from __future__ import annotations

import math
from typing import Any, Dict, List, Mapping, NamedTuple, Sequence, Tuple, Union

Name = Union[str, int]

_FEW_SERVERS, _OF_FEW = 2, 50_000
_LEAST, _LARGE, _MOST = 2_500, 10_000, 20_000  # with more servers
_BEGUN = 160_000  # on the connections to all servers together
_ALIGNED = 16  # elements: of float32 a line of the processor's cache

UNBOUNDED = (1 << 63) - 1  # a staleness with which nobody waits for anybody
MOST_GRACE_S = 1e8  # as the core's


class SliceSize(NamedTuple):
    """How large slices are, of keys for which no strategy says it: P3_SLICE_ELEMENTS in a job of so many servers.

    `auto` is the paper's 50,000 elements (section 5) with up to two servers. With more, servers are balanced by smaller
    slices alone, and what is urgent waits for slices to more hosts. So a key is cut into slices of at most 20,000
    elements, from 16 servers on 10,000, as few as give each server equally many if that can be; but not below 2,500
    (docs/decisions.md).
    """

    setting: Union[int, str]
    num_servers: int

    @property
    def most(self) -> int:
        """Elements, of a slice of any key."""
        if isinstance(self.setting, int):
            return self.setting
        return _OF_FEW if self.num_servers <= _FEW_SERVERS else max(_LARGE, min(_BEGUN // self.num_servers, _MOST))

    def of(self, elements: int) -> int:
        """The elements of each slice, but for the last one, of a key of so many."""
        if isinstance(self.setting, int) or self.num_servers <= _FEW_SERVERS:
            return self.most
        turns = max(1, -(-elements // (self.num_servers * self.most)))
        even = -(-elements // (self.num_servers * turns))
        return min(max(even + -even % _ALIGNED, _LEAST), self.most)


def even_slices(elements: int, most: int) -> int:
    """The elements of a slice if so many are cut into slices of one size, but for the last one's rounding, of at most
    `most`. So the parts of a gathered key are cut: each begins anew, and where the last slices of all were small ones,
    going round robin some servers would have got those alone."""
    return -(-elements // max(1, -(-elements // most)))


def staleness(rounds: Union[int, float]) -> int:
    """The field of that name, for a whole number of rounds or math.inf. ValueError for all else."""
    if rounds == math.inf:
        return UNBOUNDED
    if isinstance(rounds, bool) or not isinstance(rounds, int) or not 0 <= rounds < UNBOUNDED:
        raise ValueError("staleness is %r; it must be a whole number of rounds of at least 0, or math.inf" % (rounds,))
    return rounds


NORM_ELEMENTS = 2  # of each server: of squares the sum, and the largest absolute value


def norm_shape(num_servers: int) -> Tuple[int, int]:
    """Of a key of norms: each server has a slice."""
    return num_servers, NORM_ELEMENTS


# In the order of the core's enumerations (include/p3/key_plan.h).
REDUCTIONS = ("sum", "average", "mean", "norm")
UPDATES = ("servers", "steps", "workers")


class Axes(NamedTuple):
    """Independent choices of how a key's rounds go, which p3/plan/planner.py makes."""

    staleness: int = 0  # discipline: rounds that the fastest worker may be ahead of the slowest; 0: synchronous
    codec: Mapping[str, Any] = {}  # of what is pushed, as the store's option (p3/plan/options.py); {}: sent as it is
    reduction: str = "sum"  # of REDUCTIONS: "average" over those that took part, "mean" over all; "norm": see Session
    update: str = "servers"  # of UPDATES: who applies the optimizer's rule; "steps": the workers its momentum
    value_codec: Mapping[str, Any] = {}  # of what comes back, as the store's option; {}: whole values
    quorum: int = 0  # with `staleness` UNBOUNDED: a round closes when so many workers have pushed, 0: there are none,
    grace_s: float = 0.0  # and so many seconds have passed since

    @property
    def takes_steps(self) -> bool:
        """What is pushed are steps, and they come back."""
        return self.update == "steps"

    @property
    def lands_changes(self) -> bool:
        """What comes may be a change of what landed last; so a worker's landing array must hold that, and nothing may
        be written to it."""
        return self.takes_steps or bool(self.value_codec)

    @property
    def leaves_whole(self) -> bool:
        """Nothing of a gradient may leave before all of it is known, as its norm is."""
        return self.takes_steps and self.codec["clip_norm"] > 0

    @property
    def adds_up_on_machine(self) -> bool:
        """Whether the workers of a machine may add up what they have for the servers (P3_LOCAL_AGGREGATION)."""
        from p3 import _core  # here: the scheduler needs no core, unless gradients are compressed

        return _core.adds_up_on_machine(self)


class KeyPlan(NamedTuple):
    """As the core's (include/p3/key_plan.h), which checks every plan it is given: ValueError if it makes no sense."""

    wire_key: int  # what frames call the key
    dtype: str
    elements: int
    first_slice: int  # slices of all keys before that have the same `servers`: they all go to these in turn
    slice_elements: int
    row_elements: int = 0  # of a key of rows; 0: a dense key
    partitions: int = 0  # of a key of rows, where they take the place of slices
    parts: int = 0  # of a key that is gathered: one of `elements` from each of so many workers; 0: the key is summed
    servers: Tuple[int, ...] = ()  # ranks, to which slices go in turn; (): all (p3/plan/strategy.py)
    # The fields of Axes.
    staleness: int = 0
    codec: Mapping[str, Any] = {}
    reduction: str = "sum"
    update: str = "servers"
    value_codec: Mapping[str, Any] = {}
    quorum: int = 0
    grace_s: float = 0.0

    def __hash__(self) -> int:  # codecs have none
        return hash(self[: self._fields.index("staleness")])

    @property
    def axes(self) -> Axes:
        return Axes(*(getattr(self, field) for field in Axes._fields))

    @property
    def can_be_recut(self) -> bool:
        """While the job rests: a dense key of which the servers keep no more than sums."""
        is_dense = not self.row_elements and not self.parts and self.reduction != "norm"
        return is_dense and self.staleness == 0 and self.update == "servers"

    @property
    def rows(self) -> int:
        """Of a key of rows."""
        return self.elements // self.row_elements

    @property
    def slices(self) -> int:
        """Or partitions. An empty key has one, so that its rounds complete like any other's."""
        return self.partitions or max(1, -(-self.elements // self.slice_elements)) * max(1, self.parts)

    def server_of(self, number: int, num_servers: int) -> int:
        """Whose the slice of that number is."""
        turns = self.servers or range(num_servers)
        return turns[(self.first_slice + number) % len(turns)]

    def sizes(self) -> List[int]:
        """The elements of each slice or partition: docs/protocol.md."""
        if self.row_elements:
            ends = [self.rows * number // self.partitions for number in range(self.partitions + 1)]
            return [(end - begin) * self.row_elements for begin, end in zip(ends, ends[1:])]
        whole, parts = self.slice_elements, max(1, self.parts)
        return [min(whole, self.elements - number * whole) for number in range(self.slices // parts)] * parts

    # Messages (p3/cluster/messages.py)

    def define(self, store: int, name: Name, predecessor: int) -> Dict[str, Any]:
        return dict(self._fields_sent(), kind="define", store=store, name=name, predecessor=predecessor)

    def agreed(self, store: int, name: Name, shape: Sequence[int]) -> Dict[str, Any]:
        fields = dict(self._fields_sent(), kind="agreed", store=store, name=name, shape=shape, catches_up=False)
        del fields["elements"]
        return fields

    def _fields_sent(self) -> Dict[str, Any]:
        return dict(self._asdict(), servers=list(self.servers))

    def repartitioned(self, store: int, name: Name) -> Dict[str, Any]:
        fields = {field: getattr(self, field) for field in _SUCCESSOR_FIELDS}
        return dict(fields, kind="repartitioned", store=store, name=name)

    def recut(self, predecessor: int, round: int) -> Dict[str, Any]:
        return dict(self._fields_sent(), predecessor=predecessor, round=round)

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> KeyPlan:
        """That of a `define` or `agreed` message, or of a key in a `recut` or `replanned` one."""
        fields = message if "elements" in message else {**message, "elements": math.prod(message["shape"])}
        return cls(**{**{field: fields[field] for field in cls._fields}, "servers": tuple(fields["servers"])})

    def successor(self, message: Mapping[str, Any]) -> KeyPlan:
        """That of a `repartitioned` message about this key."""
        return self._replace(**{field: message[field] for field in _SUCCESSOR_FIELDS})

    # Snapshots (p3/snapshots/files.py)

    def kept(self) -> Dict[str, int]:
        return {field: getattr(self, field) for field in _KEPT_FIELDS}

    @classmethod
    def of_kept(cls, kept: Mapping[str, int], shape: Sequence[int], dtype: str) -> KeyPlan:
        fields = {field: kept[field] for field in _KEPT_FIELDS}
        return cls(dtype=dtype, elements=math.prod(shape), first_slice=0, **fields)


_SUCCESSOR_FIELDS = ("wire_key", "first_slice", "slice_elements", "partitions")
_KEPT_FIELDS = ("wire_key", "slice_elements", "row_elements", "partitions")
