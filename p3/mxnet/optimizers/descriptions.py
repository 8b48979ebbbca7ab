"""MXNet's optimizers for the servers: their descriptions (p3/plan/optimizers.py), and the numbers of each push."""

from __future__ import annotations

import math
from typing import Any, Dict, Iterable, Optional, Tuple

import mxnet as mx

from p3.plan.optimizers import FIELDS, per_round, validate, values_from_now_on
from p3.worker.key import Key

# MXNet's class -> our algorithm.
_NATIVE = {
    name: name.lower()
    for name in (
        "SGD", "NAG", "Adam", "AdaGrad", "RMSProp", "Signum", "FTML", "Ftrl", "AdaDelta", "Adamax", "Nadam", "DCASGD",
        "Test",
    )
}  # fmt: skip
_NATIVE["ccSGD"] = "sgd"
# Where MXNet asks clip_gradient "is not None", and elsewhere whether it is true: these clip to 0.
_CLIP_TO_ZERO = ("adagrad", "adadelta", "adamax", "nadam", "dcasgd")

# Why the others of MXNet's registry stay on the workers.
_NOT_NATIVE = {
    **{name: f"{name} needs whole tensors, and a server has only slices" for name in ("LAMB", "LARS", "LBSGD")},
    "GroupAdaGrad": "GroupAdaGrad needs whole rows, and a slice may end within one",
    "SGLD": "SGLD draws random numbers from MXNet's generator; seed it in the same way on every worker, or their "
    "weights drift apart",
}


class NotOnServer(Exception):
    """This optimizer must run on the workers; the text says why."""


def describe(optimizer: Any) -> Dict[str, Any]:
    """The description of an `mx.optimizer.Optimizer` that the servers run natively.

    Raises NotOnServer for any other. The class must match exactly: a subclass may override `update`.
    """
    algorithm = _algorithm(optimizer)
    description: Dict[str, Any] = {"name": algorithm}
    for field in FIELDS[algorithm]:
        if field == "multi_precision":
            description[field] = bool(optimizer.multi_precision)
        elif field == "clip_gradient":
            description[field] = _clip_gradient(optimizer, algorithm)
        elif field == "clip_weights":
            description[field] = float(optimizer.clip_weights or -1)
        else:
            description[field] = float(getattr(optimizer, _attribute(algorithm, field)))
    try:
        validate(description)
    except ValueError as error:
        raise NotOnServer(str(error)) from None
    return description


class LiveFields:
    """What rounds go by while the numbers of an optimizer change behind describe()."""

    def __init__(self, optimizer: Any) -> None:
        self._announced = describe(optimizer)
        self._attributes = [_attribute(self._announced["name"], field) for field in FIELDS[self._announced["name"]]]
        self._read = self._numbers(optimizer)
        self._fields: Optional[Tuple[float, ...]] = None

    def of(self, optimizer: Any, key: Key) -> Optional[Tuple[float, ...]]:
        """Of a push of that key; None: as announced. ValueError if it cannot go by what the optimizer has now."""
        now = self._numbers(optimizer)
        if now != self._read:
            try:
                description = describe(optimizer)
            except NotOnServer as error:
                raise ValueError(f"the servers cannot go on with this optimizer: {error}") from None
            self._fields = values_from_now_on(self._announced, description, "an optimizer")
            self._read = now
        if self._fields is not None and key.axes.takes_steps:
            raise ValueError(
                f"key {key.name!r}: with dgc the workers apply the momentum, and the optimizer's numbers, but for "
                "learning rate and weight decay, cannot change from step to step"
            )
        return self._fields

    def _numbers(self, optimizer: Any) -> Tuple[Any, ...]:
        return tuple(getattr(optimizer, attribute) for attribute in self._attributes)


def looks_across_keys(optimizer: Any) -> bool:
    """Whether an update of a key depends on which updates of others came before it: a scheduler goes by the greatest
    count of all keys."""
    return optimizer is not None and (
        optimizer.lr_scheduler is not None
        or isinstance(optimizer, (mx.optimizer.Nadam, mx.optimizer.LBSGD, mx.optimizer.SGLD))
    )


def _attribute(algorithm: str, field: str) -> str:
    return "float_stable_eps" if (algorithm, field) == ("adagrad", "epsilon") else field


