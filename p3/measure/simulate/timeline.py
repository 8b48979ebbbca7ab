"""One iteration of a job on one worker, moment by moment: the usual way of a parameter server beside P3.

An iteration here begins with the backward pass and ends with the forward pass that follows it, so that all its
communication lies inside. Plain values; plot_timeline.py draws them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import List, Sequence, Tuple

from p3.measure._simulator import SPANS
from p3.measure.replay.models import Layer
from p3.measure.simulate.predict import predict
from p3.measure.simulate.setting import Setting, job

WORKER = 0  # which is on host 0
_MOST_GROUPS = 8  # that colours tell apart
_FORWARD, _BACKWARD, _WAIT, _UP, _DOWN = (SPANS.index(kind) for kind in ("forward", "backward", "wait", "up", "down"))


@dataclass(frozen=True)
class Bar:
    """Of the layers of a group; seconds since the iteration began."""

    group: int
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    scheme: str
    seconds: float
    backward: Tuple[Bar, ...]
    forward: Tuple[Bar, ...]
    waits: Tuple[Bar, ...]  # of the forward pass, for the values of a group
    sent: Tuple[Bar, ...]  # what passes the uplink of the worker's host, a segment each
    received: Tuple[Bar, ...]

    @property
    def waited_s(self) -> float:
        return sum(wait.end_s - wait.begin_s for wait in self.waits)


def timelines(setting: Setting) -> Tuple[Timeline, Timeline]:
    """The usual way, then P3: the same model, hosts and links. ValueError for a setting that makes no sense."""
    if setting.scheme != "p3":
        raise ValueError(f"the timelines are those of P3 and of whole layers; the scheme is {setting.scheme!r}")
    return timeline(dataclasses.replace(setting, scheme="layers")), timeline(setting)


def timeline(setting: Setting) -> Timeline:
    """From the last backward pass but one to the end of the last forward pass."""
    setting = dataclasses.replace(setting, traced_iterations=2, traces_links=True)
    group_of = groups(setting.model.layers)
    layer_of = [one["layer"] for one in job(setting)["slices"]]
    spans = predict(setting).spans
    last = setting.warmup + setting.iterations - 1
    mine = [span for span in spans if span["node"] == WORKER and span["kind"] in (_FORWARD, _BACKWARD, _WAIT)]
    begin = min(one["begin_s"] for one in mine if one["kind"] == _BACKWARD and one["round"] == last - 1)
    end = max(one["end_s"] for one in mine if one["kind"] == _FORWARD and one["round"] == last)

    def bar(span: dict, layer: int) -> Bar:
        return Bar(group_of[layer], max(span["begin_s"], begin) - begin, min(span["end_s"], end) - begin)

    def computed(kind: int, iteration: int) -> Tuple[Bar, ...]:
        # What holds up the forward pass for clipping counts as the first layer's.
        return tuple(bar(one, max(0, one["item"])) for one in mine if one["kind"] == kind and one["round"] == iteration)

    def passed(kind: int) -> Tuple[Bar, ...]:
        return tuple(
            bar(one, layer_of[one["item"]]) for one in spans
            if one["kind"] == kind and one["node"] == WORKER and one["end_s"] > begin and one["begin_s"] < end
        )  # fmt: skip

    return Timeline(
        scheme=setting.scheme,
        seconds=end - begin,
        backward=computed(_BACKWARD, last - 1),
        forward=computed(_FORWARD, last),
        waits=computed(_WAIT, last),
        sent=passed(_UP),
        received=passed(_DOWN),
    )


def groups(layers: Sequence[Layer]) -> List[int]:
    """The group of each layer. Where there are too many layers, neighbours share one, so that all groups weigh about
    the same: computation and bytes count alike."""
    if len(layers) <= _MOST_GROUPS:
        return list(range(len(layers)))
    total = sum(layer.bytes for layer in layers)
    weights = [layer.forward + layer.backward + layer.bytes / total for layer in layers]
    found, passed = [], 0.0
    for weight in weights:
        found.append(int((passed + weight / 2) / sum(weights) * _MOST_GROUPS))
        passed += weight
    order = sorted(set(found))  # a heavy layer may leave a group empty
    return [order.index(group) for group in found]
