"""What a model makes of a network: how long its communication takes, what can be hidden, and what may help.

    forecast(model, compute_s=0.5, up_mbit=[940, 940], down_mbit=[940, 940], delay_ms=0.1)

One worker and one server on each host. The bound is p3/measure/replay/bound.py's, the prediction p3 simulate's.
"""

from __future__ import annotations

import statistics
from typing import Dict, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from p3.errors import ConfigError, NotBuilt
from p3.measure.compressions import Compression
from p3.measure.replay import bound as bounds
from p3.measure.replay import models
from p3.trace.lives import Trace

# Rows of docs/strategies.md, by what stands in their first column.
EXACT = "computation hides most of the communication, or you do not know yet"
COMPRESSED = "the network is several times too slow for the model"
SPARSE = "it is slower still, the optimizer is SGD with momentum, and training is long"

_HIDDEN = 1.1  # of the computation: an iteration that takes no longer needs no help
# Codecs whose bytes are forecast, both ways, from the least that is lost to the most. If even the last one leaves an
# iteration this many times as long as its computation, what is sent must be sparse.
_CODECS = ("bf16", "int8")
_TOO_SLOW = 2.0
_EVEN_LAYERS = 24
_MOST_SIMULATED = 32  # hosts; the time of a simulation grows with the square of their number


class Forecast(NamedTuple):
    """Seconds are those of one iteration."""

    model: str
    model_bytes: int
    compute_s: float
    communication_s: float  # alone, with no computation
    serial_s: float  # one after the other
    bound_s: float
    bound_reason: str
    predicted_s: Optional[float]  # None for many hosts, or where the simulator is not built
    compressed_s: Dict[str, float]  # the bound with these codecs both ways; empty without the core
    strategy: str  # a row of docs/strategies.md

    @property
    def hidden(self) -> float:
        """The share of the communication that overlap can hide at best."""
        return (self.serial_s - self.bound_s) / self.communication_s if self.communication_s else 1.0


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


def recorded_model(trace: Trace) -> Tuple[models.Model, float]:
    """The keys of a run in forward order, each with its share of the work; and the seconds that an iteration computed.

    A backward pass hands out gradients as it goes, so what lies between two of them is work; a forward pass is taken to
    need half of that, as for the replay's models. ConfigError if the trace does not hold as much.
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
    return models.Model("the recorded run", 1.0, layers), 1.5 * total


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


def forecast(
    model: models.Model, compute_s: float, up_mbit: Sequence[float], down_mbit: Sequence[float], delay_ms: float
) -> Forecast:
    hosts = list(range(len(up_mbit)))

    def bound(compute_s: float, compression: Optional[Compression] = None) -> bounds.Bound:
        cluster = bounds.Cluster(up_mbit, down_mbit, hosts, hosts)
        return bounds.bound(model, compute_s, cluster, delay_s=delay_ms / 1e3, compression=compression)

    alone, best = bound(0.0), bound(compute_s)
    try:
        compressed_s = {codec: bound(compute_s, Compression(codec, codec)).seconds for codec in _CODECS}
    except NotBuilt:
        compressed_s = {}
    if best.seconds <= _HIDDEN * compute_s:
        strategy = EXACT
    elif min(compressed_s.values(), default=0.0) <= _TOO_SLOW * compute_s:
        strategy = COMPRESSED
    else:
        strategy = SPARSE
    return Forecast(
        model.name, model.bytes, compute_s, alone.seconds, compute_s + alone.seconds, best.seconds, best.reason,
        _predicted(model, compute_s, up_mbit, down_mbit, delay_ms), compressed_s, strategy,
    )  # fmt: skip


def _predicted(model, compute_s, up_mbit, down_mbit, delay_ms) -> Optional[float]:
    if len(up_mbit) > _MOST_SIMULATED:
        return None
    try:
        from p3.measure.simulate.predict import predict
    except ImportError:  # not built
        return None
    from p3.measure.simulate.setting import Network, Setting

    network = Network(tuple(up_mbit), tuple(down_mbit), delay_ms)
    return predict(Setting(model=model, compute_s=compute_s, network=network, warmup=1, iterations=2)).mean_s


def delay_ms(round_trips_s: Sequence[float]) -> float:
    """One way, of a usual path."""
    return 1e3 * statistics.median(round_trips_s) / 2 if round_trips_s else 0.0
