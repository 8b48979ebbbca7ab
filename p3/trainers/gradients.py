"""How a trainer's optimizers become P3's, and who clips their gradients: the one place that knows how P3 does that.

Trainers clip between backward() and step(), by calls that name parameters. Where those are all parameters of one
optimizer that updates each by itself, nothing waits (DistributedOptimizer.clip_grad_norm_()). Whoever wants to see the
mean gradients, or to clip them otherwise, makes the optimizer synchronous from then on.
"""

from __future__ import annotations

import contextlib
import logging
import math
from typing import Any, Iterable, Iterator, List, Sequence, Set

import torch

import p3.torch
from p3.torch.rounds.synchronous import Synchronous

log = logging.getLogger("p3.torch")



def distribute(optimizer: torch.optim.Optimizer, models: Iterable[torch.nn.Module]) -> None:
    """Has P3 train its parameters, on every worker at the same point. ValueError if the models lack one of them."""
    own = set(parameters_of(optimizer))
    trained = [model for model in models if not own.isdisjoint(model.parameters())]
    p3.torch.DistributedOptimizer(optimizer, trained, synchronous=True)  # see docs/trainers.md


def has_unknown(optimizer: Any, models: Iterable[torch.nn.Module]) -> bool:
    """Whether none of the models has some parameter of the optimizer."""
    known = {parameter for model in models for parameter in model.parameters()}
    return not known.issuperset(parameters_of(optimizer))


def is_distributed(optimizer: Any) -> bool:
    """Whether it is P3's already."""
    return hasattr(optimizer, "_p3")


def is_synchronous(optimizer: Any) -> bool:
    """Whether its steps wait for the mean gradients."""
    return isinstance(optimizer._p3, Synchronous)


def clip_norm(optimizers: Iterable[Any], parameters: Sequence[torch.Tensor], norm: float, kind: float) -> torch.Tensor:
    """torch's clip_grad_norm_ on the mean gradients; the norm before. `optimizers`: those that train the parameters."""
    trained_by = training(optimizers, parameters)
    _require_trained(parameters, trained_by)
    if norm > 0 and kind in (2, math.inf) and len(trained_by) == 1 and not is_synchronous(trained_by[0]):
        if _that_learn(parameters) == _that_learn(parameters_of(trained_by[0])):
            return trained_by[0].clip_grad_norm_(norm, kind)
    bring_means(trained_by)
    return torch.nn.utils.clip_grad_norm_(parameters, norm, norm_type=kind)


def clip_value(optimizers: Iterable[Any], parameters: Sequence[torch.Tensor], value: float) -> None:
    """torch's clip_grad_value_ on the mean gradients."""
    bring_means(training(optimizers, parameters))
    torch.nn.utils.clip_grad_value_(parameters, value)


def bring_means(optimizers: Iterable[Any]) -> None:
    """Waits until the gradients of these optimizers are the mean ones, for who looks at them before step(). On every
    worker at the same point."""
    for optimizer in optimizers:
        if is_synchronous(optimizer):
            optimizer.synchronize()
        else:
            _make_synchronous(optimizer)


def _make_synchronous(optimizer: Any) -> None:
    """From this step on: what has left of it leaves once more, and is clipped once more if it was."""
    max_norm, kind = optimizer._p3.clips_by
    if p3.torch.rank() == 0:
        log.info("%s waits for the mean gradients in each step from now on, as something other than the global norm of "
                 "all its gradients is wanted", type(optimizer).__name__)  # fmt: skip
    p3.torch.DistributedOptimizer(optimizer, optimizer._p3.models, synchronous=True)
    optimizer.synchronize()
    if max_norm < math.inf:
        optimizer.clip_grad_norm_(max_norm, kind)


@contextlib.contextmanager
def no_sync(optimizers: Iterable[Any]) -> Iterator[None]:
    """Within it, backward passes add up gradients and send nothing."""
    with contextlib.ExitStack() as stack:
        for optimizer in optimizers:
            stack.enter_context(optimizer.no_sync())
        yield


def _require_trained(parameters: Iterable[torch.Tensor], optimizers: Iterable[Any]) -> None:
    """ValueError if one has a gradient, and is no optimizer's: that is this worker's alone; so would be the norm."""
    trained = {parameter for optimizer in optimizers for parameter in parameters_of(optimizer)}
    strays = sum(parameter.grad is not None and parameter not in trained for parameter in parameters)
    if strays:
        raise ValueError("%d of the parameters to clip have gradients, and no optimizer trains them: switch off their "
                         "requires_grad, or clip the optimizer's parameters alone" % strays)  # fmt: skip


def _that_learn(parameters: Iterable[torch.Tensor]) -> Set[torch.Tensor]:
    return {parameter for parameter in parameters if parameter.requires_grad}


def training(optimizers: Iterable[Any], parameters: Iterable[torch.Tensor]) -> List[Any]:
    """Those of the optimizers that train any of the parameters."""
    wanted = set(parameters)
    return [one for one in optimizers if not wanted.isdisjoint(parameters_of(one))]


def parameters_of(optimizer: Any) -> Iterable[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
