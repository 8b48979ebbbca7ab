"""The gradients of a replay, by which it can tell that every weight is what it must be."""

import functools
import math
from typing import Iterator, Optional, Tuple

import numpy as np

# Every so many elements of a gradient one is not zero: some in each slice, each time elsewhere in it.
STRIDE = 40009

# Of a weight whose gradients were clipped: some roundings of float32. One slice that the norm lacks makes more.
CLIPPED_TOLERANCE = 1e-5


def probe(key: int, iteration: int) -> int:
    """What worker 0 has there; each other worker has its rank added to that."""
    return 1 + (key + iteration) % 7


@functools.lru_cache(maxsize=None)
def norm_of_mean(elements: Tuple[int, ...], workers: int, iteration: int) -> float:
    """Of the mean of all workers' gradients, of all keys."""
    means = (probe(key, iteration) + (workers - 1) / 2 for key in range(len(elements)))
    return math.sqrt(sum(-(-size // STRIDE) * mean**2 for size, mean in zip(elements, means)))


# Random gradients, for what depends on their values: normally distributed, and other ones for each key, iteration and
# worker. Drawing them would take time, so each is a part of one pool, or several.
_POOL = 1_000_003


def random_numbers() -> np.ndarray:
    """The pool."""
    return np.random.RandomState(1).randn(_POOL).astype("float32")


def random_parts(elements: int, key: int, iteration: int, rank: int) -> Iterator[Tuple[slice, slice]]:
    """Of a gradient of so many elements: its parts, and where in the pool they are."""
    begin, place = 0, int(np.random.RandomState([key, iteration, rank]).randint(_POOL))
    while begin < elements:
        count = min(elements - begin, _POOL - place)
        yield slice(begin, begin + count), slice(place, place + count)
        begin, place = begin + count, 0


class Probed:
    """Of a worker that replays: knows what its weights must be.

    `updates`: "none" if a weight becomes the sum of the last iteration; else each sum is subtracted from it.
    `max_norm`: to which the mean gradients are clipped, by their global norm; `elements`: of each key, for that norm.
    """

    updates: str
    num_workers: int
    max_norm: Optional[float] = None
    elements: Tuple[int, ...] = ()
    iterations = 0  # that have ended
    digest = None  # of all weights, after wrong_keys(), where workers can only be compared by it

    def leave(self, is_right: bool) -> None:
        """After the last line was written."""

    def is_right(self, key: int, values) -> bool:
        """Whether a weight's elements, as one axis of a NumPy array, are exactly what all gradients make of them. With
        clipping, but for rounding."""
        if self.updates == "none":
            expected = self._sum(key, self.iterations - 1)
        else:
            expected = -sum(self._sum(key, one) * self._clipped_to(one) for one in range(self.iterations))
        probes = values[::STRIDE]
        elsewhere = values.any() if expected == 0 else (values != 0).sum() != len(probes)
        tolerance = 0 if self.max_norm is None else CLIPPED_TOLERANCE * abs(expected)
        return bool((abs(probes - expected) <= tolerance).all() and not elsewhere)

    def _clipped_to(self, iteration: int) -> float:
        """What is left of its gradients, as a share."""
        if self.max_norm is None:
            return 1
        return min(1.0, self.max_norm / norm_of_mean(self.elements, self.num_workers, iteration))

    def _sum(self, key: int, iteration: int) -> int:
        workers = self.num_workers
        return workers * probe(key, iteration) + workers * (workers - 1) // 2
