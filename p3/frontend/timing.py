"""How long a worker computes in a step, and in which layers, as its gradients tell: what a plan is made for.

The time between two gradients is that of the layer of the later one. What is left of a step, without waits for new
values, is its forward pass, of which each layer is taken to have the same share as of the backward pass.
"""

from __future__ import annotations

import time
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple


class Computation(NamedTuple):
    """Of one step, in seconds."""

    total: float
    backward: Dict[str, float]  # by the names of parameters; none of those without a gradient


class Timing:
    """Threads: the script's."""

    def __init__(self) -> None:
        self._gradients: List[Tuple[str, float]] = []  # of the step under way
        self._ended: Optional[float] = None  # the step before
        self._waited_s = 0.0  # by then, in all
        self.least: Optional[Computation] = None  # of all steps: others may have been disturbed

    def note_gradient(self, name: str) -> None:
        self._gradients.append((name, time.monotonic()))

    def end_step(self, waited_s: float) -> None:
        """`waited_s`: for new values, so far in all."""
        now = time.monotonic()
        if self._ended is not None and len(self._gradients) > 1:
            total = max(0.0, now - self._ended - (waited_s - self._waited_s))
            if self.least is None or total < self.least.total:
                self.least = Computation(total, _between(self._gradients))
        self._gradients, self._ended, self._waited_s = [], now, waited_s

    def begin_anew(self) -> None:
        """The next step does not count: it has had more to do than to train."""
        self._ended = None


def _between(gradients: Sequence[Tuple[str, float]]) -> Dict[str, float]:
    spans = {later[0]: later[1] - earlier[1] for earlier, later in zip(gradients, gradients[1:])}
    spans.setdefault(gradients[0][0], sum(spans.values()) / len(spans))  # whose beginning nobody has seen
    return spans
