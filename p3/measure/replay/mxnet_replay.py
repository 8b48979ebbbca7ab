"""A replay's tensors in a store of MXNet's or P3's: of what every other kind of replay with MXNet changes a part."""

import functools
import time
from typing import Iterator, List

from p3.measure.replay import gpu_clock, models
from p3.measure.replay.gpu_clock import Clock
from p3.measure.replay.probes import STRIDE, Probed, probe
from p3.measure.workers.mxnet_store import meet
from p3.mxnet import hooks


class Replay(Probed):
    """The tensors of a model in a store. Keys are whole numbers in forward order, ascending from 0."""

    def __init__(self, mx, store: str, model: models.Model, optimizer: str, release: str = "layer") -> None:
        self._release = release
        self._mx, self.versions = mx, {"mxnet": mx.__version__}
        self._kv = mx.kv.create(store)
        self.rank, self.num_workers, self.store_type = self._kv.rank, self._kv.num_workers, self._kv.type
        self.updates = self._choose_updates(optimizer)
        self._mark_stall = getattr(self._kv, "mark_stall", None)  # for the trace of a store that keeps one
        self._keys = list(_keys_by_layer(model))
        shapes = [tensor.shape for tensor in model.tensors]
        self._weights = [mx.nd.zeros(shape) for shape in shapes]
        self._gradients = [mx.nd.zeros(shape) for shape in shapes]
        for key, weight in enumerate(self._weights):
            self._kv.broadcast(key, weight, out=weight)
        mx.nd.waitall()
        self._kv._barrier()

    def iterate(self, model: models.Model, compute_s: float, clock: Clock) -> List[float]:
        """A forward and a backward pass that compute for `compute_s`. How long each layer's weights were waited for."""
        stalls = []
        for number, layer in enumerate(model.layers):
            stalls.append(clock.stall(functools.partial(self.wait_for_weights, number)))
            clock.compute(layer.forward * compute_s)
        for number, layer in reversed(list(enumerate(model.layers))):
            self.make_gradients(number)
            clock.compute(layer.backward * compute_s)
            if self._release == "layer":
                self.push_gradients(number)
        if self._release == "end":
            for number in range(len(model.layers)):
                self.push_gradients(number)
        self.finish_iteration()
        return stalls

    def wait_for_weights(self, layer: int) -> None:
        for key in self._keys[layer]:
            begin_ns = time.monotonic_ns()
            self._weights[key].wait_to_read()
            end_ns = time.monotonic_ns()
            if self._mark_stall and end_ns - begin_ns >= gpu_clock.READY_S * 1e9:
                self._mark_stall(key, begin_ns, end_ns)

    def make_gradients(self, layer: int) -> None:
        """Queues this iteration's values of the layer's gradients; their zeros stay."""
        for key in self._keys[layer]:
            flat = self._gradients[key].reshape(-1)
            flat[::STRIDE] = probe(key, self.iterations) + self.rank

    def push_gradients(self, layer: int) -> None:
        """As Trainer does, but with priorities in forward order; Trainer's are alphabetical."""
        for key in self._keys[layer]:
            if self.updates == "worker":
                self._kv.pushpull(key, self._gradients[key], priority=-key)
            else:
                self._kv.pushpull(key, self._gradients[key], out=self._weights[key], priority=-key)

    def finish_iteration(self) -> None:
        """Where the workers update, Trainer queues the updates behind all pushes."""
        if self.updates == "worker":
            self._updater(list(range(len(self._weights))), self._gradients, self._weights)
        self.iterations += 1

    def wrong_keys(self) -> List[int]:
        """Keys whose weights are not exactly what all workers' gradients make of them."""
        return [key for key, value in enumerate(self.last_weights()) if not self.is_right(key, value.ravel())]

    def last_weights(self) -> Iterator:
        """By key, as NumPy arrays. Waits for the last round."""
        if hooks.may_be_apart(self.store_type):
            meet(self._mx, self._kv, self._weights)
        return (weight.asnumpy() for weight in self._weights)

    def _choose_updates(self, optimizer) -> str:
        """Where Trainer has a store's weights updated: on the servers if they can, else here. Before the first key."""
        if optimizer == "none":
            return "none"
        # A rate of 1 keeps the weights whole numbers.
        sgd = self._mx.optimizer.SGD(learning_rate=1.0, wd=0.0, rescale_grad=1.0)
        if self._kv.is_capable("optimizer"):
            self._kv.set_optimizer(sgd)
            return "server"
        self._updater = self._mx.optimizer.get_updater(sgd)
        return "worker"


def _keys_by_layer(model):
    key = 0
    for layer in model.layers:
        yield range(key, key + len(layer.tensors))
        key += len(layer.tensors)
