"""Replays with compressed gradients: `python -m p3.replay --dgc 0.001 --optimizer sgd`, or `--compression 2bit`."""

import hashlib
import os

import numpy as np

from p3.plan import key_plan, planner
from p3.measure.replay import models
from p3.measure.replay.dgc_reference import Dgc, take_steps
from p3.measure.replay.mxnet_replay import Replay
from p3.measure.replay.probes import random_numbers, random_parts
from p3.settings import Settings

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
        settings = Settings.from_env(os.environ)
        elements = key_plan.slice_elements(settings.slice_elements, settings.num_servers or 1)
        wrong, digest = [], hashlib.sha256()
        for key, weight in enumerate(self._weights):
            value = weight.asnumpy().ravel()
            digest.update(value)
            first = value[:elements]
            if not np.array_equal(first, self._expected(key, first.size)):
                wrong.append(key)
        self.digest = digest.hexdigest()
        return wrong

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


class EncodedReplay(Replay):
    """With any other codec. Every element is +1/2 or -1/2, with a sign that changes with worker, key and iteration.
    Every codec of gradients carries these exactly with its standard options, so at the end every weight must be exactly
    what they add up to.
    """

    def __init__(self, mx, store: str, model: models.Model, kind: str, release: str = "layer") -> None:
        self._compression = {"type": kind}
        super().__init__(mx, store, model, "sgd", release)

    def make_gradients(self, layer: int) -> None:
        for key in self._keys[layer]:
            flat, value = self._gradients[key].reshape(-1), _signed(key, self.iterations, self.rank)
            flat[::2] = value
            if flat.size > 1:
                flat[1::2] = -value

    def is_right(self, key: int, values) -> bool:
        rounds = ((iteration, rank) for iteration in range(self.iterations) for rank in range(self.num_workers))
        expected = -sum(_signed(key, *one) for one in rounds)
        return bool((values[::2] == expected).all() and (values[1::2] == -expected).all())

    def _choose_updates(self, optimizer: str) -> str:
        self._kv.set_gradient_compression(self._compression)
        return super()._choose_updates(optimizer)


def _signed(key: int, iteration: int, rank: int) -> float:
    """Irregular, so that no round can be taken for another."""
    return _MAGNITUDE * (1 - 2 * (bin(key * 1_000_003 ^ iteration * 7919 ^ rank * 104_729).count("1") % 2))
