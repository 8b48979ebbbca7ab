"""Models of a user's own: of which the size is known, or a run that was recorded (docs/trace.md)."""

from __future__ import annotations

from typing import Optional, Sequence, Tuple

import numpy as np

from p3.errors import ConfigError
from p3.measure.replay import models
from p3.trace.lives import Trace

_EVEN_LAYERS = 24


def even_model(parameters: int) -> models.Model:
    """A model of which only the size is known: layers of one size, and as much work in each."""
    share = 1 / (3 * _EVEN_LAYERS)
    each = max(1, parameters // _EVEN_LAYERS)
    layers = tuple(
        models.Layer("layer%d" % number, (models.Tensor("weight%d" % number, (each,)),), share, 2 * share)
        for number in range(_EVEN_LAYERS)
    )
    name = "%s parameters, spread evenly over %d layers" % (format(parameters, ","), _EVEN_LAYERS)
    return models.Model(name, 1.0, layers)


def recorded_model(trace: Trace, compute_s: Optional[float] = None) -> Tuple[models.Model, float]:
    """The keys of a run in forward order, each with its share of the work; and the seconds that an iteration computed.

    A backward pass hands out gradients as it goes, so what lies between two of them is work; a forward pass is taken to
    need half of that, as for the replay's models. `compute_s`: what is known better. ConfigError if the trace does not
    hold as much.
    """
    lives = trace.lives[np.isfinite(trace.lives["ready"])]
    if len(lives) == 0:
        raise ConfigError("the trace holds no round: nothing can be told from it")
    priority = {key: int(lives["priority"][lives["key"] == key][0]) for key in sorted(set(lives["key"].tolist()))}
    keys = sorted(priority, key=lambda key: (-priority[key], key))
    whole = [of_round for of_round in _rounds(lives) if set(of_round["key"].tolist()) == set(keys)]
    gaps = np.array([_gaps(of_round, keys) for of_round in whole])
    if len(gaps) == 0:
        raise ConfigError("the trace holds no round of all keys: nothing can be told from it")
    backward = np.median(gaps, axis=0)
    total = float(backward.sum())
    shares = backward / total if total > 0 else np.full(len(keys), 1 / len(keys))
    layers = tuple(
        models.Layer(known.name, (models.Tensor(known.name, known.shape),), float(share) / 3, 2 * float(share) / 3)
        for known, share in ((trace.keys[key], share) for key, share in zip(keys, shares))
    )
    compute_s = compute_s or 1.5 * total
    if compute_s <= 0:
        raise ConfigError("the gradients of a round come all at once in the trace: give --compute SECONDS")
    return models.Model("the recorded run", 1.0, layers), compute_s


def iteration_s(trace: Trace) -> float:
    """The median of what the run took from one round's last gradient to the next one's. ConfigError without two."""
    ready = trace.lives["ready"]
    known = trace.lives[np.isfinite(ready) & (trace.lives["round"] > 0)]
    last = {number: float(known["ready"][known["round"] == number].max()) for number in set(known["round"].tolist())}
    took = [last[number + 1] - at for number, at in last.items() if number + 1 in last]
    if not took:
        raise ConfigError("the trace holds no two rounds, one behind the other: nothing tells what an iteration took")
    return float(np.median(took))


def _rounds(lives):
    """Of each worker, one after the other."""
    for worker in sorted(set(lives["worker"].tolist())):
        of_worker = lives[lives["worker"] == worker]
        for number in sorted(set(of_worker["round"].tolist()) - {0}):
            yield of_worker[of_worker["round"] == number]


def _gaps(of_round, keys: Sequence[int]) -> np.ndarray:
    """Seconds of the backward pass for each key, in their order; that of the first gradient is not known: the mean."""
    ready = np.array([of_round["ready"][of_round["key"] == key].min() for key in keys])
    order = np.argsort(ready, kind="stable")
    gaps = np.empty(len(keys))
    steps = np.diff(ready[order])
    gaps[order[0]] = steps.mean() if len(steps) else 0.0
    gaps[order[1:]] = steps
    return gaps
