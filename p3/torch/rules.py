"""torch's optimizers for the servers: their descriptions (p3/plan/optimizers.py), numbers of a push, and states."""

from __future__ import annotations

from typing import Any, Dict, NamedTuple, Optional, Tuple

import torch

from p3._core import state_names
from p3.plan.optimizers import FIELDS, values, with_values
from p3.torch.parameters.arrays import DEVICES

# Each updates every parameter by itself, so a parameter can be updated just before its module needs it.
_LAZY = ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop",
         "SparseAdam", "Adafactor", "Muon")  # fmt: skip


Fields = Optional[Tuple[float, ...]]  # of p3.plan.optimizers.values()


class NotOnServer(Exception):
    """This optimizer must run on the workers; the text says why."""


class State(NamedTuple):
    """What torch keeps of a parameter, by name."""

    arrays: Tuple[str, ...]  # the servers' parts 1, 2 ... of it
    counts: bool  # and "step": how often it was updated


def describe(kind: type, group: Dict[str, Any]) -> Dict[str, Any]:
    """How an optimizer of this class updates the parameters of `group`; the rest comes with each push (scalars).

    Raises NotOnServer for what the servers cannot run. The class must match exactly: a subclass may override step().
    """
    rule = _RULES.get(kind)
    if rule is None:
        raise NotOnServer("the servers have no %s, only %s" % (kind.__name__, ", ".join(k.__name__ for k in _RULES)))
    if group.get("differentiable"):
        raise NotOnServer("differentiable=True keeps the graph of each update")
    description = rule(group)
    description.update(maximize=bool(group.get("maximize", False)), multi_precision=False)
    for field, value in description.items():
        if isinstance(value, torch.Tensor):
            raise NotOnServer("%s is a tensor" % field)
    return description


def updates_parameters_alone(kind: type) -> bool:
    """Whether the class updates each parameter without looking at others, so that it may do so one at a time."""
    return getattr(torch.optim, kind.__name__, None) is kind and kind.__name__ in _LAZY


def updates_rows_alone(description: Dict[str, Any], group: Dict[str, Any]) -> bool:
    """Whether a sparse gradient changes the rows it has and no others, on the servers as in torch."""
    plain = description["name"] == "torch_sgd" and description["momentum"] == 0
    return (plain or description["name"] == "torch_adagrad") and group["weight_decay"] == 0


def number(value: Any) -> float:
    """Of a learning rate or weight decay. To read one on a device is to wait for that, so it is done once in a step, as
    long as nobody writes to it."""
    if not isinstance(value, torch.Tensor) or value.device.type not in DEVICES:
        return float(value)
    known = _numbers.get(id(value))
    if known is None or known[1] != value._version:
        known = _numbers[id(value)] = value, value._version, float(value)
    return known[2]


def forget_numbers() -> None:
    """At the end of a step: not all writes are counted."""
    _numbers.clear()


_numbers: Dict[int, Tuple[torch.Tensor, int, float]] = {}  # those read in this step


def counts(announced: Dict[str, Any], group: Dict[str, Any]) -> bool:
    """Whether a step is an update of the states: of SGD without momentum it leaves velocities, and begins none."""
    return announced["name"] != "torch_sgd" or announced["momentum"] == 0 or group["momentum"] != 0


def scalars(group: Dict[str, Any], rescale: float, updates: int) -> Tuple[float, float, float, float, float]:
    """Those of a push (p3/optimizer.h, RoundScalars) that makes the parameter's `updates`-th update."""
    lr, wd = group["lr"], group["weight_decay"]
    if type(lr) is not float:
        lr = number(lr)
    if type(wd) is not float:  # torch's own default is 0
        wd = float(wd) if type(wd) is int else number(wd)
    if "lr_decay" in group:
        lr /= 1 + (updates - 1) * group["lr_decay"]
    return lr, wd, rescale, float(updates), 1.0


def scalars_of_apart(group: Dict[str, Any], rescale: float) -> Tuple[float, float, float, float, float]:
    """The same with staleness, where the servers count the updates of all workers (`update_count.h` in src/server)."""
    lr, decay = number(group["lr"]), number(group.get("lr_decay", 0.0))
    return lr, number(group["weight_decay"]), rescale, 0.0, decay


def fields_read(group: Dict[str, Any]) -> Tuple[Any, ...]:
    """What describe() may read of a group, to see whether it has changed: cheaper than to describe it anew."""
    return tuple(
        tuple(value) if isinstance(value, list) else value
        for name, value in group.items()
        if name not in ("params", "lr", "weight_decay")
    )


def change_of(description: Dict[str, Any], before: Fields, now: Fields) -> str:
    """"momentum 0.9 became 0.85": of the fields that rounds go by, None being those of the description."""
    announced = values(description)
    pairs = zip(FIELDS[description["name"]], before or announced, now or announced)
    return ", ".join("%s %g became %g" % (name, one, other) for name, one, other in pairs if one != other)


def unread_states(description: Dict[str, Any], now: Fields) -> Tuple[str, ...]:
    """What the servers keep by the description, and a rule with the numbers of now does not read or begin."""
    if now is None:
        return ()
    read = state_names(with_values(description, now))
    return tuple(name for name in state_names(description) if name not in read)


def state_of(description: Dict[str, Any]) -> State:
    return State(tuple(state_names(description)), counts=description["name"] != "torch_sgd")


def _sgd(group):
    fields = {name: group[name] for name in ("momentum", "dampening")}
    return dict(fields, name="torch_sgd", nesterov=bool(group["nesterov"]))


def _adam(group, decoupled=False):
    beta1, beta2 = group["betas"]
    decoupled = bool(group.get("decoupled_weight_decay", decoupled))
    numbers = {"beta1": beta1, "beta2": beta2, "epsilon": group["eps"]}
    return dict(numbers, name="torch_adam", amsgrad=bool(group["amsgrad"]), decoupled=decoupled)


def _adagrad(group):
    initial = group.get("initial_accumulator_value", 0.0)
    return {"name": "torch_adagrad", "epsilon": group["eps"], "initial_accumulator_value": initial}


def _rmsprop(group):
    numbers = {"alpha": group["alpha"], "epsilon": group["eps"], "momentum": group["momentum"]}
    return dict(numbers, name="torch_rmsprop", centered=bool(group["centered"]))


_RULES = {
    torch.optim.SGD: _sgd,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: lambda group: _adam(group, decoupled=True),
    torch.optim.Adagrad: _adagrad,
    torch.optim.RMSprop: _rmsprop,
}
