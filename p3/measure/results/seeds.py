"""Losses and accuracies of trainings that were repeated with several seeds: bands over these, and what a compression
costs.

A seed is a repeat: the same first weights and batches for every store. So stores are compared seed by seed, at equal
steps; and at equal seconds, by when losses were known. Both are smoothed as in curves.py.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Dict, Iterable, List, Optional, Sequence, Tuple

from p3.measure.jobs import stores
from p3.measure.results.curves import TOLERANCE, smooth
from p3.measure.results.records import Configuration, Run
from p3.measure.results.summaries import Spread, by_configuration, spread


@dataclass(frozen=True)
class Band:
    """All right runs of one configuration."""

    configuration: Configuration
    losses: Tuple[Spread, ...]  # of each step, over the seeds
    accuracies: Tuple[Spread, ...]  # of the same batches; () if not known
    at_s: Tuple[float, ...]  # when each was known: the median over the seeds
    finals: Dict[int, float]  # of the last step, by seed
    heldout: Tuple[float, ...]  # the share of right answers about what no batch has, of each seed; () if not known

    def loss_at(self, seconds: float) -> Optional[float]:
        """The median that was known by then."""
        return self._known(self.losses, seconds)

    def accuracy_at(self, seconds: float) -> Optional[float]:
        return self._known(self.accuracies, seconds)

    def _known(self, values: Sequence[Spread], seconds: float) -> Optional[float]:
        known = [value.median for value, at_s in zip(values, self.at_s) if at_s <= seconds]
        return known[-1] if known else None

    def ends_within(self, base: Band) -> bool:
        """Whether its mean last loss is no greater than the greatest that `base` has with any seed, but for what the
        order of sums may change."""
        return statistics.fmean(self.finals.values()) <= max(base.finals.values()) * (1 + TOLERANCE)


def bands(runs: Iterable[Run]) -> List[Band]:
    """Of each configuration that has a right run with losses."""
    known = (run for run in runs if run.losses and run.loss_at_s and run.result == "right")
    return [_band(configuration, of_it) for configuration, of_it in by_configuration(known)]


def exact(among: Sequence[Band]) -> Optional[Band]:
    """With which the others are compared: P3 that compresses nothing, or else DDP."""
    found = [one for one in among if stores.named(one.configuration.store).compression is None]
    return next((one for one in found if stores.named(one.configuration.store).is_p3), found[0] if found else None)


def _band(configuration: Configuration, runs: Sequence[Run]) -> Band:
    smoothed = {run.repeat: smooth(run.losses) for run in runs}
    return Band(
        configuration,
        losses=tuple(map(spread, zip(*smoothed.values()))),
        accuracies=tuple(map(spread, zip(*(smooth(run.batch_accuracies or ()) for run in runs)))),
        at_s=tuple(map(statistics.median, zip(*(run.loss_at_s for run in runs)))),
        finals={seed: losses[-1] for seed, losses in smoothed.items()},
        heldout=tuple(run.heldout_accuracy for run in runs if run.heldout_accuracy is not None),
    )
