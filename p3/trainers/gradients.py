"""How a trainer's optimizers become P3's, and who clips their gradients: the one place that knows how P3 does that.

Trainers clip between backward() and step(), by calls that name parameters. Where those are all parameters of one
optimizer that updates each by itself, and the norm is all that is wanted, nothing waits: the servers tell the norm
(DistributedOptimizer.clip_grad_norm_()). Whoever looks at a gradient in between waits for the mean ones, in that step.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any, Iterable, Iterator, List, Sequence

import torch

import p3.torch
from p3.torch.requirements import parameters_of


def distribute(optimizer: torch.optim.Optimizer, models: Iterable[torch.nn.Module]) -> None:
    """Has P3 train its parameters, on every worker at the same point. ValueError if the models lack one of them."""
    p3.torch.DistributedOptimizer(optimizer, of_models(optimizer, models), max_grad_norm=math.inf)
    optimizer._p3.act_as_ddp()


def of_models(optimizer: torch.optim.Optimizer, models: Iterable[torch.nn.Module]) -> List[torch.nn.Module]:
    """Those of which it has parameters."""
    own = set(parameters_of(optimizer))
    return [model for model in models if not own.isdisjoint(model.parameters())]


def has_unknown(optimizer: Any, models: Iterable[torch.nn.Module]) -> bool:
    """Whether none of the models has some parameter of the optimizer."""
    known = {parameter for model in models for parameter in model.parameters()}
    return not known.issuperset(parameters_of(optimizer))


def is_distributed(optimizer: Any) -> bool:
    """Whether it is P3's already."""
    return hasattr(optimizer, "_p3") or hasattr(optimizer, "_p3_local")


def _sharing(optimizers: Iterable[Any]) -> List[Any]:
    """Those whose gradients all workers share: not those with local steps, whose gradients are each worker's own."""
    return [one for one in optimizers if hasattr(one, "_p3")]


def watch(optimizers: Iterable[Any]) -> None:
    """Behind each backward pass: from here to step() whoever looks at a gradient, or changes it, has the mean one."""
    for optimizer in _sharing(optimizers):
        optimizer._p3.watch_gradients()


@contextlib.contextmanager
def loads_apart(optimizers: Iterable[Any]) -> Iterator[None]:
    """Within it models may be loaded on some workers alone; behind it all call each optimizer's broadcast()."""
    with contextlib.ExitStack() as stack:
        for optimizer in _sharing(optimizers):
            stack.enter_context(optimizer._p3.loads_apart())
        yield


def renew_weights(optimizers: Iterable[Any]) -> None:
    """Models and states have what the last step has made of them: they can go to another device."""
    for optimizer in _sharing(optimizers):
        optimizer._p3.renew_weights()


def clip_norm(optimizers: Iterable[Any], parameters: Sequence[torch.Tensor], norm: float, kind: float) -> torch.Tensor:
    """torch's clip_grad_norm_ on the mean gradients; the norm before. `optimizers`: those that train the parameters."""
    trained_by = _sharing(training(optimizers, parameters))
    if not trained_by:
        return torch.nn.utils.clip_grad_norm_(parameters, norm, norm_type=kind)
    _require_trained(parameters, trained_by)
    if not _can_servers_tell(trained_by, parameters, norm, kind):
        _show(trained_by)
        return torch.nn.utils.clip_grad_norm_(parameters, norm, norm_type=kind)
    told = trained_by[0].clip_grad_norm_(norm, kind)
    watch(trained_by)
    return told


def clip_value(optimizers: Iterable[Any], parameters: Sequence[torch.Tensor], value: float) -> None:
    """torch's clip_grad_value_ on the mean gradients."""
    _show(training(optimizers, parameters))
    torch.nn.utils.clip_grad_value_(parameters, value)


def _show(optimizers: Iterable[Any]) -> None:
    for optimizer in _sharing(optimizers):
        optimizer._p3.show_gradients()


def _can_servers_tell(optimizers: Sequence[Any], parameters: Iterable[torch.Tensor], norm: Any, kind: Any) -> bool:
    """Whether clipping is by a norm of theirs: of the sums of all parameters of one optimizer."""
    if len(optimizers) != 1 or kind not in (2, math.inf) or not (isinstance(norm, (int, float)) and norm > 0):
        return False
    trained = {parameter for parameter in parameters_of(optimizers[0]) if parameter.requires_grad}
    return trained.issubset(parameters) and optimizers[0]._p3.has_sums


@contextlib.contextmanager
def no_sync(optimizers: Iterable[Any]) -> Iterator[None]:
    """Within it, backward passes add up gradients and send nothing."""
    with contextlib.ExitStack() as stack:
        for optimizer in _sharing(optimizers):
            stack.enter_context(optimizer.no_sync())
        yield


@contextlib.contextmanager
def joining(optimizers: Iterable[Any]) -> Iterator[None]:
    """Within it workers that have run out of batches follow the others' steps; at its end this one has, too."""
    with contextlib.ExitStack() as stack:
        for optimizer in optimizers:
            stack.enter_context(optimizer._p3.joining())
        yield
        for optimizer in optimizers:
            optimizer.join()


def _require_trained(parameters: Iterable[torch.Tensor], optimizers: Iterable[Any]) -> None:
    """ValueError if one has a gradient, and is no optimizer's: that is this worker's alone; so would be the norm."""
    trained = {parameter for optimizer in optimizers for parameter in parameters_of(optimizer)}
    strays = sum(parameter not in trained and parameter.grad is not None for parameter in parameters)
    if strays:
        raise ValueError("%d of the parameters to clip have gradients, and no optimizer trains them: switch off their "
                         "requires_grad, or clip the optimizer's parameters alone" % strays)  # fmt: skip


def training(optimizers: Iterable[Any], parameters: Iterable[torch.Tensor]) -> List[Any]:
    """Those of the optimizers that train any of the parameters."""
    wanted = set(parameters)
    return [one for one in optimizers if not wanted.isdisjoint(parameters_of(one))]
