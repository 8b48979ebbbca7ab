"""A strategy: which servers hold the slices of which keys, how the keys are cut, and how their rounds go. A file of
JSON that `p3 plan` writes, or a person. The scheduler reads it (P3_STRATEGY) and tells the workers, or the script gives
one for a store, which rank 0 tells the scheduler; every key's plan says what has become of it.

    {"version": 2, "allow_lossy": true,
     "default": {"servers": [0, 1, 2, 0, 1], "slice": 50000, "codec": "int8"},
     "keys": {"dense0_weight": {"servers": [1], "slice": 10000, "codec": null}}}

All fields may be left out, and then a key is as without a strategy. What a script may choose itself, a strategy chooses
only where the script has left it open: if both say something, they say the same. Only fields that lose information,
which is said by allow_lossy, change what is computed: else sums are of the same gradients in the same order.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from typing import Any, Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional, Tuple, Union

from p3.codecs import Ways
from p3.errors import ConfigError
from p3.plan import key_plan
from p3.plan.key_plan import Name
from p3.plan.options import ways_of

VERSION = 2  # the latest; what needs no later one is written as 1
AUTO = "auto"  # in the place of a path: made while the job trains (p3/frontend/plans.py)
_MOST_TURNS = 10_000  # of one list of servers
_MOST_ELEMENTS = 1 << 28  # of a slice
_MOST_PARTITIONS = 1 << 20  # as P3_PARTITIONS
_MOST_BYTES = 64 << 20  # of a file
_MOST_BYTES_TOLD = 4 << 20  # of what every worker is told of it, which may take twice as many in a message
FACTORS = "factors"
_ROUTES = ("dense", "rows", FACTORS)
_SHOWN_KEYS = 8  # of those that there are


Given = Union[None, str, os.PathLike, Mapping[str, Any]]  # by a script: a file's path, what one has, or nothing


class Cut(NamedTuple):
    """An entry: of one key, or of all that have no other. None: as without a strategy."""

    # Ranks. Slices, and partitions of sparse keys, go to them in turn; one that stands there twice gets twice as many.
    servers: Optional[Tuple[int, ...]] = None
    slice: Optional[int] = None  # most elements of one, of a dense key
    codec: Optional[Ways] = None  # Ways(): gradients and values as they are
    partitions: Optional[int] = None  # of a sparse key
    route: Optional[str] = None  # of _ROUTES: how its gradients travel
    staleness: Union[None, int, float] = None  # rounds, or math.inf


class Strategy(NamedTuple):
    default: Cut = Cut()
    keys: Mapping[str, Cut] = {}  # by the name that the script has given; of numbered keys by the number's digits
    path: str = ""  # where it was read, or who has given it
    allow_lossy: bool = False  # whoever has made it knows that some of its fields lose information

    def of(self, name: Name) -> Cut:
        own = self.keys.get(str(name), Cut())
        return Cut(*(the_default if its is None else its for its, the_default in zip(own, self.default)))

    def ways(self, name: Name, of_script: Ways) -> Ways:
        """How the key travels, for which the script has chosen `of_script`; Ways(): nothing, or that it travels as it
        is. ConfigError if both choose, and not the same."""
        own = self.of(name).codec
        if own is None or own == of_script:
            return of_script
        if of_script != Ways():
            raise ConfigError(
                "%s: the script has the compression %s for key %r, and the strategy the codec %s. Leave one of them out"
                % (self._file, _in_words(of_script), name, _in_words(own))
            )
        return own

    def rounds(self, name: Name, of_script: Union[None, int, float]) -> Union[int, float]:
        """The key's staleness, for which the script has chosen `of_script`; None: nothing, and 0 if the strategy says
        nothing, either. ConfigError if both choose, and not the same."""
        own = self.of(name).staleness
        if own is None or own == of_script:
            return of_script or 0
        if of_script is not None:
            raise ConfigError(
                "%s: the script has staleness %s for key %r, and the strategy %s. Leave one of them out"
                % (self._file, of_script, name, own)
            )
        return own

    def require_followed(self, name: Name, ways: Ways, staleness: int) -> None:
        """ConfigError if the key, which is declared so, has an entry of its own that says something else. `staleness`:
        as of key_plan.staleness()."""
        own = self.keys.get(str(name), Cut())
        differing = []
        if own.codec is not None and own.codec != ways:
            differing = ["codec", _in_words(own.codec), name, _in_words(ways)]
        if own.staleness is not None and key_plan.staleness(own.staleness) != staleness:
            differing = ["staleness", own.staleness, name, staleness]
        if differing:
            raise ConfigError(
                "%s has the %s %s for key %r, which the script declares with %s: it does not follow strategies there. "
                "Take it out of that entry" % (self._file, *differing)
            )

    def route(self, name: Name, of_script: str) -> str:
        """Of a layer that may send factors, for which the script has chosen `of_script` (p3/frontend/factors.py), where
        "auto" leaves it open. ConfigError if both choose, and not the same."""
        own = self.of(name).route
        if own in (None, "rows") or own == of_script:
            return of_script
        if of_script != "auto":
            raise ConfigError(
                "%s: the script has the route %r for key %r, and the strategy %r. Leave one of them out"
                % (self._file, of_script, name, own)
            )
        return own

    def sends_factors(self, name: Name) -> bool:
        """By an entry of that key's own."""
        return self.keys.get(str(name), Cut()).route == FACTORS

    def require_no_factors(self, name: Name) -> None:
        """ConfigError if a key that is of no layer that may send factors has an entry of its own for them."""
        if self.sends_factors(name):
            raise ConfigError(
                "%s has the route 'factors' for key %r, which is of no layer that may send them: call p3.factors or "
                "p3.torch.factors for it, or take the route out of that entry" % (self._file, name)
            )

    def said_of(self, name: Name) -> str:
        """For errors about that key: what it has by the strategy; "": nothing."""
        chosen = self.of(name)
        fields = [field for field in _CHOICES if getattr(chosen, field) not in (None, Ways())]
        return " (for %s see %s)" % (" and ".join(fields), self._file) if fields else ""

    @property
    def choices(self) -> Strategy:
        """What workers have to know of it: the fields that scripts have words for as well, and not how keys are cut."""
        keys = {name: cut._replace(servers=None, slice=None) for name, cut in self.keys.items()}
        default = self.default._replace(servers=None, slice=None)
        return self._replace(default=default, keys={name: cut for name, cut in keys.items() if cut != Cut()})

    @property
    def chooses(self) -> bool:
        """Whether there is anything in it that workers have to know."""
        choices = self.choices
        return choices.default != Cut() or bool(choices.keys)

    def require_same_choices(self, now: Strategy) -> None:
        """ConfigError if it says something else than `now` of more than how keys are cut. What it leaves out stays."""
        for name, cut in [(None, self.default), *self.keys.items()]:
            known = now.default if name is None else now.of(name)
            for field in _CHOICES:
                said = getattr(cut, field)
                if said is not None and said != getattr(known, field):
                    raise ConfigError(
                        "%s%s: %s cannot change while the job trains, only servers and slices can. Take it out"
                        % (self._file, _of_key(name), field)
                    )

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
        own = self.keys.get(str(name), Cut())
        if sparse and own.slice is not None:
            what = "a slice for key %r, whose gradients are sparse: such keys have partitions"
        elif not sparse and own.partitions is not None:
            what = "partitions for key %r, whose gradients are dense: such keys have slices"
        elif sparse and own.route not in (None, "rows"):
            what = "another route than 'rows' for key %r, whose gradients the script's module makes sparse"
        elif not sparse and own.route == "rows":
            what = "the route 'rows' for key %r, whose gradients the script's module makes dense"
        else:
            return ""
        return "%s has %s. Take it out of that key's entry" % (self._file, what % name)

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
        needed = [_FIELDS[field].since for cut in (self.default, *self.keys.values()) for field in _said(cut)]
        lines = ['"version": %d' % max([1, *needed, VERSION * self.allow_lossy])]
        lines += ['"allow_lossy": true'] * self.allow_lossy + ['"default": ' + _shown(self.default)]
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
    if len(strategy.choices.text()) > _MOST_BYTES_TOLD:
        raise ConfigError(
            'the strategy %s has more than %d MiB beside servers and slices: say in "default" what most keys have'
            % (path, _MOST_BYTES_TOLD >> 20)
        )
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
        return _strategy(content, path)
    except ValueError as error:
        raise ConfigError("the strategy %s: %s" % (path, error)) from None


