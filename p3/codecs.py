"""Gradients and weights in fewer bits: what the core's codecs (include/p3/codec.h) say of themselves.

    python -m p3.codecs                           # prints the tables of docs/compression.md

A compression is the option of a store: {"type": "2bit", "threshold": 0.5}. One is no codec of the core's: lowrank,
which makes two thin matrices of each (p3/worker/lowrank/), and they travel as they are. The core is imported at the
first question, not with this module: `p3 --help` and `p3 doctor` must run without it. Thread-safe.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

TABLES_ELEMENTS = 50_000  # of a slice, in the tables
TABLES_MATRIX = 1000, 1000  # with lowrank
TABLES_HOSTS = 2


class Option(NamedTuple):
    name: str
    standard: Any
    least: float
    most: float
    is_above_least: bool  # the least one is not allowed itself
    allowed: str  # in words
    kind: type  # of a value; float: an int, too
    is_mxnets: bool  # MXNet's own stores have it and its standard value; other front ends want it given

    def allows(self, value: Any) -> bool:
        fits = type(value) in ((int, float) if self.kind is float else (self.kind,))
        return fits and (self.least < value if self.is_above_least else self.least <= value) and value <= self.most


class Codec(NamedTuple):
    name: str
    effect: str  # in words: what becomes of an element
    options: Tuple[Option, ...]
    residuals: int  # floats that a worker keeps for each element
    carries_sums: bool  # sums that the workers apply come back in it, too
    makes_steps: bool  # workers send steps that the servers subtract, and only those of any worker come back
    encodes_values: bool  # it can encode what comes back from a server: a sum, or the change of a value
    is_of_matrices: bool = False  # it encodes no slices, but sends two thin matrices in the place of one

    @property
    def comes_back_by_itself(self) -> bool:
        """What comes back is in it, too, as steps and thin matrices are."""
        return not self.encodes_values

    def complete(self, **given: Any) -> Dict[str, Any]:
        """A compression with the standard values of what is not given."""
        return {"type": self.name, **{option.name: option.standard for option in self.options}, **given}


LOW_RANK = Codec(
    "lowrank", "that of a product of two thin matrices, found by all workers together; the difference is added to the "
    "next gradient", (Option("rank", 4, 1, 1024, False, "a whole number from 1 to 1024", int, False),),
    residuals=1, carries_sums=False, makes_steps=False, encodes_values=False, is_of_matrices=True,
)  # fmt: skip


@functools.lru_cache(maxsize=None)
def codecs() -> Dict[str, Codec]:
    """Those of the core, by name, in the order of their numbers on the wire. NotBuilt."""
    from p3 import _core

    made = [Codec(**dict(one, options=tuple(Option(**option) for option in one["options"]))) for one in _core.codecs()]
    return {codec.name: codec for codec in made}


def types() -> Dict[str, Codec]:
    """All that a compression may name. NotBuilt."""
    return {**codecs(), LOW_RANK.name: LOW_RANK}


def of(compression: Optional[Mapping[str, Any]]) -> Optional[Codec]:
    """Its codec; None without a compression, and of a type that there is not."""
    kind = (compression or {}).get("type")
    return types().get(kind) if isinstance(kind, str) else None


def is_of_matrices(compression: Mapping[str, Any]) -> bool:
    codec = of(compression)
    return codec is not None and codec.is_of_matrices


def of_gradients() -> List[str]:
    """The names of the core's that encode gradients as they are, not steps."""
    return [codec.name for codec in codecs().values() if not codec.makes_steps]


def complete(compression: Mapping[str, Any], of_mxnet: bool = False) -> Dict[str, Any]:
    """The value of the option, from what a script has given. `of_mxnet`: as MXNet's own stores take it, of which an
    option is anything that float() takes."""
    made, codec = dict(compression), of(compression)
    for option in () if codec is None else codec.options:
        if not option.is_mxnets:
            made.setdefault(option.name, option.standard)
        elif of_mxnet:
            made[option.name] = float(made.get(option.name, option.standard))
    return made


def checks() -> Dict[str, Dict[str, Tuple[str, Callable[[Any], bool]]]]:
    """Of each, by name, what is checked of its options: see p3.plan.optimizers.validate_fields."""
    return {
        name: {option.name: (option.allowed, option.allows) for option in codec.options}
        for name, codec in sorted(types().items())
    }


def checks_of_what_comes_back() -> Dict[str, Dict[str, Tuple[str, Callable[[Any], bool]]]]:
    """The same, of those that what comes back may be encoded by."""
    return {name: options for name, options in checks().items() if types()[name].encodes_values}


class Ways(NamedTuple):
    """Both options of a store, complete: what is pushed, and what comes back. None: as it is."""

    up: Optional[Dict[str, Any]] = None
    down: Optional[Dict[str, Any]] = None

    @classmethod
    def of(cls, given: Any) -> Ways:
        """From what a script gives: a name, which means both ways; {"up": ..., "down": ...}, each a name, a compression
        or None; a compression, which means what is pushed; or None. Not validated: p3/plan/options.py."""
        if isinstance(given, str):
            both = _complete(given)
            codec = of(both)
            return cls(both, None if codec is not None and codec.comes_back_by_itself else both)
        if isinstance(given, dict) and given and set(given) <= {"up", "down"}:
            return cls(_complete(given.get("up")), _complete(given.get("down")))
        return cls(_complete(given))

    @property
    def options(self) -> Dict[str, Any]:
        """Those to be set, by name."""
        named = {"compression": self.up, "value_compression": self.down}
        return {option: value for option, value in named.items() if value is not None}

    @property
    def of_key(self) -> Dict[str, Any]:
        """Both, by name, of a key that has them in place of its store's. {}: none."""
        return {"compression": {}, "value_compression": {}, **self.options}


