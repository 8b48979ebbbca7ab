"""Training on workers whose updates arrive late, in one process (Zhang's thesis, 5.2.1).

    batches = batches_to_target(problem, rules.Momentum(0.01), workers=8, staleness=16, most=50_000, seed=1)

Each worker has a copy of the parameters, on which it computes its gradients, and a state of the rule of its own. What
it makes of a gradient in iteration t is added to the copy of each worker, its own included, at the start of iteration
t + 1 + r, with r drawn for each pair of workers from 0 to `staleness`, all alike. With one worker and no staleness that
is training as ever. The first worker's copy is judged.
"""

from __future__ import annotations

from typing import Optional, Protocol

import numpy as np


class Problem(Protocol):
    def first(self, random: np.random.Generator) -> np.ndarray:
        """Parameters to begin with, float64 of shape (elements,)."""

    def gradients(self, copies: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """Of the mean loss of a batch of each worker's own; both (workers, elements)."""

    def is_reached(self, parameters: np.ndarray) -> bool:
        """Whether they are as good as is asked for."""


class Rule(Protocol):
    def start(self, workers: int, elements: int) -> None: ...

    def updates(self, gradients: np.ndarray) -> np.ndarray:
        """What is to be added to the parameters; both (workers, elements), with a state for each worker."""


LOOKS = 200  # at the quality of the parameters, evenly, until `most`


def batches_to_target(
    problem: Problem, rule: Rule, *, workers: int, staleness: int, most: int, seed: int
) -> Optional[int]:
    """Of all workers together, from the start; None if not reached with `most`, or if the parameters are no numbers."""
    random = np.random.default_rng(seed)
    first = problem.first(random)
    copies = np.tile(first, (workers, 1))
    rule.start(workers, len(first))
    arriving = np.zeros((staleness + 1, workers, len(first)))  # by the iteration modulo its length
    of_all, iterations = np.arange(workers), most // workers
    look_every = max(1, iterations // LOOKS)
    with np.errstate(over="ignore", invalid="ignore"):  # what grows without bound is seen as soon as it is looked at
        for iteration in range(iterations + 1):
            copies += arriving[iteration % len(arriving)]
            arriving[iteration % len(arriving)] = 0
            if iteration % look_every == 0:
                if not np.isfinite(copies[0]).all():
                    return None
                if problem.is_reached(copies[0]):
                    return iteration * workers
            for update in rule.updates(problem.gradients(copies, random)):
                delays = random.integers(0, staleness + 1, workers)
                arriving[(iteration + 1 + delays) % len(arriving), of_all] += update
    return None