def _strategy(content: Any, path: str) -> Strategy:
    version = content.get("version") if isinstance(content, dict) else VERSION
    if version not in range(1, VERSION + 1) or isinstance(version, bool):
        raise ValueError('its "version" is %.100r; this P3 reads versions 1 to %d' % (version, VERSION))
    _require_fields(content, {"version": 1, "default": 1, "keys": 1, "allow_lossy": 2}, "it", version)
    keys, is_lossy = content.get("keys", {}), content.get("allow_lossy", False)
    if not isinstance(keys, dict):
        raise ValueError('"keys" is no object of names and entries')
    if not isinstance(is_lossy, bool):
        raise ValueError('"allow_lossy" is %.100r; it must be true or false' % (is_lossy,))
    default = _cut(content.get("default", {}), '"default"', version, is_lossy)
    cuts = {name: _cut(entry, "key %.200r" % name, version, is_lossy) for name, entry in keys.items()}
    return Strategy(default, cuts, path, is_lossy)


class _Field(NamedTuple):
    """Of an entry."""

    read: Callable[[Any], Any]  # what Cut has of what a file has; ValueError, if it may not have that
    since: int = 1  # version
    loses: Callable[[Any], bool] = lambda _value: False  # information
    write: Callable[[Any], Any] = lambda value: value  # as JSON has it


