"""The time of the GPU that a replay stands for; and computations of changing length, the same in the simulator."""

import random
import time
from typing import Iterator

# A shorter wait is no stall: reading the few weights of a layer that are there already takes up to 50 us after a sleep.
READY_S = 100e-6


class Clock:
    """A GPU's time: each step ends when it follows from the steps before, so that late wake-ups do not add up."""

    def __init__(self) -> None:
        self._due = self._woke = time.monotonic()

    def compute(self, seconds: float) -> None:
        self._due += seconds
        left = self._due - time.monotonic()
        if left > 0:
            time.sleep(left)
        self._woke = time.monotonic()

    def hold_up(self) -> float:
        """How long the caller has done something else since compute(). What is due next is put off by that."""
        late = time.monotonic() - max(self._due, self._woke)
        if late < READY_S:
            return 0.0
        self._due += late
        return late

    def stall(self, wait) -> float:
        """Calls `wait`, and returns for how long it has held up what is due next."""
        start = time.monotonic()
        wait()
        end = time.monotonic()
        if end - start < READY_S:
            return 0.0
        self._due = max(self._due, end)
        return end - start


def factors(jitter: float, seed: int, rank: int) -> Iterator[float]:
    """How much longer or shorter each iteration computes: log-normal with a mean of 1, the same in every run."""
    generator = random.Random(f"{seed}/{rank}")
    while True:
        yield generator.lognormvariate(-jitter * jitter / 2, jitter) if jitter else 1.0
