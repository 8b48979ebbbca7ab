"""What trainings end with that were repeated with several seeds: the loss of what no batch has.

A seed is a repeat, as in seeds.py. There losses are those of each step; of local steps these are of weights that each
worker has for itself, so here only what all have at the end counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, Iterable, List, Optional

from p3.measure.results.records import Configuration, Run
from p3.measure.results.summaries import Mean, by_configuration, mean, median_of


@dataclass(frozen=True)
class Ending:
    """Of all right runs of one configuration."""

    configuration: Configuration
    losses: Dict[int, float]  # by seed
    steps: int
    card_bytes: Optional[float]  # that a card sends in a step, by formula

    def above(self, base: Ending) -> Optional[Mean]:
        """By what share its losses are greater, seed by seed; None if no seed has both."""
        both = [loss / base.losses[seed] - 1 for seed, loss in self.losses.items() if seed in base.losses]
        return mean(both) if both else None


def endings(runs: Iterable[Run]) -> List[Ending]:
    """Of each configuration that has a right run with such a loss."""
    known = (run for run in runs if run.result == "right" and run.heldout_loss)
    return [
        Ending(
            configuration, {run.repeat: run.heldout_loss for run in of_it}, max(len(run.losses or ()) for run in of_it),
            median_of(of_it, lambda run: run.card_bytes),
        )
        for configuration, of_it in by_configuration(known)
    ]  # fmt: skip
