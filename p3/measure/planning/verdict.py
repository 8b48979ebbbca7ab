"""How good a planner's choices are, held against strategies that were all measured.

    verdict(of_a_setting)     # a list of Judged, one for each strategy

Regret is how much longer an iteration takes with what the planner would choose than with the best strategy measured:
of its first choice, and if it may try five and keep the best. Ranks are right if of two strategies whose measured times
differ by more than RANKED_APART the one that is predicted to be faster is. What chance adds to a measurement counts
against the planner: the best of many measured times is a lucky one.
"""

from __future__ import annotations

import itertools
import statistics
from typing import NamedTuple, Sequence

RANKED_APART = 0.05
TRIALS = 5


class Judged(NamedTuple):
    """One strategy."""

    name: str
    measured_s: float
    predicted_s: float


class Verdict(NamedTuple):
    strategies: int
    best: Judged  # of those measured
    first: Judged  # of those predicted
    tried: Judged  # the best of the planner's first few
    pairs: int  # that are apart
    ranked_right: int
    mean_error: float  # of the predictions
    greatest_error: float

    @property
    def regret(self) -> float:
        return self.first.measured_s / self.best.measured_s - 1

    @property
    def regret_of_trials(self) -> float:
        return self.tried.measured_s / self.best.measured_s - 1


def verdict(of_a_setting: Sequence[Judged]) -> Verdict:
    """At least one."""
    by_prediction = sorted(of_a_setting, key=lambda one: one.predicted_s)
    pairs = [sorted(pair, key=lambda one: one.measured_s) for pair in itertools.combinations(of_a_setting, 2)]
    apart = [(fast, slow) for fast, slow in pairs if slow.measured_s > fast.measured_s * (1 + RANKED_APART)]
    errors = [abs(one.predicted_s / one.measured_s - 1) for one in of_a_setting]
    return Verdict(
        strategies=len(of_a_setting),
        best=min(of_a_setting, key=lambda one: one.measured_s),
        first=by_prediction[0],
        tried=min(by_prediction[:TRIALS], key=lambda one: one.measured_s),
        pairs=len(apart),
        ranked_right=sum(fast.predicted_s < slow.predicted_s for fast, slow in apart),
        mean_error=statistics.fmean(errors),
        greatest_error=max(errors),
    )
