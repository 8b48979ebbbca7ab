"""What a figure shows of an experiment, as plain values: figures.py draws it, and only that needs matplotlib."""

from __future__ import annotations

from typing import Callable, NamedTuple, Optional, Sequence, Tuple

from p3.measure.results.summaries import Summary


class Axis(NamedTuple):
    """What is on the x axis, and which fields change along it; the others make a panel each."""

    label: str
    value: Callable[[Summary], Optional[float]]
    varying: Sequence[str]
    told: Sequence[str]  # in a panel's title
    log_base: Optional[int] = None
    may_lack: bool = False  # some stores have no such value, and one line for all


class Measure(NamedTuple):
    """What is on the y axis."""

    label: str
    value: Callable[[Summary], Optional[float]]
    spread: Callable[[Summary], Optional[Tuple[float, float]]]
    bound: Callable[[Summary], Optional[float]]


RATE = Axis("rate of each network card, Mbit/s", lambda one: one.rate_mbit, ["rate_mbit"],
            ("compute", "delay", "hosts"), 2)  # fmt: skip
RATE_OF_SHARES = RATE._replace(varying=["rate_mbit", "compute_s", "compute_share", "model", "size", "bytes"],
                               told=("delay", "hosts", "release", "clip"))  # fmt: skip
HOSTS = Axis("hosts", lambda one: one.hosts, ["hosts", "workers", "servers"], ("rate", "compute", "delay"))
SLICE = Axis("elements of a slice", lambda one: one.slice_elements, ["slice_elements"],
             ("rate", "compute", "delay", "hosts"), 10, may_lack=True)  # fmt: skip
RATIO = Axis("seconds of communication for each of computation", lambda one: one.ratio and round(one.ratio, 3),
             ["compute_s"], ("rate", "delay", "hosts"))  # fmt: skip

TIME = Measure("seconds for an iteration", lambda one: one.median_s, lambda one: (one.low_s, one.high_s),
               lambda one: one.bound_s)  # fmt: skip
THROUGHPUT = Measure("iterations per second", lambda one: one.throughput, lambda one: one.throughput_spread,
                     lambda one: one.bound_throughput)  # fmt: skip
BATCHES = Measure("batches per second, of all workers", lambda one: one.workers * one.throughput,
                  lambda one: tuple(one.workers * value for value in one.throughput_spread),
                  lambda one: one.bound_throughput and one.workers * one.bound_throughput)  # fmt: skip

OVER_BOUND = Measure("seconds over those of the bound", lambda one: one.median_s / one.bound_s,
                     lambda one: (one.low_s / one.bound_s, one.high_s / one.bound_s), lambda one: 1.0)  # fmt: skip


class Figure(NamedTuple):
    kind: str  # lines, shares, bars, cards, curves, losses or accuracies: how figures.py draws it
    title: str = ""
    x: Optional[Axis] = None  # of lines and shares, as y
    y: Optional[Measure] = None
