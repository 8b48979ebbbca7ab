"""p3.torch.factors(model): nn.Linear layers whose gradients leave as factors (p3/frontend/factors.py).

The layer's own product takes the place of torch's, and hands out its factors as the first elements of an array of the
gradient's shape, so that autograd, hooks and rounds stay as they are. FactoredParameter takes them from there.

Threads: forward passes run on the script's; backward passes, one at a time, on autograd's.
"""

from __future__ import annotations

import logging
from typing import Any, List, Optional

import torch

from p3.frontend.factors import FactoredLayer, checked
from p3.plan import choices, combinations
from p3.plan.choices import Choice
from p3.torch.parameters.arrays import as_numpy
from p3.torch.parameters.parameter import Parameter
from p3.torch.start import job

log = logging.getLogger("p3.torch")


def factors(model: torch.nn.Module, batch_size: Optional[int] = None, route: str = "auto") -> torch.nn.Module:
    """Has gradients of the nn.Linear layers in `model` leave as sufficient factors, where that takes fewer bytes.

    Before DistributedOptimizer, on every worker. `batch_size`: rows of a layer's input (all its dimensions but the
    last); by default those of the first forward pass in training. Shorter batches are padded, larger ones are an error.
    `route`: "auto" takes factors where the job's busiest network card then carries fewer bytes, or a strategy says so;
    "factors" wherever they are no larger than the gradient; "dense" nowhere.

    Updates are the same, but for the order in which float32 is added up. Between backward() and step() the gradient of
    such a weight is none. A layer that runs more than once in a step is an error, as no_sync() is. Weights that several
    layers share, other types than float32 and other devices than the CPU stay dense; a log line says so.
    """
    checked(batch_size, route)
    session = job.current()
    owners = {}
    for module in model.modules():
        for tensor in module.parameters(recurse=False):
            owners.setdefault(tensor, []).append(module)
    for name, module in model.named_modules():
        if type(module) not in (torch.nn.Linear, FactoredLinear):  # that of an optimizer before decides anew
            continue
        name = "%s.weight" % name if name else "weight"
        why_not = _why_not(module.weight, len(owners[module.weight]))
        if why_not:
            log.info("%s stays dense: %s", name, why_not)
            continue
        layer = module.weight._p3_layer = _Layer(session, name, module.out_features, batch_size, route)
        layer.follow(session.strategy(), name)
        module.__class__ = FactoredLinear
        if batch_size is not None:
            layer.decide(batch_size, module.in_features)
    return model


def _why_not(weight: torch.Tensor, owners: int) -> str:
    if owners > 1:
        return "several layers share it"
    if weight.dtype != torch.float32 or weight.device.type != "cpu" or not weight.is_contiguous():
        return "its weight is no contiguous float32 tensor on the CPU"
    return ""


class _Layer(FactoredLayer, job.Held):
    """One nn.Linear. Noted on its weight, of which a copy has none."""


class FactoredLinear(torch.nn.Linear):
    """What factors() makes of an nn.Linear. A copy of it is one again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layer = getattr(self.weight, "_p3_layer", None)
        is_recorded = torch.is_grad_enabled() and self.weight.requires_grad
        if layer is None or not is_recorded:
            return super().forward(x)
        rows = x.numel() // self.in_features
        if layer.shape is None:
            why_not = "autocast is on" if torch.is_autocast_enabled("cpu") else ""
            layer.decide(rows, self.in_features, why_not=why_not)
        layer.note_use(rows)
        if not layer.has_factors:
            return super().forward(x)
        product = _Product.apply(x, self.weight, layer)
        return product if self.bias is None else product + self.bias


class _Product(torch.autograd.Function):
    """x W^T, whose gradient of W begins with the factors; what is behind them is no number. In float32, under autocast
    as well."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, x, weight, layer):
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return torch.nn.functional.linear(x, weight)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        if weight.grad is not None:
            combinations.require("parameter %s" % ctx.layer.name, choices.FACTORS, choices.ADDED_UP)
        dx = dy.matmul(weight) if ctx.needs_input_grad[0] else None
        gradient = torch.empty_like(weight)
        gradient[-1, -1] = torch.nan
        shape = ctx.layer.shape
        rows = gradient.view(-1)[: shape.elements].view(shape.rows, shape.width)
        dy, x = dy.reshape(-1, shape.outputs)[: shape.rows], x.reshape(-1, shape.inputs)[: shape.rows]
        torch.cat((dy, x), dim=1, out=rows[: len(x)])
        rows[len(x) :] = 0
        return dx, gradient, None


class FactoredParameter(Parameter):
    """The weight of such a layer. Its key brings the first value, and if the layer has factors that key has no rounds:
    another one gathers them."""

    def __init__(self, session, store, name, tensor, group, update_here, staleness, options) -> None:
        self._layer = tensor._p3_layer
        self._factors_key: Any = None
        super().__init__(session, store, name, tensor, group, update_here, staleness, options)

    def leave(self) -> None:
        super().leave()
        if getattr(self.tensor, "_p3_layer", None) is self._layer:  # else factors() was called again meanwhile
            del self.tensor._p3_layer

    @property
    def state_key(self) -> Any:
        return self._round_key()

    @property
    def comes_back_compressed(self) -> bool:
        is_dense = self._layer.shape is not None and not self._layer.has_factors
        return is_dense and super().comes_back_compressed

    @property
    def kept(self) -> List[Choice]:
        return [] if self._layer.has_factors else super().kept

    def _round_key(self) -> Any:
        """Of its rounds; at the first one."""
        if self._factors_key is None:
            if self._layer.shape is None:
                raise ValueError(
                    "%s has had no forward pass yet, and its factors no shape: pass batch_size to p3.torch.factors"
                    % self.name
                )
            self._factors_key = self._layer.declare(self.key)
            if self._layer.has_factors:
                self._session.init(self._factors_key, None, self._array, self.priority)
                self.must_copy = True  # what lands is an update of what landed before
                self.takes_steps = False
        return self._factors_key if self._layer.has_factors else self.key

    def scale_gradient(self, factor: float) -> None:
        if self._round_key() is self.key:
            return super().scale_gradient(factor)
        shape = self._layer.shape
        factors = self.tensor.grad.view(-1)[: shape.elements].view(shape.rows, shape.width)
        factors[:, : shape.outputs].mul_(factor)  # one of the two, as the gradient is their product

    def _push(self, gradient, more):
        key = self._round_key()
        if key is self.key:
            return super()._push(gradient, more)
        self._layer.require_one_use(1)
        source = as_numpy(gradient.view(-1)[: self._layer.shape.elements])
        return self._session.pushpull(key, source, self._array, self.priority, *self._sent, more=more)

    def _skip(self, goes_on=True):
        self._layer.forget_uses()
        return self._session.skip(self._round_key(), self._array, self.priority, goes_on=goes_on)
