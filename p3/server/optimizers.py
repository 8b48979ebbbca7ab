"""Which optimizers run on the servers, and the numbers that describe them.

A description is a flat dict of a name and numbers, ready for JSON. It never holds code:

    {"name": "adam", "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-08, "clip_gradient": -1.0, "multi_precision": False}

Negative clipping means none. What may change from round to round (learning rate, weight decay, rescale) is not in
it, but comes with each push. Front ends make descriptions of their optimizers. Imports no framework and no NumPy.
"""

from __future__ import annotations

import sys
from typing import Any, Callable, Mapping, Tuple

Check = Tuple[str, Callable[[Any], bool]]  # what a field must be, and whether a value is


def _is_number(value: Any) -> bool:
    # The comparison is false for NaN, and right for an int that no float can hold.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


_AT_LEAST_0 = ("a finite number of at least 0", lambda value: _is_number(value) and value >= 0)
_FRACTION = ("a number of at least 0 and below 1", lambda value: _is_number(value) and 0 <= value < 1)
_FINITE = ("a finite number", _is_number)
_CLIP = ("a finite number (negative: no clipping)", _is_number)
_FLAG = ("True or False", lambda value: isinstance(value, bool))

_ADAM = {"beta1": _FRACTION, "beta2": _FRACTION, "epsilon": _AT_LEAST_0}
_RMSPROP = {"gamma1": _FRACTION, "epsilon": _AT_LEAST_0, "clip_weights": _CLIP}
_MXNETS_FIELDS = {
    "sgd": {"momentum": _AT_LEAST_0},
    "nag": {"momentum": _AT_LEAST_0},
    "adam": _ADAM,
    "adagrad": {"epsilon": _AT_LEAST_0},
    "rmsprop": _RMSPROP,
    "rmsprop_centered": {**_RMSPROP, "gamma2": _AT_LEAST_0},
    "signum": {"momentum": _AT_LEAST_0, "wd_lh": _AT_LEAST_0},
    "ftml": _ADAM,
    "ftrl": {"lamda1": _AT_LEAST_0, "beta": _AT_LEAST_0},
    "adadelta": {"rho": _FRACTION, "epsilon": _AT_LEAST_0},
    "adamax": {"beta1": _FRACTION, "beta2": _FRACTION},
    "nadam": {**_ADAM, "schedule_decay": _AT_LEAST_0},
    "dcasgd": {"momentum": _AT_LEAST_0, "lamda": _AT_LEAST_0},
    "test": {},
}
_TORCHS_FIELDS = {
    "torch_sgd": {"momentum": _AT_LEAST_0, "dampening": _FINITE, "nesterov": _FLAG},
    "torch_adam": {**_ADAM, "amsgrad": _FLAG, "decoupled": _FLAG},  # decoupled: AdamW
    "torch_adagrad": {"epsilon": _AT_LEAST_0, "initial_accumulator_value": _AT_LEAST_0},
    "torch_rmsprop": {"alpha": _AT_LEAST_0, "epsilon": _AT_LEAST_0, "momentum": _AT_LEAST_0, "centered": _FLAG},
}
# The fields of each algorithm, with the names of MXNet 1.9's optimizers or of PyTorch 2.13's, and their checks. The C++
# core checks the same ranges; here they are checked before anything is sent.
FIELDS = {
    **{name: {**own, "clip_gradient": _CLIP, "multi_precision": _FLAG} for name, own in _MXNETS_FIELDS.items()},
    **{name: {**own, "maximize": _FLAG, "multi_precision": _FLAG} for name, own in _TORCHS_FIELDS.items()},
}


def validate(description: Any) -> None:
    """Raises ValueError, naming the field, unless this is a complete and sensible description."""
    validate_fields("optimizer", "name", FIELDS, description)


def validate_fields(option: str, selector: str, kinds: Mapping[str, Mapping[str, Check]], value: Any) -> None:
    """Of an option of a store: ValueError unless the value is a dict whose field `selector` names one of `kinds`, and
    which has just the further fields of that."""
    if not isinstance(value, dict):
        raise ValueError(f"{option}: the value must be a dict, not {type(value).__name__}")
    kind = value.get(selector)
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(f"{option}: {selector} is {kind!r}; it must be one of {', '.join(kinds)}")
    fields = kinds[kind]
    for field in value.keys() - fields.keys() - {selector}:
        allowed = ", ".join([selector, *fields])
        raise ValueError(f"{option} {kind}: {field!r} (which is {value[field]!r}) is no field of it; it has {allowed}")
    for field, (wanted, fits) in fields.items():
        if field not in value:
            raise ValueError(f"{option} {kind}: {field} is missing; it must be {wanted}")
        if not fits(value[field]):
            raise ValueError(f"{option} {kind}: {field} is {value[field]!r}; it must be {wanted}")
