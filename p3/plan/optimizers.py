"""Which optimizers run on the servers, and the numbers that describe them.

A description is a flat dict of a name and numbers, ready for JSON. It never holds code:

    {"name": "adam", "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-08, "clip_gradient": -1.0, "multi_precision": False}

Negative clipping means none. Learning rate, weight decay and rescale are not in it, but come with each push. It is
announced once; where a round goes by other numbers, their values() come with its pushes. Front ends make descriptions
of their optimizers. Imports no framework and no NumPy.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, FrozenSet, Iterator, List, Mapping, Optional, Sequence, Tuple

Check = Tuple[str, Callable[[Any], bool]]  # what a field must be, and whether a value is


class _FieldsOfRules(Mapping[str, Mapping[str, Check]]):
    """By name of a rule: read from the core when they are first asked for, as much works where that is not built."""

    def __getitem__(self, name: str) -> Mapping[str, Check]:
        return _fields()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_fields())

    def __len__(self) -> int:
        return len(_fields())


# The fields of each rule of src/rules, with the names of MXNet 1.9's optimizers or of PyTorch 2.13's, and their checks.
FIELDS = _FieldsOfRules()


def per_round(name: str) -> FrozenSet[str]:
    """What the rule reads of a round besides its lr, wd and rescale: of `updates` and `schedule` (p3/optimizer.h)."""
    return frozenset(field["name"] for field in _rules()[name] if field["per_round"])


@functools.lru_cache(maxsize=None)
def _rules() -> Mapping[str, Any]:
    from p3._core import optimizer_rules

    return optimizer_rules()


@functools.lru_cache(maxsize=None)
def _fields() -> Mapping[str, Mapping[str, Check]]:
    return {
        name: {field["name"]: _check_of(field) for field in fields if not field["per_round"]}
        for name, fields in _rules().items()
    }


def _check_of(field: Mapping[str, Any]) -> Check:
    def fits(value: Any) -> bool:
        if field["is_flag"] or isinstance(value, bool):
            return field["is_flag"] and isinstance(value, bool)
        # The comparison is false for NaN, and right for an int that no float can hold.
        return isinstance(value, (int, float)) and field["least"] <= value <= field["most"]

    return field["allowed"], fits


def values(description: Mapping[str, Any]) -> Tuple[float, ...]:
    """Of its fields, in the order of its rule's (p3/optimizer.h, FieldValues). ValueError as validate()."""
    validate(description)
    return tuple(float(description[field]) for field in FIELDS[description["name"]])


def with_values(description: Mapping[str, Any], now: Sequence[float]) -> Mapping[str, Any]:
    """The description with other values()."""
    fields = zip(FIELDS[description["name"]], now)
    typed = {field: bool(value) if isinstance(description[field], bool) else value for field, value in fields}
    return {**description, **typed}


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> List[str]:
    """The fields of a rule that two of its descriptions have otherwise."""
    return [field for field in FIELDS[before["name"]] if before[field] != now[field]]


def values_from_now_on(
    announced: Mapping[str, Any], now: Mapping[str, Any], of: str, instead: str = ""
) -> Optional[Tuple[float, ...]]:
    """What rounds go by (p3/optimizer.h, FieldValues) when a rule's description has become another one; None: as
    announced. ValueError if a field asks for a state that the servers have not begun: `of` what it is, in words, and
    what the script may do `instead`."""
    from p3._core import state_names

    changed, kept = differing(announced, now), state_names(dict(announced))
    for field in changed:
        for name in state_names({**announced, field: now[field]}):
            if name not in kept:
                raise ValueError(
                    "%s has become %r in %s that began with %r: the servers keep no %s for it, and cannot begin one "
                    "now. Begin with such a value%s" % (field, now[field], of, announced[field], name, instead)
                )
    return values(now) if changed else None


def validate(description: Any) -> None:
    """Raises ValueError, naming the field, unless this is a complete and sensible description."""
    validate_fields("optimizer", "name", FIELDS, description)


def validate_fields(option: str, selector: str, kinds: Mapping[str, Mapping[str, Check]], value: Any) -> None:
    """Of an option of a store: ValueError unless the value is a dict whose field `selector` names one of `kinds`, and
    which has just the further fields of that."""
    if not isinstance(value, dict):
        example = {selector: next(iter(kinds))}
        raise ValueError(f"{option}: the value must be a dict like {example}, not {value!r:.500}")
    kind = value.get(selector)
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(f"{option}: {selector} is {kind!r:.100}; it must be one of {', '.join(kinds)}")
    fields = kinds[kind]
    for field in value.keys() - fields.keys() - {selector}:
        allowed = ", ".join([selector, *fields])
        what = f"{field!r:.100} (which is {value[field]!r:.500})"
        raise ValueError(f"{option} {kind}: {what} is no field of it; it has {allowed}")
    for field, (wanted, fits) in fields.items():
        if field not in value:
            raise ValueError(f"{option} {kind}: {field} is missing; it must be {wanted}")
        if not fits(value[field]):
            raise ValueError(f"{option} {kind}: {field} is {value[field]!r:.500}; it must be {wanted}")