def _servers(value: Any) -> Tuple[int, ...]:
    ranks = type(value) is list and 1 <= len(value) <= _MOST_TURNS
    if not ranks or not all(type(rank) is int and 0 <= rank < 1 << 16 for rank in value):
        raise ValueError("it must be a list of 1 to %d ranks of servers" % _MOST_TURNS)
    return tuple(value)


def _whole_number(most: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if type(value) is not int or not 1 <= value <= most:
            raise ValueError("it must be a whole number from 1 to %d" % most)
        return value

    return read


def _route(value: Any) -> str:
    if value not in _ROUTES:
        raise ValueError("it must be one of %s" % ", ".join(_ROUTES))
    return value


def _staleness(value: Any) -> Union[int, float]:
    if value != "inf" and type(value) is not int:
        raise ValueError('it must be a whole number of rounds of at least 0, or "inf"')
    rounds = math.inf if value == "inf" else value
    key_plan.staleness(rounds)
    return rounds


# By field of Cut.
_FIELDS = {
    "servers": _Field(_servers),
    "slice": _Field(_whole_number(_MOST_ELEMENTS)),
    "codec": _Field(ways_of, 2, lambda ways: ways != Ways(), lambda ways: ways._asdict() if ways != Ways() else None),
    "partitions": _Field(_whole_number(_MOST_PARTITIONS), 2),
    "route": _Field(_route, 2),
    "staleness": _Field(_staleness, 2, bool, lambda rounds: "inf" if rounds == math.inf else rounds),
}
_CHOICES = tuple(field for field in Cut._fields if field not in ("servers", "slice"))


def _cut(entry: Any, whose: str, version: int, allow_lossy: bool) -> Cut:
    _require_fields(entry, {field: one.since for field, one in _FIELDS.items()}, whose, version)
    made = {}
    for field, value in entry.items():
        try:
            made[field] = _FIELDS[field].read(value)
        except ValueError as error:
            raise ValueError("%s of %s is %.100r; %s" % (field, whose, value, error)) from None
        if _FIELDS[field].loses(made[field]) and not allow_lossy:
            raise ValueError(
                '%s of %s is %.100r, with which training differs from that without: say "allow_lossy": true beside '
                '"version", if that is what you want, or take it out' % (field, whose, value)
            )
    return Cut(**made)


def _require_fields(value: Any, known: Mapping[str, int], whose: str, version: int) -> None:
    """`known`: since which version there are such fields."""
    if not isinstance(value, dict):
        raise ValueError("%s is %.100r, no object" % (whose, value))
    unknown = [field for field in value if field not in known]
    if unknown:
        raise ValueError("%s has a field %.100r; it may have %s" % (whose, unknown[0], ", ".join(known)))
    later = [field for field in value if known[field] > version]
    if later:
        raise ValueError('%s has a field %r, for which "version" must be %d' % (whose, later[0], known[later[0]]))


def _without_twins(pairs: List[Tuple[str, Any]]) -> Dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError("%.200r stands twice in one object" % next(one for one in names if names.count(one) > 1))
    return made


def _said(cut: Cut) -> Dict[str, Any]:
    return {field: value for field, value in cut._asdict().items() if value is not None}


def _shown(cut: Cut) -> str:
    return json.dumps({field: _FIELDS[field].write(value) for field, value in _said(cut).items()})


def _in_words(ways: Ways) -> str:
    return "none" if ways == Ways() else json.dumps(ways._asdict())


def _in_place_of(name: str) -> str:
    key, bracket, _ = name.rpartition(" (")
    return key if bracket and name.endswith(")") else name


def _of_key(name: Optional[str]) -> str:
    return "" if name is None else ", key %r" % name
