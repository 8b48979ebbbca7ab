"""A replay with compressed gradients: `python -m p3.replay --compression 2bit --optimizer sgd`.

Every element is +1/2 or -1/2, with a sign that changes with worker, key and iteration. Every codec of gradients carries
these exactly with its standard options, so at the end every weight must be exactly what they add up to.
"""

from p3.measure.replay import models
from p3.measure.replay.mxnet_replay import Replay

MAGNITUDE = 0.5


class EncodedReplay(Replay):
    def __init__(self, mx, store: str, model: models.Model, kind: str, release: str = "layer") -> None:
        self._compression = {"type": kind}
        super().__init__(mx, store, model, "sgd", release)

    def make_gradients(self, layer: int) -> None:
        for key in self._keys[layer]:
            flat, value = self._gradients[key].reshape(-1), _value(key, self.iterations, self.rank)
            flat[::2] = value
            if flat.size > 1:
                flat[1::2] = -value

    def is_right(self, key: int, values) -> bool:
        rounds = ((iteration, rank) for iteration in range(self.iterations) for rank in range(self.num_workers))
        expected = -sum(_value(key, *one) for one in rounds)
        return bool((values[::2] == expected).all() and (values[1::2] == -expected).all())

    def _choose_updates(self, optimizer: str) -> str:
        self._kv.set_gradient_compression(self._compression)
        return super()._choose_updates(optimizer)


def _value(key: int, iteration: int, rank: int) -> float:
    """Irregular, so that no round can be taken for another."""
    return MAGNITUDE * (1 - 2 * (bin(key * 1_000_003 ^ iteration * 7919 ^ rank * 104_729).count("1") % 2))
