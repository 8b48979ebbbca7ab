"""Computations of changing length, in the lab and in the simulator."""

from __future__ import annotations

import random
from typing import Iterator


def factors(jitter: float, seed: int, rank: int) -> Iterator[float]:
    """How much longer or shorter each iteration computes: log-normal with a mean of 1, the same in every run."""
    generator = random.Random(f"{seed}/{rank}")
    while True:
        yield generator.lognormvariate(-jitter * jitter / 2, jitter) if jitter else 1.0
