"""All arithmetic that tables and figures of `p3 bench` show, and the words for what was run.

    for one in summarise(results.runs):
        print(one, one.median_s, one.above_bound)

A run counts only if its weights were right. A configuration is summed up by the median of its runs' medians; its spread
is the least and the greatest of these. What failed stays in sight, in tables as in figures.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Callable, Collection, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

from p3.measure.jobs import stores
from p3.measure.results.records import Configuration, Nic, Run
from p3.measure.trainings import resnets
from p3.placement import PACKET_BYTES

MODELS = {
    "vgg19": "VGG-19",
    "resnet50": "ResNet-50",
    "inception_v3": "Inception V3",
    **{resnets.name(depth): "ResNet-%d" % depth for depth in resnets.DEPTHS},
    "gpt": "GPT",
    "words": "Word model",
    "sockeye": "Sockeye-like",
    "bert": "BERT-base-like",
}

# Speedups over dist_sync that the paper reports: the best of its bandwidth sweep (section 5.3).
PAPER_SPEEDUPS = {"resnet50": 1.26, "inception_v3": 1.18, "vgg19": 1.66, "sockeye": 1.38}

# An interval in which a NIC carried less than this share of its rate is idle; heartbeats stay below.
IDLE_SHARE = 0.05
# A median may be this much below the bound: what a token bucket lets through at once, and rounding.
BOUND_TOLERANCE = 0.01
# A median that is more than this above the bound asks for an explanation.
FAR_FROM_BOUND = 0.08


class Spread(NamedTuple):
    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Summary(Configuration):
    """All runs of one configuration. Times are None where no run was right."""

    median_s: Optional[float]
    low_s: Optional[float]
    high_s: Optional[float]
    runs: int
    bound_s: Optional[float]
    failed: int  # of the runs
    error: Optional[str]  # of the first that failed
    cpu_s: Optional[Spread] = None  # of all processes, for an iteration; None where a right run does not say it

    @property
    def throughput(self) -> Optional[float]:
        """Iterations per second; in each, every worker takes one batch."""
        return 1 / self.median_s if self.median_s else None

    @property
    def throughput_spread(self) -> Optional[Tuple[float, float]]:
        return (1 / self.high_s, 1 / self.low_s) if self.median_s else None

    @property
    def bound_throughput(self) -> Optional[float]:
        return 1 / self.bound_s if self.bound_s else None

    @property
    def above_bound(self) -> Optional[float]:
        """How much longer than the bound, as a fraction; 0 is the goal."""
        return self.median_s / self.bound_s - 1 if self.median_s and self.bound_s else None

    @property
    def is_far_from_bound(self) -> bool:
        return self.above_bound is not None and self.above_bound > FAR_FROM_BOUND

    @property
    def is_below_bound(self) -> bool:
        """Impossible: the rate, the computation or the bound is not what it is taken for. But the bound is of workers
        that wait for each other; of others, one with a faster link may take less."""
        waits = not stores.named(self.store).may_be_apart
        return waits and self.above_bound is not None and self.above_bound < -BOUND_TOLERANCE

    def __str__(self) -> str:
        return "%s: %s, %s, %d hosts, %s" % (self.experiment, self.store, self.model, self.hosts, rate(self.rate_mbit))


def summarise(runs: Iterable[Run]) -> List[Summary]:
    """One summary for each configuration, in the order of first runs; stores as in STORES."""
    return [_summary(configuration, of_it) for configuration, of_it in by_configuration(runs)]


def by_configuration(runs: Iterable[Run]) -> List[Tuple[Configuration, List[Run]]]:
    """The runs of each: settings in the order of first runs, stores in theirs."""
    groups: Dict[Configuration, List[Run]] = {}
    for run in runs:
        groups.setdefault(run.configuration, []).append(run)
    first = {comparable(key): number for number, key in reversed(list(enumerate(groups)))}
    ordered = sorted(groups, key=lambda key: (first[comparable(key)], stores.rank(key.store)))
    return [(key, groups[key]) for key in ordered]


def _summary(configuration: Configuration, runs: Sequence[Run]) -> Summary:
    right = [run for run in runs if run.result == "right"]
    medians, cpu_s = [run.median_s for run in right], [run.cpu_s for run in right]
    bounds = [run.bound_s for run in runs if run.bound_s is not None]
    errors = [run.error or "the weights are wrong" for run in runs if run.result != "right"]
    return Summary(
        **vars(configuration),
        median_s=statistics.median(medians) if medians else None,
        low_s=min(medians, default=None),
        high_s=max(medians, default=None),
        runs=len(runs),
        bound_s=statistics.median(bounds) if bounds else None,
        failed=len(errors),
        error=errors[0] if errors else None,
        cpu_s=spread(cpu_s) if cpu_s and None not in cpu_s else None,
    )


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))


class Mean(NamedTuple):
    mean: float
    low: float
    high: float


def mean(values: Collection[float]) -> Mean:
    return Mean(statistics.fmean(values), min(values), max(values))


def mean_difference(finals: Mapping[int, float], base: Mapping[int, float]) -> Optional[Mean]:
    """Of what trainings ended with, seed by seed; None if they have no seed in common."""
    both = [value - base[seed] for seed, value in finals.items() if seed in base]
    return mean(both) if both else None


def median_of(runs: Iterable[Run], value: Callable[[Run], Optional[float]]) -> Optional[float]:
    """Of those that are known."""
    known = [one for one in map(value, runs) if one is not None]
    return statistics.median(known) if known else None


def comparable(one: Configuration) -> Configuration:
    """What is alike in a fair comparison of stores."""
    return Configuration(**dict(vars(one.configuration), store="", slice_elements=None))


def speedup(summary: Summary, store: str, among: Iterable[Summary]) -> Optional[float]:
    """How many times as fast as `store` in the same setting; None where one of both has no right run."""
    others = [one for one in among if one.store == store and comparable(one) == comparable(summary)]
    others.sort(key=lambda one: one.slice_elements != summary.slice_elements)
    if not others or not others[0].median_s or not summary.median_s:
        return None
    return others[0].median_s / summary.median_s


def sent_by_a_card(run: Run, nics: Iterable[Nic], without_headers: bool = False) -> Optional[float]:
    """Bytes in an iteration, in the mean over the hosts whose cards were sampled; None if none was. `without_headers`:
    of packets, whose number may be unknown: then None."""
    of_run = [one for one in nics if (one.configuration, one.repeat) == (run.configuration, run.repeat)]
    if not of_run or (without_headers and not all(one.packets_out for one in of_run)):
        return None
    headers = PACKET_BYTES if without_headers else 0
    cards = [sum(one.bytes_out) - headers * sum(one.packets_out or ()) for one in of_run]
    return statistics.fmean(cards) / len(run.iteration_s)


def idle_share(bytes_: Sequence[float], interval_s: float, rate_mbit: Optional[float]) -> float:
    """Fraction of the intervals in which a NIC was idle in one direction; without a rate, in which no byte passed."""
    if not bytes_:
        raise ValueError("no interval was sampled")
    full = (rate_mbit or 0) * 1e6 / 8 * interval_s
    return sum(one <= IDLE_SHARE * full for one in bytes_) / len(bytes_)


# Words


def rate(mbit: Optional[float]) -> str:
    if mbit is None:
        return "no limit"
    return "%.4g Gbit/s" % (mbit / 1000) if mbit >= 1000 else "%.4g Mbit/s" % mbit


def runs_text(summaries: Iterable[Summary]) -> str:
    """How many there are of each configuration."""
    counts = sorted({one.runs for one in summaries})
    runs = "%d" % counts[0] if len(counts) == 1 else "%d to %d" % (counts[0], counts[-1])
    return "%s run%s" % (runs, "" if counts == [1] else "s")


def model_label(model: str) -> str:
    return MODELS.get(model, model)


def setting(one: Configuration, told: Sequence[str]) -> str:
    """In words: those of model, rate, compute, delay, hosts, slice, batch, release and clip that are to be told and
    say something."""
    parts = {
        "model": "%s, %.3g MB" % (model_label(one.model), one.bytes / 1e6),
        "rate": _rates(one),
        "compute": _computation(one),
        "delay": _links(one),
        "hosts": "%d host%s" % (one.hosts, "" if one.hosts == 1 else "s"),
        "slice": "" if one.slice_elements is None else slices(one.slice_elements),
        "batch": "" if one.batch is None else "batches of %d" % one.batch,
        "release": "gradients at the end" if one.release == "end" else "",
        "clip": "" if one.clip is None else "clipped to a norm of %g" % one.clip,
    }
    return ", ".join(parts[name] for name in told if parts[name])


def slices(elements: Union[int, str]) -> str:
    """Of so many each, or "auto"."""
    return "slices as P3 cuts them" if elements == "auto" else "slices of %d" % elements


def _links(one: Configuration) -> str:
    """What else is said of them besides their rates."""
    parts = [
        "%g ms delay" % one.delay_ms if one.delay_ms else "",
        "%g%% of packets lost" % (100 * one.packet_loss) if one.packet_loss else "",
        "%s links" % one.shaper if one.shaper else "",
        one.congestion or "",
    ]
    return ", ".join(filter(None, parts))


def _rates(one: Configuration) -> str:
    rates = ", ".join(map(rate, one.rates_mbit or [one.rate_mbit]))
    return rates if one.from_mbit is None else "%s, then %s" % (rate(one.from_mbit), rates)


def _computation(one: Configuration) -> str:
    """Its seconds, or what they were chosen by: one share at different rates is one setting."""
    if one.compute_share is not None:
        return "computation %g of communication" % one.compute_share
    return "" if one.compute_s is None else "%.4g s of computation" % one.compute_s
