"""Which optimizers run on the servers, and the numbers that describe them.

A description is a flat dict of a name and numbers, ready for JSON. It never holds code:

    {"name": "adam", "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-08, "clip_gradient": -1.0, "multi_precision": False}

Negative clipping means none. What may change from round to round (learning rate, weight decay, rescale) is not in
it, but comes with each push. Front ends make descriptions of their optimizers. Imports no framework and no NumPy.
"""

from __future__ import annotations

import sys
from typing import Any, Dict, Tuple

# The fields of each algorithm, with the names of MXNet 1.9's optimizers.
_OWN_FIELDS: Dict[str, Tuple[str, ...]] = {
    "sgd": ("momentum",),
    "nag": ("momentum",),
    "adam": ("beta1", "beta2", "epsilon"),
    "adagrad": ("epsilon",),
    "rmsprop": ("gamma1", "epsilon", "clip_weights"),
    "rmsprop_centered": ("gamma1", "epsilon", "clip_weights", "gamma2"),
    "signum": ("momentum", "wd_lh"),
    "ftml": ("beta1", "beta2", "epsilon"),
    "ftrl": ("lamda1", "beta"),
    "adadelta": ("rho", "epsilon"),
    "adamax": ("beta1", "beta2"),
    "nadam": ("beta1", "beta2", "epsilon", "schedule_decay"),
    "dcasgd": ("momentum", "lamda"),
    "test": (),
}
FIELDS = {name: (*fields, "clip_gradient", "multi_precision") for name, fields in _OWN_FIELDS.items()}


def validate(description: Any) -> None:
    """Raises ValueError, naming the field, unless this is a complete and sensible description."""
    if not isinstance(description, dict):
        raise ValueError(f"optimizer: the description must be a dict, not {type(description).__name__}")
    name = description.get("name")
    if not isinstance(name, str) or name not in FIELDS:
        raise ValueError(f"optimizer: name is {name!r}; the servers know {', '.join(sorted(FIELDS))}")
    missing = [field for field in FIELDS[name] if field not in description]
    if missing:
        raise ValueError(f"optimizer {name}: missing {', '.join(missing)}")
    for field, value in description.items():
        if field == "name":
            continue
        if field not in FIELDS[name]:
            raise ValueError(f"optimizer {name}: {field!r} is no field of it; it has {', '.join(FIELDS[name])}")
        wanted, in_range = _RANGES[field]
        if not in_range(value):
            raise ValueError(f"optimizer {name}: {field} is {value!r}; it must be {wanted}")


def _is_number(value: Any) -> bool:
    # The comparison is false for NaN, and right for an int that no float can hold.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


_AT_LEAST_0 = ("a finite number of at least 0", lambda value: _is_number(value) and value >= 0)
_FRACTION = ("a number of at least 0 and below 1", lambda value: _is_number(value) and 0 <= value < 1)
_CLIP = ("a finite number (negative: no clipping)", _is_number)

# The C++ core checks the same ranges; here they are checked before anything is sent.
_RANGES = {
    "momentum": _AT_LEAST_0,
    "beta1": _FRACTION,
    "beta2": _FRACTION,
    "gamma1": _FRACTION,
    "gamma2": _AT_LEAST_0,
    "rho": _FRACTION,
    "beta": _AT_LEAST_0,
    "lamda1": _AT_LEAST_0,
    "lamda": _AT_LEAST_0,
    "wd_lh": _AT_LEAST_0,
    "schedule_decay": _AT_LEAST_0,
    "epsilon": _AT_LEAST_0,
    "clip_gradient": _CLIP,
    "clip_weights": _CLIP,
    "multi_precision": ("True or False", lambda value: isinstance(value, bool)),
}
