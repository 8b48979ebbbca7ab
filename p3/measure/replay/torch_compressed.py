"""The replay in torch with a compressed store: `python -m p3.replay --store p3_torch+int8`, or `ddp:25+fp16`.

What a codec or a hook costs, and topk sends, depends on the values: so gradients are normally distributed, other ones
for each worker, key and iteration. They are copied while the layer computes.

At the end all workers must have the same bits, and each weight must be near to what all gradients make of it: where an
element has a byte or more both ways, but for TOLERANCE of what a worker's gradients add up to; with fewer bits, which
leave most of a gradient for later rounds, it must point the same way.
"""

import math
from typing import List, Optional

import numpy as np
import torch

from p3.measure.replay import models
from p3.measure.replay.probes import random_numbers, random_parts
from p3.measure.replay.torch_replay import TorchReplay
from p3.measure.workers.lines import digest
from p3.measure.workers.torch_store import compression

TOLERANCE = 0.02  # int8 leaves out some 0.007 of the last gradient; a round that is missing is 0.35 of eight
_FEW = 1000  # elements of which, with few bits, the direction says nothing


class CompressedTorchReplay(TorchReplay):
    def __init__(
        self, store: str, model: models.Model, release: str = "layer", max_norm: Optional[float] = None
    ) -> None:
        self._pool = random_numbers()
        self._pool_tensor = torch.from_numpy(self._pool)
        self._is_fine = compression(store).fewest_bits >= 8
        super().__init__(store, model, release, max_norm)

    def fill(self, key: int, gradient: torch.Tensor) -> torch.Tensor:
        flat = gradient.view(-1)
        for part, of_pool in random_parts(flat.numel(), key, self.iterations, self.rank):
            flat[part] = self._pool_tensor[of_pool]
        return gradient

    def wrong_keys(self) -> List[int]:
        values = self.last_weights()
        self.digest = digest(values)
        shares = [self._clipped_to(one) for one in range(self.iterations)]
        spread = math.sqrt(self.num_workers * sum(share**2 for share in shares))  # of an element
        return [key for key, value in enumerate(values) if not self._is_near(key, value.ravel(), shares, spread)]

    def _is_near(self, key: int, value: np.ndarray, shares: List[float], spread: float) -> bool:
        expected = np.zeros_like(value)
        for iteration, share in enumerate(shares):
            expected -= np.float32(share) * self._sum_of(key, iteration)
        if self._is_fine:
            return bool(np.sqrt(np.mean((value - expected) ** 2)) <= TOLERANCE * spread)
        return bool(np.isfinite(value).all() and (value.size < _FEW or np.dot(value, expected) > 0))

    def _sum_of(self, key: int, iteration: int) -> np.ndarray:
        """Of all workers' gradients."""
        total = np.zeros(self.elements[key], "float32")
        for rank in range(self.num_workers):
            for part, of_pool in random_parts(total.size, key, iteration, rank):
                total[part] += self._pool[of_pool]
        return total

    def _clipped_to(self, iteration: int) -> float:
        if self.max_norm is None:
            return 1.0
        squares = (np.square(self._sum_of(key, iteration), dtype="float64").sum() for key in range(len(self.elements)))
        return min(1.0, self.max_norm * self.num_workers / math.sqrt(sum(squares)))
