"""The options of a store, on which all its workers agree and which its servers follow: a name, and a flat value.

    optimizer    {"name": "sgd", "momentum": 0.9, ...}      updates the weights; see p3.plan.optimizers
    compression  {"type": "2bit", "threshold": 0.5}         how gradients travel; see p3.codecs
    reduction    {"type": "average"}                        what becomes of the workers' gradients: over those that took
                                                            part; or {"type": "mean"}, over all; or {"type": "sum"}
    value_compression  {"type": "int8"}                     how what comes back travels, as compression
    quorum       {"type": "workers", "least": 2, "grace_s": 5.0}  of local steps: when rounds close without who is late

Without them: the sum of the gradients, sent as it is, is the new value. Needs neither a framework nor NumPy.
"""

from __future__ import annotations

from typing import Any

from p3 import codecs
from p3.plan import planner
from p3.plan.key_plan import MOST_GRACE_S
from p3.plan.optimizers import FIELDS, validate_fields

_MOST_WORKERS = 1 << 20

_QUORUM = {
    "least": ("a whole number of workers, at least 1",
              lambda value: _is_number(value, int) and 1 <= value <= _MOST_WORKERS),
    "grace_s": ("a number of seconds from 0 to %.0e" % MOST_GRACE_S,
                lambda value: _is_number(value, (int, float)) and 0 <= value <= MOST_GRACE_S),
}  # fmt: skip

_OPTIONS = {  # the field that selects a kind, and what tells the further fields of each kind
    "compression": ("type", codecs.checks),
    "optimizer": ("name", lambda: FIELDS),
    "quorum": ("type", lambda: {"workers": _QUORUM}),
    "reduction": ("type", lambda: {"average": {}, "mean": {}, "sum": {}}),
    "value_compression": ("type", codecs.checks_of_what_comes_back),
}


def _is_number(value: Any, kinds: Any) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def validate(name: Any, value: Any) -> None:
    """Raises ValueError, naming option, field, value and what is allowed, unless this is an option and makes sense."""
    if not isinstance(name, str) or name not in _OPTIONS:
        raise ValueError(f"option {name!r:.100} is unknown; a store has {', '.join(_OPTIONS)}")
    selector, kinds = _OPTIONS[name]
    validate_fields(name, selector, kinds(), value)


def ways_of(given: Any) -> codecs.Ways:
    """Both ways in which a key travels, from what a script gives as its compression. ValueError unless that is one."""
    if not isinstance(given, (str, dict, type(None))):
        raise ValueError("compression is %.100r; it must be a name, as 'int8', a dict, as {'up': 'int8', 'down': "
                         "'bf16'}, or None" % (given,))  # fmt: skip
    ways = codecs.Ways.of(given)
    for option, value in ways.options.items():
        validate(option, value)
    return ways


def validate_of_key(options: Any) -> None:
    """Of what a key has in place of its store's, by name; {} as a value: none. ValueError as of validate()."""
    for name, value in options.items():
        if name not in planner.OF_KEYS:
            raise ValueError(f"option {name!r:.100} is of stores; a key has {', '.join(planner.OF_KEYS)}")
        if value != {}:
            validate(name, value)
