"""Which of MXNet's optimizers run on the servers, and the numbers that describe them.

A description is a flat dict of a name and numbers, ready for JSON. It never holds code:

    {"name": "adam", "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-08, "clip_gradient": -1.0, "multi_precision": False}

Negative clipping means none. What may change from round to round (learning rate, weight decay, rescale) is not in
it; `round_scalars` computes it for each push. Servers and the scheduler import this module without MXNet or NumPy.
"""

from __future__ import annotations

import math
import sys
from typing import Any, Dict, Tuple

# MXNet's class -> our algorithm, and the attribute that holds each of its fields.
_NATIVE: Dict[str, Tuple[str, Dict[str, str]]] = {
    "SGD": ("sgd", {"momentum": "momentum"}),
    "NAG": ("nag", {"momentum": "momentum"}),
    "Adam": ("adam", {"beta1": "beta1", "beta2": "beta2", "epsilon": "epsilon"}),
    "AdaGrad": ("adagrad", {"epsilon": "float_stable_eps"}),
    "RMSProp": ("rmsprop", {"gamma1": "gamma1", "epsilon": "epsilon", "clip_weights": "clip_weights"}),
}
_CENTERED = ("rmsprop_centered", {**_NATIVE["RMSProp"][1], "gamma2": "gamma2"})
_COMMON = ("clip_gradient", "multi_precision")  # in every description, named as in MXNet
_FIELDS = {name: (*fields, *_COMMON) for name, fields in (*_NATIVE.values(), _CENTERED)}
_NEED_WHOLE_TENSORS = ("LAMB", "LARS", "LBSGD")


class NotOnServer(Exception):
    """This optimizer must run on the workers; the text says why."""


def describe(optimizer: Any) -> Dict[str, Any]:
    """The description of an `mx.optimizer.Optimizer` that the servers run natively.

    Raises NotOnServer for any other. The class must match exactly: a subclass may override `update`.
    """
    algorithm, attributes = _native_form(optimizer)
    description: Dict[str, Any] = {"name": algorithm, "multi_precision": bool(optimizer.multi_precision)}
    for field, attribute in attributes.items():
        if field != "clip_weights":
            description[field] = float(getattr(optimizer, attribute))
    description["clip_gradient"] = _bound(optimizer.clip_gradient, zero_clips=algorithm == "adagrad")
    if "clip_weights" in attributes:
        description["clip_weights"] = _bound(optimizer.clip_weights)
    try:
        validate(description)
    except ValueError as error:
        raise NotOnServer(str(error)) from None
    return description


def validate(description: Any) -> None:
    """Raises ValueError, naming the field, unless this is a complete and sensible description."""
    if not isinstance(description, dict):
        raise ValueError(f"optimizer: the description must be a dict, not {type(description).__name__}")
    name = description.get("name")
    if not isinstance(name, str) or name not in _FIELDS:
        raise ValueError(f"optimizer: name is {name!r}; the servers know {', '.join(sorted(_FIELDS))}")
    missing = [field for field in _FIELDS[name] if field not in description]
    if missing:
        raise ValueError(f"optimizer {name}: missing {', '.join(missing)}")
    for field, value in description.items():
        if field == "name":
            continue
        if field not in _FIELDS[name]:
            raise ValueError(f"optimizer {name}: {field!r} is no field of it; it has {', '.join(_FIELDS[name])}")
        wanted, in_range = _RANGES[field]
        if not in_range(value):
            raise ValueError(f"optimizer {name}: {field} is {value!r}; it must be {wanted}")


def round_scalars(optimizer: Any, index: Any) -> Tuple[float, float, float]:
    """(lr, wd, rescale) of the next update of parameter `index`, as `optimizer.update` would compute them.

    Counts the update, so call it exactly once for each round of a key. Adam's bias correction is in lr.
    """
    algorithm, _ = _native_form(optimizer)
    optimizer._update_count(index)
    lr = optimizer._get_lr(index)
    if algorithm == "adam":
        updates = optimizer._index_update_count[index]
        lr *= math.sqrt(1.0 - optimizer.beta2**updates) / (1.0 - optimizer.beta1**updates)
    return float(lr), float(optimizer._get_wd(index)), float(optimizer.rescale_grad)


def _native_form(optimizer: Any) -> Tuple[str, Dict[str, str]]:
    import mxnet as mx

    kind = type(optimizer)
    if not kind.__module__.startswith("mxnet.optimizer"):
        raise NotOnServer(f"{kind.__name__} is user-defined")
    if kind.__name__ in _NEED_WHOLE_TENSORS:
        raise NotOnServer(f"{kind.__name__} needs whole tensors, and a server has only slices")
    if kind.__name__ not in _NATIVE or kind is not getattr(mx.optimizer, kind.__name__):
        raise NotOnServer(f"the servers have no {kind.__name__}, only {', '.join(sorted(_NATIVE))}")
    return _CENTERED if kind is mx.optimizer.RMSProp and optimizer.centered else _NATIVE[kind.__name__]


def _bound(clip: Any, zero_clips: bool = False) -> float:
    """MXNet takes None for no clipping, and so 0 and negative numbers, save that AdaGrad clips to 0."""
    if clip is None or (clip == 0 and not zero_clips):
        return -1.0
    if clip < 0 and zero_clips:
        raise NotOnServer(f"AdaGrad with clip_gradient {clip} has no sensible meaning")
    return float(clip)


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
    "epsilon": _AT_LEAST_0,
    "clip_gradient": _CLIP,
    "clip_weights": _CLIP,
    "multi_precision": ("True or False", lambda value: isinstance(value, bool)),
}
