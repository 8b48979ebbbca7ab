"""The gradients of a replay, by which it can tell that every weight is what it must be."""

# Every so many elements of a gradient one is not zero: some in each slice, each time elsewhere in it.
STRIDE = 40009


def probe(key: int, iteration: int) -> int:
    """What worker 0 has there; each other worker has its rank added to that."""
    return 1 + (key + iteration) % 7


class Probed:
    """Of a worker that replays: knows what its weights must be.

    `updates`: "none" if a weight becomes the sum of the last iteration; else each sum is subtracted from it.
    """

    updates: str
    num_workers: int
    iterations = 0  # that have ended
    digest = None  # of all weights, after wrong_keys(), where workers can only be compared by it

    def leave(self, is_right: bool) -> None:
        """After the last line was written."""

    def is_right(self, key: int, values) -> bool:
        """Whether a weight's elements, as one axis of a NumPy array, are exactly what all gradients make of them."""
        if self.updates == "none":
            expected = self._sum(key, self.iterations - 1)
        else:
            expected = -sum(self._sum(key, iteration) for iteration in range(self.iterations))
        probes = values[::STRIDE]
        elsewhere = values.any() if expected == 0 else (values != 0).sum() != len(probes)
        return bool((probes == expected).all() and not elsewhere)

    def _sum(self, key: int, iteration: int) -> int:
        workers = self.num_workers
        return workers * probe(key, iteration) + workers * (workers - 1) // 2
