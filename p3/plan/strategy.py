"""A strategy: which servers hold the slices of which keys, and how the keys are cut. A file of JSON that `p3 plan`
writes, or a person. The scheduler reads it (P3_STRATEGY), or the script gives one for a store, which rank 0 tells the
scheduler; every key's plan says what it has made of it.

    {"version": 1,
     "default": {"servers": [0, 1, 2, 0, 1], "slice": 50000},
     "keys": {"dense0_weight": {"servers": [1], "slice": 10000}}}

All fields may be left out, and then a key is cut as without a strategy. No field changes what is computed: sums are of
the same gradients in the same order.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Tuple, Union

from p3.errors import ConfigError
from p3.plan.key_plan import Name

VERSION = 1
AUTO = "auto"  # in the place of a path: made while the job trains (p3/frontend/plans.py)
_MOST_TURNS = 10_000  # of one list of servers
_MOST_ELEMENTS = 1 << 28  # of a slice
_MOST_BYTES = 64 << 20  # of a file
_SHOWN_KEYS = 8  # of those that there are


Given = Union[None, str, os.PathLike, Mapping[str, Any]]  # by a script: a file's path, what one has, or nothing


class Cut(NamedTuple):
    """Of one key, or of all that have no other. None: as without a strategy."""

    # Ranks. Slices, and partitions of sparse keys, go to them in turn; one that stands there twice gets twice as many.
    servers: Optional[Tuple[int, ...]] = None
    slice: Optional[int] = None  # most elements of one, of a dense key


class Strategy(NamedTuple):
    default: Cut = Cut()
    keys: Mapping[str, Cut] = {}  # by the name that the script has given; of numbered keys by the number's digits
    path: str = ""  # where it was read, or who has given it

    def of(self, name: Name) -> Cut:
        own = self.keys.get(str(name), Cut())
        return Cut(*(the_default if its is None else its for its, the_default in zip(own, self.default)))

    def require_servers(self, count: int) -> None:
        """ConfigError if it names one that a job of so many servers lacks."""
        for name, cut in [(None, self.default), *self.keys.items()]:
            absent = [rank for rank in cut.servers or () if rank >= count]
            if absent:
                raise ConfigError(
                    "%s%s: server %d is named, but the job has %d server%s, from 0 to %d: plan for as many, or start "
                    "more with -s" % (self._file, _of_key(name), absent[0], count, "s" * (count != 1), count - 1)
                )

    def why_not(self, name: Name, sparse: bool) -> str:
        """Why its entry is none for such a key; "": it is."""
        if not sparse or self.keys.get(str(name), Cut()).slice is None:
            return ""
        return (
            "%s has a slice for key %r, whose gradients are sparse: such keys have partitions (P3_PARTITIONS). Take it "
            "out of that key's entry" % (self._file, name)
        )

    def require(self, num_servers: int, names: Iterable[Name]) -> None:
        """ConfigError unless it fits a job with so many servers, and has entries for keys of these names alone."""
        self.require_servers(num_servers)
        self.require_keys(names)

    def require_keys(self, names: Iterable[Name]) -> None:
        """ConfigError if it has an entry for another key than these. What has rounds in a key's place is called as the
        key, with a word in brackets behind it."""
        known = [str(name) for name in names]
        absent = [name for name in self.keys if name not in known and _in_place_of(name) not in known]
        if absent:
            more = " and %d more" % len(known[_SHOWN_KEYS:]) if known[_SHOWN_KEYS:] else ""
            raise ConfigError(
                "%s has an entry for key %r, but the keys are %s%s. Correct its name, or take the entry out"
                % (self._file, absent[0], ", ".join(map(repr, known[:_SHOWN_KEYS])) or "none", more)
            )

    def difference(self, other: Strategy) -> str:
        """Where the two say something else; "": nowhere."""
        if self.default != other.default:
            return '"default"'
        differing = [name for name in {**self.keys, **other.keys} if self.keys.get(name) != other.keys.get(name)]
        return "key %r" % differing[0] if differing else ""

    @property
    def sha256(self) -> str:
        """The same for all that say the same."""
        return hashlib.sha256(self._replace(keys=dict(sorted(self.keys.items()))).text().encode()).hexdigest()

    def text(self) -> str:
        """Of the file, so that parse() makes this of it again."""
        lines = ['"version": %d' % VERSION, '"default": ' + _shown(self.default)]
        if self.keys:
            entries = (",\n  %s: %s" % (json.dumps(name), _shown(cut)) for name, cut in self.keys.items())
            lines.append('"keys": {' + "".join(entries)[1:] + "}")
        return "{" + ",\n ".join(lines) + "}\n"

    @property
    def _file(self) -> str:
        return "the strategy" + (" " + self.path if self.path else "")


class Turns:
    """Whose each slice is, where all that have the same servers go to these in turn."""

    def __init__(self, num_servers: int) -> None:
        self._all = tuple(range(num_servers))
        self._taken: Dict[Tuple[int, ...], int] = {}

    def servers(self, cut: Cut) -> Tuple[int, ...]:
        return cut.servers or self._all

    def next(self, cut: Cut) -> int:
        """The server of the next slice."""
        servers = self.servers(cut)
        number = self._taken.get(servers, 0)
        self._taken[servers] = number + 1
        return servers[number % len(servers)]


def of_job(path: Optional[str], num_servers: int) -> Strategy:
    """P3_STRATEGY's. ConfigError if it cannot be read, is none, or is for more servers."""
    if path is None or path == AUTO:
        return Strategy()
    strategy = load(path)
    strategy.require_servers(num_servers)
    return strategy


