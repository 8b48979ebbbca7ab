"""What a model makes of a network: how long its communication takes, what can be hidden, and what may help.

    forecast(model, compute_s=0.5, up_mbit=[940, 940], down_mbit=[940, 940], delay_ms=0.1)

One worker and one server on each host. The bound is p3/measure/replay/bound.py's, the prediction p3 simulate's.
"""

from __future__ import annotations

import statistics
from typing import Dict, NamedTuple, Optional, Sequence, Tuple

from p3.errors import NotBuilt
from p3.measure.compressions import Compression
from p3.measure.replay import bound as bounds
from p3.measure.replay import models

# Rows of docs/strategies.md, by what stands in their first column.
EXACT = "computation hides most of the communication, or you do not know yet"
COMPRESSED = "the network is several times too slow for the model"
SPARSE = "it is slower still, the optimizer is SGD with momentum, and training is long"

_HIDDEN = 1.1  # of the computation: an iteration that takes no longer needs no help
# Codecs whose bytes are forecast, both ways, from the least that is lost to the most. If even the last one leaves an
# iteration this many times as long as its computation, what is sent must be sparse.
_CODECS = ("bf16", "int8")
_OF_MATRICES = "lowrank"  # and this type, where the model is known to have any; it decides nothing
_TOO_SLOW = 2.0
_MOST_SIMULATED = 32  # hosts; the time of a simulation grows with the square of their number
_PLANNING_S = 5.0
_WORTH_A_PLAN = 0.98  # of the time without one


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
    planned_s: Optional[float]  # predicted with other shares of the servers; None where equal ones are as good
    planned_shares: Sequence[float]  # those, of each server
    plan: str  # the file for them (p3/plan/strategy.py)
    compressed_s: Dict[str, float]  # the bound with these types both ways; empty without the core
    strategy: str  # a row of docs/strategies.md

    @property
    def hidden(self) -> float:
        """The share of the communication that overlap can hide at best."""
        return (self.serial_s - self.bound_s) / self.communication_s if self.communication_s else 1.0


def forecast(
    model: models.Model, compute_s: float, up_mbit: Sequence[float], down_mbit: Sequence[float], delay_ms: float
) -> Forecast:
    hosts = list(range(len(up_mbit)))

    def bound(compute_s: float, compression: Optional[Compression] = None) -> bounds.Bound:
        cluster = bounds.Cluster(up_mbit, down_mbit, hosts, hosts)
        return bounds.bound(model, compute_s, cluster, delay_s=delay_ms / 1e3, compression=compression)

    alone, best = bound(0.0), bound(compute_s)
    of_matrices = [_OF_MATRICES] if any(len(tensor.shape) > 1 for tensor in model.tensors) else []
    try:
        compressed_s = {one: bound(compute_s, Compression(one, one)).seconds for one in (*_CODECS, *of_matrices)}
    except NotBuilt:
        compressed_s = {}
    if best.seconds <= _HIDDEN * compute_s:
        strategy = EXACT
    elif min((compressed_s[one] for one in _CODECS if compressed_s), default=0.0) <= _TOO_SLOW * compute_s:
        strategy = COMPRESSED
    else:
        strategy = SPARSE
    return Forecast(
        model.name, model.bytes, compute_s, alone.seconds, compute_s + alone.seconds, best.seconds, best.reason,
        *_predicted(model, compute_s, up_mbit, down_mbit, delay_ms), compressed_s, strategy,
    )  # fmt: skip


def _predicted(
    model, compute_s, up_mbit, down_mbit, delay_ms
) -> Tuple[Optional[float], Optional[float], Sequence[float], str]:
    """As the fields from predicted_s to plan."""
    unknown = None, None, [], ""
    if len(up_mbit) > _MOST_SIMULATED:
        return unknown
    try:
        from p3.measure.planning.search import Search
    except ImportError:  # not built
        return unknown
    from p3.measure.simulate.setting import Network, Setting

    network = Network(tuple(up_mbit), tuple(down_mbit), delay_ms)
    search = Search(Setting(model=model, compute_s=compute_s, network=network, warmup=1, iterations=2))
    usual = search.without()
    are_alike = search.proportional().shares == usual.shares
    best = usual if are_alike else search.best(_PLANNING_S)
    if best.seconds > _WORTH_A_PLAN * usual.seconds:
        return usual.seconds, None, [], ""
    return usual.seconds, best.seconds, [share / sum(best.shares) for share in best.shares], best.strategy.text()


def delay_ms(round_trips_s: Sequence[float]) -> float:
    """One way, of a usual path."""
    return 1e3 * statistics.median(round_trips_s) / 2 if round_trips_s else 0.0
