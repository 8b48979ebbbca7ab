"""Losses over steps and over seconds, of trainings.

A curve is what a run's workers have lost in each step, the mean over all of them: the loss of the joined batch. As one
batch is harder than the next, a loss is only said to be reached by the mean of the last SMOOTHED_STEPS steps.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Dict, Hashable, Iterable, List, Optional, Sequence, Tuple

from p3.measure.results.records import Configuration, Run
from p3.measure.results.summaries import Spread, by_configuration, spread

SMOOTHED_STEPS = 10
# The mathematics of all stores is the same; the order of sums is not, and training amplifies what differs in last bits.
TOLERANCE = 0.001


def smooth(losses: Sequence[float]) -> List[float]:
    """Each step's mean with those before it, SMOOTHED_STEPS in all; of the first ones fewer."""
    return [statistics.fmean(losses[max(0, end - SMOOTHED_STEPS) : end]) for end in range(1, len(losses) + 1)]


def steps_to(goal: float, losses: Sequence[float]) -> Optional[int]:
    """How many steps there were when the smoothed loss was first no greater than the goal; None if it never was."""
    smoothed = smooth(losses)
    known = range(min(SMOOTHED_STEPS, len(losses)), len(losses) + 1)
    return next((steps for steps in known if smoothed[steps - 1] <= goal), None)


def seconds_to(goal: float, losses: Sequence[float], at_s: Sequence[float]) -> Optional[float]:
    """When that was."""
    steps = steps_to(goal, losses)
    return None if steps is None else at_s[steps - 1]


def difference(losses: Sequence[float], others: Sequence[float]) -> Tuple[float, int]:
    """The greatest one between two smoothed curves, as a fraction of the first curve's first value, and its step."""
    apart = [abs(one - other) / losses[0] for one, other in zip(smooth(losses), smooth(others))]
    step = max(range(len(apart)), key=apart.__getitem__)
    return apart[step], step


class Agreement:
    """Knows the first right curve of each configuration, which all others there must follow step by step."""

    def __init__(self) -> None:
        self._first: Dict[Hashable, Dict] = {}

    def check(self, configuration: Hashable, record: Dict) -> None:
        """Marks the record of a run as wrong if its curve is another one. Records without a curve are left alone."""
        if record.get("result") != "right" or not record.get("losses"):
            return
        first = self._first.setdefault(configuration, record)
        apart, step = difference(first["losses"], record["losses"])
        if apart > TOLERANCE:
            record["result"] = "wrong"
            record["error"] = (
                f"{record['store']}: the loss of step {step} is not that of the first run, {first['store']}: "
                f"{apart:.2%} of the first loss away, more than {TOLERANCE:.1%}"
            )


@dataclass(frozen=True)
class Curve:
    """All right runs of one configuration: medians over them, and the least and the greatest."""

    configuration: Configuration
    goal_loss: float
    losses: Tuple[float, ...]  # smoothed, of each step; the first run's, as all are alike
    at_s: Tuple[float, ...]
    low_s: Tuple[float, ...]
    high_s: Tuple[float, ...]
    goal_s: Optional[Spread]  # seconds to the goal; None: not all have reached it


def curves(runs: Iterable[Run]) -> List[Curve]:
    """Of each configuration that has a right run with losses."""
    known = (run for run in runs if run.losses and run.loss_at_s and run.goal_loss and run.result == "right")
    return [_curve(configuration, of_it) for configuration, of_it in by_configuration(known)]


def _curve(configuration: Configuration, runs: Sequence[Run]) -> Curve:
    by_step = list(zip(*(run.loss_at_s for run in runs)))
    goal_loss = runs[0].goal_loss
    reached = [seconds_to(goal_loss, run.losses, run.loss_at_s) for run in runs]
    return Curve(
        configuration,
        goal_loss,
        losses=tuple(smooth(runs[0].losses)[: len(by_step)]),
        at_s=tuple(map(statistics.median, by_step)),
        low_s=tuple(map(min, by_step)),
        high_s=tuple(map(max, by_step)),
        goal_s=None if None in reached else spread(reached),
    )
