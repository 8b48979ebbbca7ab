"""How what is measured is compressed: the notation in options and in names of stores, and a slice's bytes by formula.

    int8             gradients, and what comes back
    int8-bf16        gradients as int8, what comes back as bf16
    int8-exact       gradients alone
    topk:0.01:4      with values of the codec's options in their order (docs/compression.md), as many as wanted

DDP's hooks are written alike: fp16, powersgd or powersgd:2, of that rank. A store and its compression are joined by a
plus: p3_torch+int8, ddp:25+fp16.

Bytes that are counted on network cards are held against those of the formulas. The core is asked for its codecs when
one of these, or an option, is wanted: results are read without it.
"""

from __future__ import annotations

import argparse
import functools
import re
from typing import Any, Dict, Mapping, NamedTuple, Optional, Tuple

from p3 import codecs
from p3.errors import NotBuilt
from p3.plan import options as store_options
from p3.plan import planner
from p3.plan.key_plan import Axes
from p3.plan.strategy import Strategy

EXACT = "exact"  # in the place of a codec: sent as it is
HOOKS = ("fp16", "powersgd")  # of DDP on Gloo
_HALVES = ("fp16", "bf16")  # hooks that halve all bytes, as the codecs of these names do

_ELEMENT_BYTES = 4
_TRIED_ELEMENTS = 10_000  # of a slice, by which the bits of an element are told
_ZEROS = re.compile(r"\.?0+$")
_ONE = re.compile(r"[a-z0-9]+(:\d+(\.\d+)?)*")


class Compression(NamedTuple):
    """Of gradients, and of what comes back: a codec each, or EXACT."""

    up: str
    down: str

    @classmethod
    def of(cls, text: str) -> Optional[Compression]:
        """None for EXACT. Whether there are such codecs is not looked at."""
        up, dash, down = text.partition("-")
        made = cls(up, down if dash else up)
        return None if made == (EXACT, EXACT) else made

    @classmethod
    def of_ways(cls, ways: codecs.Ways) -> Optional[Compression]:
        """As scripts and strategies have them."""
        up, down = (_text(one) for one in ways)
        codec = codecs.of(ways.up)
        return cls.of(up) if codec is not None and codec.comes_back_by_itself else cls.of(f"{up}-{down}")

    def __str__(self) -> str:
        return self.up if self.up == self.down else f"{self.up}-{self.down}"

    @property
    def options(self) -> Dict[str, Optional[Dict[str, Any]]]:
        """Of a store. Steps, as of dgc, and thin matrices, as of lowrank, come back by themselves."""
        up, down = _option(self.up), _option(self.down)
        comes_back = up is not None and codecs.of(up).comes_back_by_itself
        return {"compression": up, "value_compression": None if comes_back else down}

    @property
    def ways(self) -> codecs.Ways:
        return codecs.Ways(*self.options.values())

    @property
    def of_torch(self) -> Dict[str, Any]:
        """As p3.torch.DistributedOptimizer takes it."""
        return {way: option for way, option in zip(("up", "down"), self.options.values()) if option is not None}

    @property
    def is_of_codecs(self) -> bool:
        """Whether P3 can do that, and its bytes have a formula."""
        return all(one == EXACT or _name(one) in codecs.types() for one in self)

    @property
    def has_norm(self) -> bool:
        """Whether the servers can tell the norm of the sums, as those of thin matrices are not the gradients'."""
        return _name(self.up) != codecs.LOW_RANK.name

    @property
    def halves_all(self) -> bool:
        """Whether DDP has a hook that does as much."""
        return self.up == self.down and self.up in _HALVES

    @property
    def share(self) -> float:
        """Of the bytes of float32, both ways together; of codecs of slices."""
        return sum(map(_bits, self)) / (2 * 8 * _ELEMENT_BYTES)

    @property
    def fewest_bits(self) -> float:
        """Of an element, in the way that has fewer; 0 where that is no codec's of slices."""
        return min(map(_bits, self))


def parse(text: str) -> Optional[Compression]:
    """As argparse's `type`: of P3's codecs."""
    made = Compression.of(text)
    try:
        for one in made or ():
            _check(one)
        for name, value in (made.options if made else {}).items():
            if value is not None:
                store_options.validate(name, value)
    except (ValueError, NotBuilt) as error:
        raise argparse.ArgumentTypeError(f"compression {text!r}: {error}") from None
    return made


def parse_hook(text: str) -> Compression:
    """As argparse's `type`: of DDP's hooks on Gloo, which is what torch has for CPUs."""
    name, _, value = text.partition(":")
    if name == "bf16":
        raise argparse.ArgumentTypeError("DDP refuses bf16_compress_hook without NCCL, so on Gloo there is none")
    if name not in HOOKS or (value and (name != "powersgd" or not value.isdigit() or int(value) < 1)):
        raise argparse.ArgumentTypeError(f"{text!r} is none of DDP's hooks on Gloo: fp16, powersgd or powersgd:RANK")
    return Compression(text, text)


