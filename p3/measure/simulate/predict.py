"""From a setting to what it would take: iterations, where their time goes, and how the links are used."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Dict, List, Optional, Tuple

from p3.errors import NotBuilt
from p3.measure.replay import bound
from p3.measure.replay.models import Layer
from p3.measure.simulate import setting as settings
from p3.measure.simulate.setting import Setting

try:
    from p3.measure import _simulator
except ImportError as error:
    raise NotBuilt(f"the simulator has not been built ({error}): run `pip install .`") from None

FIRST_BUCKET_BYTES = 1 << 20  # DDP's, so that the first reduction begins early
_WAIT_GROUPS = 8
# What the first layer waits for besides its own values.
NEEDED_TO_CLIP = {"norm": "the norm", "wait": "all values"}


@dataclass(frozen=True)
class Prediction:
    """`iteration_s`: the slowest worker's, of each iteration that counts, as `p3 bench` has it."""

    iteration_s: Tuple[float, ...]
    mean_s: float  # from the end of the warm-up to the end, for an iteration
    compute_s: float
    bound_s: Optional[float]  # None where it is not known
    bound_reason: str
    waits: Tuple[Tuple[str, float], ...]  # of an average worker's iteration, by groups of layers in forward order
    up: Tuple[Dict[str, float], ...]  # of each host's link: use, mean_queue_s, greatest_queue_s, segments, lost
    down: Tuple[Dict[str, float], ...]
    window_bytes: float  # of the connection that has the least; 0 where there is none
    events: int
    spans: Tuple[dict, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.iteration_s)

    @property
    def above_bound(self) -> Optional[float]:
        return self.mean_s / self.bound_s - 1 if self.bound_s else None


def predict(setting: Setting) -> Prediction:
    """Raises ValueError for a setting that makes no sense."""
    job = settings.job(setting)
    if setting.scheme == "ddp":
        result = _simulator.simulate_ring(job, setting.bucket_bytes, FIRST_BUCKET_BYTES * setting.sent_share)
    else:
        result = _simulator.simulate(job)
    begun = [([0.0, *ends])[setting.warmup] for ends in result["ends_s"]]
    seconds = [
        max(ends[number] - (ends[number - 1] if number else 0.0) for ends in result["ends_s"])
        for number in range(setting.warmup, setting.warmup + setting.iterations)
    ]
    spent_s = max(ends[-1] for ends in result["ends_s"]) - max(begun)
    limit = _bound(setting)
    computing = statistics.fmean(
        factor for factors in job["factors"] for factor in factors[setting.warmup :]
    ) * setting.compute_s  # fmt: skip
    return Prediction(
        iteration_s=tuple(seconds),
        mean_s=spent_s / setting.iterations,
        compute_s=computing,
        bound_s=limit.seconds if limit else None,
        bound_reason=limit.reason if limit else "it is known for P3's dense slices alone",
        waits=(*_to_clip(setting, result["waited_to_clip_s"]), *_grouped(setting, result["waited_s"])),
        up=tuple(_use(one, spent_s) for one in result["up"]),
        down=tuple(_use(one, spent_s) for one in result["down"]),
        window_bytes=result["window_bytes"],
        events=result["events"],
        spans=tuple(result["spans"]),
    )


def _bound(setting: Setting) -> Optional[bound.Bound]:
    if setting.sparse or setting.scheme != "p3" or setting.has_factors:
        return None
    return bound.bound(
        setting.model, setting.compute_s, setting.cluster(), setting.slice_elements,
        delay_s=setting.network.delay_ms / 1e3, release=setting.release, compression=setting.compression,
        clips=setting.clip != "none", strategy=setting.strategy, groups=setting.groups,
    )  # fmt: skip


def _to_clip(setting: Setting, waited_s: List[float]) -> List[Tuple[str, float]]:
    if setting.clip == "none" or setting.scheme == "ddp":
        return []
    return [(NEEDED_TO_CLIP[setting.clip], statistics.fmean(waited_s) / setting.iterations)]


def _grouped(setting: Setting, waited_s: List[List[float]]):
    """Groups of neighbouring layers, as equal in number as can be."""
    layers = setting.model.layers
    if setting.scheme == "ddp":
        return [("all buckets, after the backward pass", statistics.fmean(map(sum, waited_s)) / setting.iterations)]
    by_layer = [statistics.fmean(waits) / setting.iterations for waits in zip(*waited_s)]
    groups = min(_WAIT_GROUPS, len(layers))
    limits = [len(layers) * number // groups for number in range(groups + 1)]
    return [(_named(layers[begin:end]), sum(by_layer[begin:end])) for begin, end in zip(limits, limits[1:])]


def _named(layers: Tuple[Layer, ...]) -> str:
    return layers[0].name if len(layers) == 1 else f"{layers[0].name} to {layers[-1].name}"


def _use(link: Dict[str, float], spent_s: float) -> Dict[str, float]:
    return {
        "use": link["busy_s"] / spent_s if spent_s else 0.0,
        **{name: link[name] for name in ("bytes", "mean_queue_s", "greatest_queue_s", "segments", "lost")},
    }