def round_scalars(optimizer: Any, index: Any, servers_count: bool = False) -> Tuple[float, float, float, float, float]:
    """(lr, wd, rescale, updates, schedule) of the next update of key `index`, as `optimizer.update` computes them.

    Counts the update, so call it exactly once for each round of a key. The bias corrections of Adam and Adamax are in
    lr; `updates` and `schedule` are in p3/optimizer.h. `servers_count`: each worker's push is an update of its own,
    which only the servers can count; so they make the corrections (src/server/discipline/stale/update_count.h).
    """
    algorithm = _algorithm(optimizer)
    optimizer._update_count(index)
    updates = optimizer._index_update_count[index]
    lr, schedule = optimizer._get_lr(index), 1.0
    if servers_count:
        updates = 0
    elif algorithm == "adam":
        lr *= math.sqrt(1.0 - optimizer.beta2**updates) / (1.0 - optimizer.beta1**updates)
    elif algorithm == "adamax":
        lr /= 1.0 - optimizer.beta1**updates
    elif algorithm == "nadam":
        # As in MXNet, every update of any parameter counts; so it is kept in the optimizer.
        optimizer.m_schedule *= _nadam_momentum(optimizer, updates)
        schedule = optimizer.m_schedule
    if "updates" not in per_round(algorithm):
        updates = 0  # all workers must send the same, so nothing is sent that no server reads
    wd, rescale = optimizer._get_wd(index), optimizer.rescale_grad
    return float(lr), float(wd), float(rescale), float(updates), float(schedule)


def counted(optimizer: Any) -> Tuple[float, Dict[Any, int]]:
    """What follow_in_steps() begins with."""
    return getattr(optimizer, "m_schedule", 1.0), dict(optimizer._index_update_count)


def follow_in_steps(optimizer: Any, indices: Iterable[Any], before: Tuple[float, Dict[Any, int]]) -> None:
    """As if the updates of these keys since `before` had been counted step by step, in this order. Of Nadam's schedule,
    a product over all of them, the last bits depend on that."""
    if type(optimizer) is not mx.optimizer.Nadam:
        return
    optimizer.m_schedule, had = before
    now = optimizer._index_update_count
    rounds = [range(had.get(index, 0) + 1, now.get(index, 0) + 1) for index in indices]
    for step in range(max(map(len, rounds), default=0)):
        for updates in rounds:
            if step < len(updates):
                optimizer.m_schedule *= _nadam_momentum(optimizer, updates[step])


def _nadam_momentum(optimizer: Any, updates: int) -> float:
    return optimizer.beta1 * (1.0 - 0.5 * 0.96 ** (updates * optimizer.schedule_decay))


def updates_rows_alone(optimizer: Any, dtype: Any) -> bool:
    """Whether MXNet updates only the rows that a row_sparse gradient has: its lazy update. Others need every row.

    AdaGrad's decays them alone too, where MXNet's operator knows no decay.
    """
    kind = type(optimizer)
    if kind is mx.optimizer.AdaGrad:
        return True
    if kind not in (mx.optimizer.SGD, mx.optimizer.Adam) or not optimizer.lazy_update:
        return False
    # MXNet's operator for a float16 weight with a float32 master copy updates all rows.
    has_master = optimizer.multi_precision and str(getattr(dtype, "__name__", dtype)) == "float16"
    return not (kind is mx.optimizer.SGD and has_master)


def would_update_all_rows(optimizer: Any, entry: Any) -> bool:
    """Of a key of a store whose rows the servers have updated alone: what a key is, is decided when its first gradient
    comes, and the servers learn of no change."""
    return entry.pushed and entry.declared.sparse and not updates_rows_alone(optimizer, entry.dtype)


def _algorithm(optimizer: Any) -> str:
    kind = type(optimizer)
    if not kind.__module__.startswith("mxnet.optimizer"):
        raise NotOnServer(f"{kind.__name__} is user-defined")
    if kind.__name__ in _NOT_NATIVE:
        raise NotOnServer(_NOT_NATIVE[kind.__name__])
    if kind.__name__ not in _NATIVE or kind is not getattr(mx.optimizer, kind.__name__):
        raise NotOnServer(f"the servers have no {kind.__name__}, only {', '.join(sorted(_NATIVE))}")
    if kind is mx.optimizer.Signum and optimizer.momentum == 0 and optimizer.wd_lh:
        raise NotOnServer("Signum without momentum has no wd_lh in MXNet; set wd instead")
    return "rmsprop_centered" if kind is mx.optimizer.RMSProp and optimizer.centered else _NATIVE[kind.__name__]


def _clip_gradient(optimizer: Any, algorithm: str) -> float:
    clip = None if algorithm == "test" else optimizer.clip_gradient  # Test clips nothing
    if clip is not None and algorithm in _CLIP_TO_ZERO:
        if clip < 0:
            raise NotOnServer(f"{type(optimizer).__name__} with clip_gradient {clip} has no sensible meaning")
        return float(clip)
    return float(clip or -1)  # None and 0 are no clipping for MXNet, as negative numbers are
