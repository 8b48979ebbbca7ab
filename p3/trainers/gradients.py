"""How a trainer's optimizers become P3's, and who clips their gradients: the one place that knows how P3 does that.

Trainers clip between backward() and step(), by calls that name parameters. So their optimizers are synchronous today:
step() waits for the mean gradients, and clipping brings them before.
"""

from __future__ import annotations

import contextlib
from typing import Any, Iterable, Iterator, List, Sequence

import torch

import p3.torch


def distribute(optimizer: torch.optim.Optimizer, models: Iterable[torch.nn.Module]) -> None:
    """Has P3 train its parameters, on every worker at the same point. ValueError if the models lack one of them."""
    own = set(parameters_of(optimizer))
    trained = [model for model in models if not own.isdisjoint(model.parameters())]
    p3.torch.DistributedOptimizer(optimizer, trained, synchronous=True)


def has_unknown(optimizer: Any, models: Iterable[torch.nn.Module]) -> bool:
    """Whether none of the models has some parameter of the optimizer."""
    known = {parameter for model in models for parameter in model.parameters()}
    return not known.issuperset(parameters_of(optimizer))


def is_distributed(optimizer: Any) -> bool:
    """Whether it is P3's already."""
    return hasattr(optimizer, "_p3")


def clip_norm(optimizers: Iterable[Any], parameters: Sequence[torch.Tensor], norm: float, kind: float) -> torch.Tensor:
    """torch's clip_grad_norm_ on the mean gradients; the norm before. `optimizers`: those that train the parameters."""
    trained_by = training(optimizers, parameters)
    _require_trained(parameters, trained_by)
    bring_means(trained_by)
    return torch.nn.utils.clip_grad_norm_(parameters, norm, norm_type=kind)


def clip_value(optimizers: Iterable[Any], parameters: Sequence[torch.Tensor], value: float) -> None:
    """torch's clip_grad_value_ on the mean gradients."""
    bring_means(training(optimizers, parameters))
    torch.nn.utils.clip_grad_value_(parameters, value)


def bring_means(optimizers: Iterable[Any]) -> None:
    """Waits until the gradients of these optimizers are the mean ones, for who looks at them before step()."""
    for optimizer in optimizers:
        optimizer.synchronize()


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


def training(optimizers: Iterable[Any], parameters: Iterable[torch.Tensor]) -> List[Any]:
    """Those of the optimizers that train any of the parameters."""
    wanted = set(parameters)
    return [one for one in optimizers if not wanted.isdisjoint(parameters_of(one))]


def parameters_of(optimizer: Any) -> Iterable[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
