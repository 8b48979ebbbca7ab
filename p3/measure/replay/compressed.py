"""Replays with compressed gradients: `python -m p3.replay --dgc 0.001 --optimizer sgd`, or `--compression 2bit`."""

import os

import numpy as np

from p3 import codecs
from p3.measure._kernels import NativeCodec
from p3.plan import planner
from p3.plan.key_plan import Axes, SliceSize
from p3.measure.replay import models
from p3.measure.replay.dgc_reference import Dgc, slices_of, take_steps
from p3.measure.replay.mxnet_replay import Replay
from p3.measure.replay.probes import random_numbers, random_parts
from p3.measure.workers.lines import digest
from p3.settings import Settings
from p3.worker import session as sessions

MOMENTUM = 0.9
_MAGNITUDE = 0.5


class CompressedReplay(Replay):
    """With deep gradient compression, where what leaves depends on the values: so gradients are normally distributed,
    other ones for each worker, key and iteration. Of these, workers choose their elements independently, which makes
    what comes back as large as it can be. Real gradients have more in common.

    At the end each worker compares the first slice of every key, to the bit, with what NumPy makes of all workers'
    gradients; that the rest is the same on all of them is told by a digest.
    """

    def __init__(self, mx, store: str, model: models.Model, ratio: float, release: str = "layer") -> None:
        self._ratio, self._option = ratio, {"type": "dgc", "ratio": ratio}
        self._pool = random_numbers()
        self._pool_array = mx.nd.array(self._pool)
        super().__init__(mx, store, model, "sgd", release)

    def make_gradients(self, layer: int) -> None:
        for key in self._keys[layer]:
            flat = self._gradients[key].reshape(-1)
            for part, of_pool in random_parts(flat.size, key, self.iterations, self.rank):
                flat[part] = self._pool_array[of_pool]

    def wrong_keys(self):
        slice_size = _slice_size()
        values = [weight.asnumpy().ravel() for weight in self._weights]
        self.digest = digest(values)
        firsts = enumerate(value[: slice_size.of(value.size)] for value in values)
        return [key for key, first in firsts if not np.array_equal(first, self._expected(key, first.size))]

    def _expected(self, key: int, elements: int):
        """The first elements of the key's weight, no more than a slice, after all iterations so far."""
        weight, momentum = np.zeros(elements, "float32"), np.zeros(elements, "float32")
        takes_steps = planner.axes(self._weights[key].shape, "float32", {"compression": self._option}).takes_steps
        workers = [Dgc(elements, elements, MOMENTUM, ratio=self._ratio) for _ in range(self.num_workers)]
        for iteration in range(self.iterations):
            gradients = [self._gradient(key, iteration, rank, elements) for rank in range(self.num_workers)]
            if takes_steps:
                sent = [worker(own, 1 + iteration, 1.0) for worker, own in zip(workers, gradients)]
                weight = take_steps(weight, sent, 1.0)
            else:  # the servers' SGD
                momentum = np.float32(MOMENTUM) * momentum - sum(gradients[1:], gradients[0])
                weight = weight + momentum
        return weight

    def _gradient(self, key: int, iteration: int, rank: int, elements: int):
        return np.concatenate([self._pool[of_pool] for _, of_pool in random_parts(elements, key, iteration, rank)])

    def _choose_updates(self, optimizer) -> str:
        self._kv.set_gradient_compression(self._option)
        self._kv.set_optimizer(self._mx.optimizer.SGD(learning_rate=1.0, momentum=MOMENTUM, wd=0.0, rescale_grad=1.0))
        return "server"


def _slice_size() -> SliceSize:
    settings = Settings.from_env(os.environ)
    return SliceSize(settings.slice_elements, settings.num_servers or 1)


class EncodedReplay(Replay):
    """With any other codec. Every element is +1/2 or -1/2, with a sign that changes with worker, key and iteration, and
    from each element to the next. At the end every weight must be what the codec makes of them, which it does here once
    more; but for rounding, as the servers sum in an order of their own. A round that lacks is more than that. Where the
    workers of a machine add up what they have, all but the one who pushes for them have zeros.
    """

    def __init__(self, mx, store: str, model: models.Model, kind: str, release: str = "layer") -> None:
        self._compression = {"type": kind}
        super().__init__(mx, store, model, "sgd", release)
        placement, axes = sessions.current().placement, Axes(codec=codecs.of(self._compression).complete())
        self._pushers = [rank for rank in range(self.num_workers) if placement.pushed_by(rank, axes)]

    def make_gradients(self, layer: int) -> None:
        pushes = self.rank in self._pushers
        for key in self._keys[layer]:
            flat, value = self._gradients[key].reshape(-1), _signed(key, self.iterations, self.rank) * pushes
            flat[::2] = value
            if flat.size > 1:
                flat[1::2] = -value

    def wrong_keys(self):
        slice_size, weights = _slice_size(), (weight.asnumpy() for weight in self._weights)  # one at a time
        return [key for key, one in enumerate(weights) if not self.is_right(key, one, slice_size.of(one.size))]

    def is_right(self, key: int, weight, slice_elements: int) -> bool:
        values, expected = weight.ravel(), {}
        is_encoded = planner.axes(weight.shape, "float32", {"compression": self._compression}).codec
        for begin, end in slices_of(values.size, slice_elements):
            if end - begin not in expected:
                expected[end - begin] = self._expected(key, end - begin, is_encoded)
            sign = 1 - 2 * (begin % 2)  # of its first element; all codecs treat both alike
            if not np.allclose(values[begin:end], sign * expected[end - begin], rtol=0, atol=1e-3):
                return False
        return True

    def _expected(self, key: int, elements: int, is_encoded: bool):
        """A slice of so many elements, the first of which is at an even place of its key."""
        codec = NativeCodec(self._compression)
        residuals = [np.zeros(elements, "float32") if codec.residuals else None for _ in self._pushers]
        payload, total = np.empty(codec.bytes(elements), "uint8"), np.zeros(elements, "float32")
        gradient = np.empty(elements, "float32")
        for iteration in range(self.iterations):
            for rank, residual in zip(self._pushers, residuals):
                gradient[::2] = _signed(key, iteration, rank)
                gradient[1::2] = -gradient[0]
                if is_encoded:
                    codec.encode(gradient, residual, payload)
                    codec.add_to_sum(total, payload)
                else:
                    total += gradient
        return -total

    def _choose_updates(self, optimizer: str) -> str:
        self._kv.set_gradient_compression(self._compression)
        return super()._choose_updates(optimizer)


def _signed(key: int, iteration: int, rank: int) -> float:
    """Irregular, so that no round can be taken for another."""
    return _MAGNITUDE * (1 - 2 * (bin(key * 1_000_003 ^ iteration * 7919 ^ rank * 104_729).count("1") % 2))