def ways_of_mxnet(params: Mapping[str, Any]) -> Ways:
    """From what MXNet's scripts give: as of MXNet's own stores, and with "down" what comes back."""
    up = {name: value for name, value in params.items() if name != "down"}
    down = params.get("down")
    of_up = complete(up, of_mxnet=True) if up or down is None else None
    return Ways(of_up, _complete(down))  # which MXNet's own stores do not have


def _complete(given: Any) -> Any:
    if isinstance(given, str):
        given = {"type": given}
    return complete(given) if isinstance(given, dict) else given


# Bytes of a slice's payload; a frame's header comes on top (p3.placement.FRAME_BYTES).


def sent(compression: Mapping[str, Any], elements: int, round: int = 0) -> int:
    """How many elements of a slice a worker sends in that round of its key, counted from 1; 0: after any warm-up."""
    from p3 import _core

    return _core.sent_elements(compression, elements, round)


def payload_bytes(compression: Mapping[str, Any], count: int, elements: int) -> int:
    """Of so many of a slice's elements."""
    from p3 import _core

    return _core.payload_bytes(compression, count, elements)


def push_bytes(compression: Mapping[str, Any], elements: int, round: int = 0) -> int:
    """What a worker sends."""
    return payload_bytes(compression, sent(compression, elements, round), elements)


def bytes_back(down: Optional[Mapping[str, Any]], elements: int) -> int:
    """What comes back of a whole slice, be it a value, a change or a sum: encoded as `down`, if that is shorter. Steps
    come back in the payload_bytes() of those elements whose sum over the workers is not 0."""
    if not down:
        return 4 * elements
    from p3 import _core

    return _core.bytes_back(down, elements)


# What travels of a matrix with lowrank. A key of more dimensions is one of as many rows as its first has.


def as_matrix(shape: Sequence[int]) -> Tuple[int, int]:
    """Rows and columns of a key of at least two dimensions."""
    return shape[0], math.prod(shape[1:])


def rank_of(compression: Optional[Mapping[str, Any]], shape: Sequence[int]) -> int:
    """The columns of each of the two matrices that travel in the place of a float32 key of that shape. 0: it stays as
    it is, as they would take no fewer bytes, or the compression makes none."""
    if not compression or not is_of_matrices(compression) or len(shape) < 2:
        return 0
    (rows, columns), rank = as_matrix(shape), compression["rank"]
    return rank if (rows + columns) * rank < rows * columns else 0


def in_place_of(shape: Sequence[int], rank: int) -> Tuple[Tuple[int, ...], ...]:
    """The shapes of what has a round in each step, one behind the other: their bytes cross the network both ways, as
    those of any key. `rank`: rank_of(); 0: the key itself."""
    if rank == 0:
        return (tuple(shape),)
    rows, columns = as_matrix(shape)
    return (rows, rank), (columns, rank)


# docs/compression.md


def tables() -> str:
    lines = [
        "| type | bytes of a gradient | of what comes back | hidden from | a worker keeps | what an element becomes |",
        "|---|---|---|---|---|---|",
        _row("none", 1, 1, "nothing", "it stays as it is"),
    ]
    for codec in codecs().values():
        share = push_bytes(codec.complete(), TABLES_ELEMENTS) / (4 * TABLES_ELEMENTS)
        kept = "%d bytes for each element" % (4 * codec.residuals) if codec.residuals else "nothing"
        times = TABLES_HOSTS if codec.makes_steps else 1
        lines.append(_row("`%s`" % codec.name, share, times * share, kept, codec.effect))
    share = _share_of(TABLES_MATRIX, LOW_RANK.complete())
    lines.append(_row("`%s`" % LOW_RANK.name, share, share, "4 bytes for each element", LOW_RANK.effect))
    lines += ["", "| type | option | default | allowed |", "|---|---|---|---|"]
    for codec in types().values():
        for option in codec.options:
            standard = str(option.standard) if option.kind is bool else "%g" % option.standard
            standard += "; PyTorch: none" if option.is_mxnets else ""
            lines.append("| `%s` | `%s` | %s | %s |" % (codec.name, option.name, standard, option.allowed))
    return "\n".join(lines)


def _share_of(shape: Tuple[int, int], compression: Mapping[str, Any]) -> float:
    """Of its elements, that travel with lowrank."""
    return sum(map(math.prod, in_place_of(shape, rank_of(compression, shape)))) / math.prod(shape)


def _row(name: str, share: float, back: float, kept: str, effect: str) -> str:
    """Of so large shares of the bytes. A host's card sends each way those of the other hosts' part."""
    sent = (share + back) * (TABLES_HOSTS - 1) / TABLES_HOSTS
    cells = name, _percent(share), _percent(back), "%.2g Mbit/s" % (32 * sent), kept, effect
    return "| %s |" % " | ".join(cells)


def _percent(share: float) -> str:
    return "%.3g%%" % (100 * share)


if __name__ == "__main__":
    print(tables())
