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
    "ccSGD": ("sgd", {"momentum": "momentum"}),
    "NAG": ("nag", {"momentum": "momentum"}),
    "Adam": ("adam", {"beta1": "beta1", "beta2": "beta2", "epsilon": "epsilon"}),
    "AdaGrad": ("adagrad", {"epsilon": "float_stable_eps"}),
    "RMSProp": ("rmsprop", {"gamma1": "gamma1", "epsilon": "epsilon", "clip_weights": "clip_weights"}),
    "Signum": ("signum", {"momentum": "momentum", "wd_lh": "wd_lh"}),
    "FTML": ("ftml", {"beta1": "beta1", "beta2": "beta2", "epsilon": "epsilon"}),
    "Ftrl": ("ftrl", {"lamda1": "lamda1", "beta": "beta"}),
    "AdaDelta": ("adadelta", {"rho": "rho", "epsilon": "epsilon"}),
    "Adamax": ("adamax", {"beta1": "beta1", "beta2": "beta2"}),
    "Nadam": (
        "nadam",
        {"beta1": "beta1", "beta2": "beta2", "epsilon": "epsilon", "schedule_decay": "schedule_decay"},
    ),
    "DCASGD": ("dcasgd", {"momentum": "momentum", "lamda": "lamda"}),
    "Test": ("test", {}),
}
_CENTERED = ("rmsprop_centered", {**_NATIVE["RMSProp"][1], "gamma2": "gamma2"})
_COMMON = ("clip_gradient", "multi_precision")  # in every description, named as in MXNet
_FIELDS = {name: (*fields, *_COMMON) for name, fields in (*_NATIVE.values(), _CENTERED)}
# Where MXNet asks clip_gradient "is not None", and elsewhere whether it is true: these clip to 0.
_CLIP_TO_ZERO = ("adagrad", "adadelta", "adamax", "nadam", "dcasgd")

# Why the others of MXNet's registry stay on the workers.
_NOT_NATIVE = {
    "LAMB": "LAMB needs whole tensors, and a server has only slices",
    "LARS": "LARS needs whole tensors, and a server has only slices",
    "LBSGD": "LBSGD needs whole tensors, and a server has only slices",
    "GroupAdaGrad": "GroupAdaGrad needs whole rows, and a slice may end within one",
    "SGLD": "SGLD draws random numbers from MXNet's generator; seed it alike on every worker, or their weights drift "
    "apart",
}


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
    description["clip_gradient"] = _clip_gradient(optimizer, algorithm)
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


def round_scalars(optimizer: Any, index: Any) -> Tuple[float, float, float, float, float]:
    """(lr, wd, rescale, updates, schedule) of the next update of key `index`, as `optimizer.update` computes them.

    Counts the update, so call it exactly once for each round of a key. The bias corrections of Adam and Adamax are in
    lr; `updates` and `schedule` are in p3/optimizer.h.
    """
    algorithm, _ = _native_form(optimizer)
    optimizer._update_count(index)
    updates = optimizer._index_update_count[index]
    lr, schedule = optimizer._get_lr(index), 1.0
    if algorithm == "adam":
        lr *= math.sqrt(1.0 - optimizer.beta2**updates) / (1.0 - optimizer.beta1**updates)
    elif algorithm == "adamax":
        lr /= 1.0 - optimizer.beta1**updates
    elif algorithm == "nadam":
        # As in MXNet, every update of any parameter counts; so it is kept in the optimizer.
        optimizer.m_schedule *= _nadam_momentum(optimizer, updates)
        schedule = optimizer.m_schedule
    if algorithm not in ("ftml", "nadam"):
        updates = 0  # all workers must send the same, so nothing is sent that no server reads
    wd, rescale = optimizer._get_wd(index), optimizer.rescale_grad
    return float(lr), float(wd), float(rescale), float(updates), float(schedule)


def begin_behind(optimizer: Any, index: Any, updates: int) -> None:
    """As if so many updates of key `index` had been counted already."""
    if updates <= 0:
        return
    optimizer._index_update_count[index] = updates
    optimizer.num_update = max(optimizer.num_update, updates)
    if _native_form(optimizer)[0] == "nadam":
        for update in range(1, updates + 1):
            optimizer.m_schedule *= _nadam_momentum(optimizer, update)


def _nadam_momentum(optimizer: Any, updates: int) -> float:
    return optimizer.beta1 * (1.0 - 0.5 * 0.96 ** (updates * optimizer.schedule_decay))


def updates_rows_alone(optimizer: Any, dtype: Any) -> bool:
    """Whether MXNet updates only the rows that a row_sparse gradient has: its lazy update. Others need every row.

    AdaGrad's decays them alone too, where MXNet's operator knows no decay.
    """
    import mxnet as mx

    kind = type(optimizer)
    if kind is mx.optimizer.AdaGrad:
        return True
    if kind not in (mx.optimizer.SGD, mx.optimizer.Adam) or not optimizer.lazy_update:
        return False
    # MXNet's operator for a float16 weight with a float32 master copy updates all rows.
    has_master = optimizer.multi_precision and str(getattr(dtype, "__name__", dtype)) == "float16"
    return not (kind is mx.optimizer.SGD and has_master)


def _native_form(optimizer: Any) -> Tuple[str, Dict[str, str]]:
    import mxnet as mx

    kind = type(optimizer)
    if not kind.__module__.startswith("mxnet.optimizer"):
        raise NotOnServer(f"{kind.__name__} is user-defined")
    if kind.__name__ in _NOT_NATIVE:
        raise NotOnServer(_NOT_NATIVE[kind.__name__])
    if kind.__name__ not in _NATIVE or kind is not getattr(mx.optimizer, kind.__name__):
        raise NotOnServer(f"the servers have no {kind.__name__}, only {', '.join(sorted(_NATIVE))}")
    if kind is mx.optimizer.Signum and optimizer.momentum == 0 and optimizer.wd_lh:
        raise NotOnServer("Signum without momentum has no wd_lh in MXNet; set wd instead")
    return _CENTERED if kind is mx.optimizer.RMSProp and optimizer.centered else _NATIVE[kind.__name__]


def _clip_gradient(optimizer: Any, algorithm: str) -> float:
    clip = None if algorithm == "test" else optimizer.clip_gradient  # Test clips nothing
    if clip is not None and algorithm in _CLIP_TO_ZERO:
        if clip < 0:
            raise NotOnServer(f"{type(optimizer).__name__} with clip_gradient {clip} has no sensible meaning")
        return float(clip)
    return _bound(clip)


def _bound(clip: Any) -> float:
    """None and 0 are no clipping for MXNet, as negative numbers are."""
    return float(clip) if clip else -1.0


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