def given(by_script: Given) -> Optional[Strategy]:
    """What a script says. ConfigError as load()."""
    if by_script is None:
        return None
    if by_script == AUTO:
        raise ConfigError(
            'strategy="auto" is of p3.torch.DistributedOptimizer alone: have `p3 plan` write a file. One of that name '
            'is "./auto"'
        )
    if isinstance(by_script, (str, os.PathLike)):
        return load(os.fspath(by_script))
    if not isinstance(by_script, Mapping):
        raise ConfigError(
            "strategy is %.100r; it must be the path of a file that `p3 plan` has written, or a dict of what such a "
            "file has" % (by_script,)
        )
    try:
        text = json.dumps(dict(by_script))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError("the strategy in the script is not what a file can have: %s" % error) from None
    return parse(text, "in the script")


def load(path: str) -> Strategy:
    """ConfigError if it cannot be read, or is none."""
    try:
        with open(path, encoding="utf-8") as file:
            content = file.read(_MOST_BYTES + 1)
    except UnicodeDecodeError:
        raise ConfigError("the strategy %s is no text in UTF-8" % path) from None
    except OSError as error:
        raise ConfigError("the strategy %s cannot be read: %s" % (path, error.strerror)) from None
    if len(content) > _MOST_BYTES:
        raise ConfigError("the strategy %s has more than %d MiB" % (path, _MOST_BYTES >> 20))
    return parse(content, path)


def parse(text: str, path: str = "") -> Strategy:
    """ConfigError, which names the field, for what is no strategy."""
    try:
        content = json.loads(text, object_pairs_hook=_without_twins)
    except (ValueError, RecursionError) as error:
        raise ConfigError("the strategy %s is no JSON: %s" % (path, error)) from None
    try:
        _require_fields(content, ("version", "default", "keys"), "it")
        if content.get("version") != VERSION or isinstance(content["version"], bool):
            raise ValueError('its "version" is %.100r; this P3 reads version %d' % (content.get("version"), VERSION))
        keys = content.get("keys", {})
        if not isinstance(keys, dict):
            raise ValueError('"keys" is no object of names and entries')
        default = _cut(content.get("default", {}), '"default"')
        return Strategy(default, {name: _cut(entry, "key %.200r" % name) for name, entry in keys.items()}, path)
    except ValueError as error:
        raise ConfigError("the strategy %s: %s" % (path, error)) from None


def _are_servers(value: Any) -> bool:
    ranks = type(value) is list and 1 <= len(value) <= _MOST_TURNS
    return ranks and all(type(rank) is int and 0 <= rank < 1 << 16 for rank in value)


def _is_slice(value: Any) -> bool:
    return type(value) is int and 1 <= value <= _MOST_ELEMENTS


# By field of Cut: what it may be, and that in words.
_FIELDS = {
    "servers": (_are_servers, "a list of 1 to %d ranks of servers" % _MOST_TURNS),
    "slice": (_is_slice, "a whole number from 1 to %d" % _MOST_ELEMENTS),
}


def _cut(entry: Any, whose: str) -> Cut:
    _require_fields(entry, _FIELDS, whose)
    for field, value in entry.items():
        fits, allowed = _FIELDS[field]
        if not fits(value):
            raise ValueError("%s of %s is %.100r; it must be %s" % (field, whose, value, allowed))
    return Cut(**{field: tuple(value) if isinstance(value, list) else value for field, value in entry.items()})


def _require_fields(value: Any, known: Any, whose: str) -> None:
    if not isinstance(value, dict):
        raise ValueError("%s is %.100r, no object" % (whose, value))
    unknown = [field for field in value if field not in known]
    if unknown:
        raise ValueError("%s has a field %.100r; it may have %s" % (whose, unknown[0], ", ".join(known)))


def _without_twins(pairs: List[Tuple[str, Any]]) -> Dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError("%.200r stands twice in one object" % next(one for one in names if names.count(one) > 1))
    return made


def _shown(cut: Cut) -> str:
    return json.dumps({field: value for field, value in cut._asdict().items() if value is not None})


def _in_place_of(name: str) -> str:
    key, bracket, _ = name.rpartition(" (")
    return key if bracket and name.endswith(")") else name


def _of_key(name: Optional[str]) -> str:
    return "" if name is None else ", key %r" % name
