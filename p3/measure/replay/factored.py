"""A replay whose fully connected layers are real: `python -m p3.replay --factors auto --batch 32 --optimizer sgd`.

The convolutions in front of them stay emulated. Behind them Gluon's nn.Dense computes forward and backward passes of a
batch on this machine, as fast as that is, and its weights' gradients leave by the route that p3.factors is given. The
three layers have the proportions of the model's, and so about its share of the bytes.

At the end the convolutions' weights are compared as ever; that the others are the same on all workers, and have been
trained, is told by a digest.
"""

import functools
import math
from typing import List, NamedTuple, Tuple, Union

import p3
from p3.measure.replay import models
from p3.measure.replay.mxnet_replay import Replay
from p3.measure.workers.lines import digest
from p3.placement import Placement
from p3.frontend.factors import Rule
from p3.plan.factor_shape import FactorShape
from p3.plan.key_plan import SliceSize

_FULLY_CONNECTED = 3  # layers, the last ones
_SCALE = 1e-6  # of the loss, so that weights stay small at the replay's learning rate


class Dense(NamedTuple):
    outputs: int
    inputs: int


def split(model: models.Model) -> Tuple[models.Model, List[Dense]]:
    """The emulated part of VGG-19, and its fully connected layers: each side of a weight is scaled alike."""
    if model.name != "vgg19":
        raise ValueError(f"fully connected layers are real in vgg19 only, not in {model.name}")
    side = math.sqrt(model.size)
    widths = [max(2, round(width * side)) for width in (25088, 4096, 4096, 1000)]
    convolutions = model._replace(layers=model.layers[:-_FULLY_CONNECTED])
    return convolutions, [Dense(outputs, inputs) for inputs, outputs in zip(widths, widths[1:])]


def sent_by_a_card(
    model: models.Model, hosts: int, slice_elements: Union[int, str], batch: int, route: str, dense_bytes
) -> float:
    """In one iteration, of hosts with one worker and one server each. `dense_bytes` tells it of a model whose tensors
    travel as they are."""
    rule = Rule(Placement.one_of_each(hosts), SliceSize(slice_elements, hosts))
    convolutions, layers = split(model)
    plain = [models.Layer("biases", tuple(models.Tensor("bias", (layer.outputs,)) for layer in layers), 0, 0)]
    total = 0.0
    for layer in layers:
        shape = FactorShape(batch, layer.outputs, layer.inputs)
        if rule.why_dense(route, shape):
            plain.append(models.Layer("dense", (models.Tensor("weight", tuple(layer)),), 0, 0))
            continue
        total += rule.placement.busiest(rule.plan(shape, as_factors=True))
    return total + dense_bytes(convolutions._replace(layers=(*convolutions.layers, *plain)))


class FactoredReplay(Replay):
    def __init__(self, mx, store: str, model: models.Model, route: str, batch: int, release: str = "layer") -> None:
        convolutions, layers = split(model)
        super().__init__(mx, store, convolutions, "sgd", release)
        nn = mx.gluon.nn
        mx.random.seed(1)  # the same first weights on every worker
        self._net = nn.HybridSequential(prefix="")
        for number, layer in enumerate(layers):
            activation = "relu" if number < len(layers) - 1 else None
            self._net.add(nn.Dense(layer.outputs, in_units=layer.inputs, activation=activation))
        self._net.initialize(mx.init.Xavier())
        p3.factors(self._net, route=route)
        mx.random.seed(100 + self.rank)
        self._x = mx.nd.random.uniform(shape=(batch, layers[0].inputs))
        self._x.attach_grad()
        self._target = mx.nd.random.normal(shape=(batch, layers[-1].outputs))
        first = len(self._weights)
        self._dense = [[(first + 2 * number, block.weight), (first + 2 * number + 1, block.bias)]
                       for number, block in enumerate(self._net)]  # fmt: skip
        self._first = {parameter: parameter.data().copy() for pair in self._dense for _, parameter in pair}
        for key, parameter in (one for pair in self._dense for one in pair):
            self._kv.broadcast(key, parameter.data(), out=parameter.data())
        mx.nd.waitall()
        self._kv._barrier()

    def iterate(self, model, compute_s, clock) -> List[float]:
        mx, convolutions = self._mx, model.layers[:-_FULLY_CONNECTED]
        stalls = []
        for number, layer in enumerate(convolutions):
            stalls.append(clock.stall(functools.partial(self.wait_for_weights, number)))
            clock.compute(layer.forward * compute_s)
        with mx.autograd.record():
            y = self._x
            for block, pair in zip(self._net, self._dense):
                stalls.append(clock.stall(functools.partial(self._wait_for, pair)))
                y = block(y)
            loss = (y * self._target).sum() * _SCALE
        loss.backward()
        for pair in reversed(self._dense):
            for key, parameter in pair:
                self._kv.pushpull(key, parameter.list_grad(), out=parameter.list_data(), priority=-key)
        self._x.grad.wait_to_read()
        clock.hold_up()
        for number, layer in reversed(list(enumerate(convolutions))):
            self.make_gradients(number)
            clock.compute(layer.backward * compute_s)
            self.push_gradients(number)
        self.finish_iteration()
        return stalls

    def _wait_for(self, pair) -> None:
        for _, parameter in pair:
            parameter.data().wait_to_read()

    def wrong_keys(self) -> List[int]:
        wrong = super().wrong_keys()
        values = [(key, parameter.data().asnumpy(), self._first[parameter].asnumpy())
                  for pair in self._dense for key, parameter in pair]  # fmt: skip
        self.digest = digest(value for _, value, _ in values)
        return wrong + [key for key, value, first in values if (value == first).all() or not abs(value).max() < 1e3]
