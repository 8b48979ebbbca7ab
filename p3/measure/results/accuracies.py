"""Accuracies after each epoch of a training: bands over the seeds, and what a store loses against p3_sync.

A seed is a repeat: the same first weights and batches for every store. An accuracy is the mean over the workers.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Dict, Iterable, List, Optional, Sequence, Tuple

from p3.measure.results.records import Configuration, Run
from p3.measure.results.summaries import Spread, by_configuration, spread
from p3.measure.trainings import resnets

GOAL = 0.97  # seconds to it are told

PAPER = (
    "The paper's Fig. 11: ResNet-110 on CIFAR-10, 160 epochs, 4 machines, five settings of hyper-parameters; there DGC "
    "ends 0.004 below P3 in the mean."
)
HERE = (
    f"Here: scikit-learn's digits, 8 x 8, {resnets.PICTURES - resnets.TESTED} to train and {resnets.TESTED} to test "
    "on; one setting, and a seed for each run."
)


@dataclass(frozen=True)
class Band:
    """All right runs of one configuration."""

    configuration: Configuration
    epochs: Tuple[Spread, ...]  # after each, over the seeds
    at_s: Tuple[float, ...]  # when each had ended: the median over the seeds
    finals: Dict[int, float]  # after the last epoch, by seed
    goal_s: Optional[Spread]  # seconds until GOAL was first reached; None: not with every seed


def bands(runs: Iterable[Run]) -> List[Band]:
    """Of each configuration that has a right run."""
    known = (run for run in runs if run.accuracies and run.result == "right")
    return [_band(configuration, of_it) for configuration, of_it in by_configuration(known)]


def _band(configuration: Configuration, runs: Sequence[Run]) -> Band:
    reached = [
        next((at_s for at_s, one in zip(run.accuracy_at_s, run.accuracies) if one >= GOAL), None) for run in runs
    ]
    return Band(
        configuration,
        epochs=tuple(spread(same) for same in zip(*(run.accuracies for run in runs))),
        at_s=tuple(statistics.median(same) for same in zip(*(run.accuracy_at_s for run in runs))),
        finals={run.repeat: run.accuracies[-1] for run in runs},
        goal_s=None if None in reached else spread(reached),
    )
