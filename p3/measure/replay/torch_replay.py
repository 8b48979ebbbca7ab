"""The replay in torch: modules whose forward and backward passes only take time, trained by P3 or by DDP.

Stores are those of p3/measure/workers/torch_store.py. Each is used as one uses it: an optimizer of torch's, one call of
forward, backward and step.

With late gradients the weights are inputs of a first layer, whose backward step comes last and has all their gradients.
"""

from typing import List, Optional

import torch
from torch import nn

from p3.measure.replay import models
from p3.measure.replay.probes import STRIDE, Probed, probe
from p3.measure.workers.lines import digest
from p3.measure.workers.torch_store import ALONE, clip_as_usual, distribute, is_p3, leave, staleness, weights


class TorchReplay(Probed):
    """The tensors of a model as parameters; numbered in forward order, from 0."""

    store_type = "torch"
    versions = {"torch": torch.__version__}

    def __init__(
        self, store: str, model: models.Model, release: str = "layer", max_norm: Optional[float] = None
    ) -> None:
        self._store, self.max_norm = store, max_norm
        self.elements = tuple(tensor.elements for tensor in model.tensors)
        self.updates = "server" if is_p3(store) and max_norm is None else "worker"
        self._may_be_apart = is_p3(store) and staleness(store) > 0
        is_late = release == "end"
        self.sets = 2 if self._may_be_apart else 1  # of gradients, in turn, as the last step's may still have to leave
        self._layers = _layers(model, self, is_late)
        self._net = nn.Sequential(*([_AllGradients(self._layers)] if is_late else []), *self._layers)
        self.torch_optimizer = torch.optim.SGD(self._net.parameters(), lr=1.0)
        self.rank, self.num_workers, self._net = distribute(store, self._net, self.torch_optimizer, max_norm)
        for group in self.torch_optimizer.param_groups:
            group["lr"] = 1.0 if store == ALONE else float(self.num_workers)  # of the mean: so whole numbers stay whole

    def iterate(self, model: models.Model, compute_s: float, clock) -> List[float]:
        """One step that computes for `compute_s`. How long each layer was held up."""
        stalls: List[float] = []
        for layer, of in zip(self._layers, model.layers):
            layer.plan(clock, of.forward * compute_s, of.backward * compute_s, stalls)
        self._net(torch.ones(1, requires_grad=True)).sum().backward()
        clip_as_usual(self._store, self._net, self.max_norm)
        self.torch_optimizer.step()
        self.torch_optimizer.zero_grad()
        self.iterations += 1
        return stalls

    def fill(self, key: int, gradient: torch.Tensor) -> torch.Tensor:
        gradient.view(-1)[::STRIDE] = probe(key, self.iterations) + self.rank
        return gradient

    def _sum(self, key: int, iteration: int) -> int:
        return probe(key, iteration) + self.rank if self._store == ALONE else super()._sum(key, iteration)

    def wrong_keys(self) -> List[int]:
        """Keys whose weights are not what all workers' gradients make of them."""
        values = self.last_weights()
        if self.max_norm is not None:
            self.digest = digest(values)
        return [key for key, value in enumerate(values) if not self.is_right(key, value.ravel())]

    def last_weights(self) -> List:
        """By key, as NumPy arrays. Waits for the last step."""
        if self._may_be_apart:
            self.torch_optimizer.join()
        return weights(self._net)

    def leave(self, is_right: bool) -> None:
        leave(is_right)


class _Emulated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layer, *_weights):
        ctx.layer = layer
        layer.stalls.append(layer.clock.hold_up())
        layer.clock.compute(layer.forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        layer = ctx.layer
        layer.clock.hold_up()  # hooks on gradients take the training thread's time
        gradients = layer.gradients[layer.replay.iterations % len(layer.gradients)]
        made = [layer.replay.fill(key, array).detach() for key, array in zip(layer.keys, gradients)]
        layer.clock.compute(layer.backward_s)
        if layer.is_late:
            layer.late_gradients, made = made, []
        return (gradient, None, *made)


class _Layer(nn.Module):
    def __init__(self, replay, keys, shapes, is_late) -> None:
        super().__init__()
        self.replay, self.keys, self.is_late = replay, keys, is_late
        # Made once, as making them takes time that the emulated computation has in it. Autograd takes what backward()
        # returns without a copy, if nobody else has that tensor; these are others, of the same memory.
        self.gradients = [[torch.zeros(shape) for shape in shapes] for _ in range(replay.sets)]
        for number, shape in enumerate(shapes):
            self.register_parameter("weight%d" % number, nn.Parameter(torch.zeros(shape)))

    def plan(self, clock, forward_s, backward_s, stalls) -> None:
        self.clock, self.forward_s, self.backward_s, self.stalls = clock, forward_s, backward_s, stalls

    def forward(self, x):
        return _Emulated.apply(x, self, *(() if self.is_late else self.parameters()))


class _LateGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layers, *_weights):
        ctx.layers = layers
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        made = [one for layer in ctx.layers for one in layer.late_gradients]
        for layer in ctx.layers:
            del layer.late_gradients  # as above: nobody else has them
        return (gradient, None, *made)


class _AllGradients(nn.Module):
    """Before the first layer: hands out the late gradients of all."""

    def __init__(self, layers) -> None:
        super().__init__()
        self._of = layers  # in a list: they are no part of this module

    def forward(self, x):
        weights = [weight for layer in self._of for weight in layer.parameters()]
        return _LateGradients.apply(x, self._of, *weights)


def _layers(model: models.Model, replay, is_late) -> List[_Layer]:
    layers, key = [], 0
    for layer in model.layers:
        shapes = [tensor.shape for tensor in layer.tensors]
        layers.append(_Layer(replay, range(key, key + len(shapes)), shapes, is_late))
        key += len(shapes)
    return layers