def split(store: str) -> Tuple[str, str]:
    """What MXNet or torch_store.py knows of a store's name, and its compression, or ""."""
    name, _, text = store.partition("+")
    return name, text


def of_key(strategy: Strategy, name: str, compression: Optional[Compression]) -> Optional[Compression]:
    """Of a key of that name, where the script has chosen `compression` for all. ConfigError if the strategy has another
    codec for it."""
    if strategy.of(name).codec is None:
        return compression
    return Compression.of_ways(strategy.ways(name, compression.ways if compression else codecs.Ways()))


def in_place_of(shape: Tuple[int, ...], compression: Optional[Compression]) -> Tuple[Tuple[int, ...], ...]:
    """The shapes of what crosses the network of a float32 key of that shape: itself, or two thin matrices. Each is cut
    into slices, as of_push() and of_broadcast() take them."""
    options = compression.options if compression else {}
    return codecs.in_place_of(shape, planner.rank(shape, "float32", options))


def of_push(shape: Tuple[int, ...], elements: int, compression: Optional[Compression]) -> int:
    """Bytes of a slice of so many elements of such a key that one worker pushes."""
    axes = _axes(shape, compression)
    return codecs.push_bytes(axes.codec, elements) if axes.codec else elements * _ELEMENT_BYTES


def of_broadcast(
    shape: Tuple[int, ...], elements: int, compression: Optional[Compression], workers: int = 1
) -> int:
    """Of the slice that comes back. With dgc: if so many workers have chosen their elements independently, then in the
    mean so many of them; it is smallest with one, or if all choose the same."""
    axes = _axes(shape, compression)
    if not axes.takes_steps:
        return codecs.bytes_back(axes.value_codec, elements)
    untouched = (1 - codecs.sent(axes.codec, elements) / elements) ** workers
    return codecs.payload_bytes(axes.codec, round(elements * (1 - untouched)), elements)


def is_of(shape: Tuple[int, ...], compression: Optional[Compression], ways: codecs.Ways) -> bool:
    """Whether a key of that shape travels so with that compression: biases come back whole, for example."""
    axes = _axes(shape, compression)
    return (axes.codec or {}, axes.value_codec or {}) == (ways.up or {}, ways.down or {})


def adds_up_on_machine(compression: Optional[Compression]) -> bool:
    """Whether the workers of a machine push as one."""
    return compression is None or _axes((2, 2), compression).adds_up_on_machine


@functools.lru_cache(maxsize=1024)
def _axes(shape: Tuple[int, ...], compression: Optional[Compression]) -> Axes:
    return planner.axes(shape, "float32", compression.options if compression else {})


def _name(one: str) -> str:
    return one.partition(":")[0]


def _option(one: str) -> Optional[Dict[str, Any]]:
    """Of a store; ValueError for what no codec of that name takes."""
    if one == EXACT:
        return None
    name, *values = one.split(":")
    codec = codecs.types()[name]
    if len(values) > len(codec.options):
        raise ValueError(f"{name} has {len(codec.options) or 'no'} option{'s' * (len(codec.options) > 1)}")
    given = {}
    for option, value in zip(codec.options, values):
        try:
            number = bool(int(value)) if option.kind is bool else option.kind(value)
        except ValueError:
            number = None
        if not option.allows(number):
            raise ValueError(f"{option.name} of {name} is {value}; it must be {option.allowed}")
        given[option.name] = number
    return codecs.complete({"type": name, **given})


def _text(option: Optional[Mapping[str, Any]]) -> str:
    """What _option() reads; values that are the standard ones are left out."""
    if option is None:
        return EXACT
    codec = codecs.types()[option["type"]]
    values = [option[one.name] for one in codec.options]
    for one in reversed(codec.options):
        if one.is_mxnets or values[-1] != one.standard:
            break
        values.pop()
    return ":".join([codec.name, *(_ZEROS.sub("", f"{value:.12f}") for value in values)])


def _bits(one: str) -> float:
    if one == EXACT:
        return 8.0 * _ELEMENT_BYTES
    if _name(one) not in codecs.codecs():
        return 0.0
    return 8 * codecs.push_bytes(_option(one), _TRIED_ELEMENTS) / _TRIED_ELEMENTS


def _check(one: str) -> None:
    """ValueError for what is no codec, or is told of it wrongly."""
    known = list(codecs.types())
    if one != EXACT and (not _ONE.fullmatch(one) or _name(one) not in known):
        raise ValueError(f"{one!r} is no codec: {EXACT}, {', '.join(known)}, or with a value, as dgc:0.01")
    _option(one)
