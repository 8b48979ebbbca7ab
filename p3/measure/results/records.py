"""What `p3 bench` measured: reads the results file, and does all arithmetic that tables and figures show.

    results = read(["results.jsonl"])
    for one in summarise(results.runs):
        print(one, one.median_s, one.above_bound)

A results file holds one JSON object a line: `settings` (what was asked for, where and with what), then `run`s (one job
of one store) and `nic`s (bytes that crossed one host's NIC in such a job). A run belongs to the last settings of its
experiment above it. docs/benchmarks.md describes the fields.

A run counts only if its weights were right. A configuration is summed up by the median of its runs' medians; its spread
is the least and the greatest of these. What failed stays in sight, in tables as in figures.
"""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass, fields
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Sequence, Set, Tuple

from p3.errors import ConfigError
from p3.measure.bench import nets
from p3.measure.replay import models

# In the order in which tables and figures show them.
STORES = {
    "dist_sync": "MXNet dist_sync",
    "mxnet_p3": "MXNet's P3",
    "p3_slicing": "p3_sync, slicing only",
    "p3_sync": "p3_sync",
    "p3_dgc_0.01": "p3_sync, DGC 1%",
    "p3_dgc_0.001": "p3_sync, DGC 0.1%",
    "p3_dense": "p3_sync, dense",
    "p3_factors": "p3_sync, factors",
    "p3_rule": "p3_sync, by the rule",
    "dist_async": "MXNet dist_async",
    "p3_ssp_1": "p3_ssp, 1 round apart",
    "p3_ssp_4": "p3_ssp, 4 rounds apart",
    "p3_async": "p3_async",
    "ddp_1": "DDP, buckets of 1 MB",
    "ddp_5": "DDP, buckets of 5 MB",
    "ddp_25": "DDP, buckets of 25 MB",
    "p3_torch": "p3.torch",
    "p3_torch_1": "p3.torch, 1 step apart",
    "p3_torch_4": "p3.torch, 4 steps apart",
}
# Whose workers may be rounds apart.
APART = ("dist_async", "p3_ssp_1", "p3_ssp_4", "p3_async", "p3_torch_1", "p3_torch_4")
MODELS = {
    "vgg19": "VGG-19",
    "resnet50": "ResNet-50",
    "inception_v3": "Inception V3",
    **{nets.name(depth): "ResNet-%d" % depth for depth in nets.DEPTHS},
    "gpt": "GPT",
    "sockeye": "Sockeye-like",
    "bert": "BERT-base-like",
}
RESULTS = ("right", "wrong", "failed")

# Speedups over dist_sync that the paper reports: the best of its bandwidth sweep (section 5.3).
PAPER_SPEEDUPS = {"resnet50": 1.26, "inception_v3": 1.18, "vgg19": 1.66, "sockeye": 1.38}

# An interval in which a NIC carried less than this share of its rate is idle; heartbeats stay below.
IDLE_SHARE = 0.05
# A median may be this much below the bound: what a token bucket lets through at once, and rounding.
BOUND_TOLERANCE = 0.01


@dataclass(frozen=True)
class Configuration:
    """What was run. All but `store`, and `slice_elements` where a store has slices, are alike in a fair comparison."""

    experiment: str
    store: str
    model: str
    size: Optional[float]  # fraction of the model's parameters
    bytes: float
    computation: str  # emulated or real
    compute_s: Optional[float]
    rate_mbit: Optional[float]  # of each NIC, each way; None: not limited
    delay_ms: float
    hosts: int
    workers: int
    servers: int
    slice_elements: Optional[int]
    rates_mbit: Optional[Tuple[float, ...]]  # of each host, where they differ; then rate_mbit is the greatest
    path: Optional[str]  # what else is unlike the lab as it is
    release: Optional[str]  # "end": all gradients became ready when the backward pass ended
    batch: Optional[int]  # of real fully connected layers

    @property
    def configuration(self) -> Configuration:
        return Configuration(*(getattr(self, field.name) for field in fields(Configuration)))

    @property
    def ratio(self) -> Optional[float]:
        """Seconds that a NIC of this rate needs for the model's bytes, to seconds of computation."""
        if not self.rate_mbit or not self.compute_s:
            return None
        return self.bytes * 8 / (self.rate_mbit * 1e6) / self.compute_s

    def __str__(self) -> str:
        return "%s: %s, %s, %d hosts, %s" % (self.experiment, self.store, self.model, self.hosts, rate(self.rate_mbit))


@dataclass(frozen=True)
class Run(Configuration):
    """One job. `iteration_s` is of the slowest worker in each iteration, without warm-up."""

    repeat: int
    iteration_s: Tuple[float, ...]
    median_s: Optional[float]
    bound_s: Optional[float]
    bound_reason: Optional[str]
    stall_s: Optional[float]
    worst_layer: Optional[str]
    result: str
    error: Optional[str]
    cpu_s: Optional[float] = None  # of all processes, for an iteration
    # Of a training: the loss that it shall reach, and each step's, with the seconds after which it was known.
    goal_loss: Optional[float] = None
    losses: Optional[Tuple[float, ...]] = None
    loss_at_s: Optional[Tuple[float, ...]] = None
    accuracies: Optional[Tuple[float, ...]] = None  # after each epoch, with the seconds of training until then
    accuracy_at_s: Optional[Tuple[float, ...]] = None
    card_bytes: Optional[float] = None  # that each card sends in an iteration, by formula, in the mean over the hosts
    worker_peak_bytes: Optional[int] = None  # of memory, of the worker and of the server that had most
    server_peak_bytes: Optional[int] = None


@dataclass(frozen=True)
class Nic(Configuration):
    """Bytes that one host's NIC carried in each interval of a run."""

    repeat: int
    host: int
    interval_s: float
    bytes_in: Tuple[float, ...]
    bytes_out: Tuple[float, ...]


@dataclass(frozen=True)
class Settings:
    experiment: str
    command: str
    time: str
    machine: Dict[str, Any]
    versions: Dict[str, Any]
    commit: str
    options: Dict[str, Any]

    @property
    def conditions(self) -> str:
        """Equal for settings whose runs may be compared."""
        machine = {name: value for name, value in self.machine.items() if not name.startswith("load")}
        matter = ("optimizer", "jitter", "pause", "learning_rate", "momentum", "throttled", "omp_threads", "inherited")
        options = {name: self.options.get(name) for name in matter}
        return json.dumps([machine, self.versions, self.commit, options], sort_keys=True)


class Results(NamedTuple):
    settings: List[Settings]
    runs: List[Run]
    nics: List[Nic]

    def mixtures(self) -> List[str]:
        """Experiments that were not measured under one set of conditions, each with a line that says so."""
        found = []
        for experiment in unique(one.experiment for one in self.settings):
            conditions = {one.conditions for one in self.settings if one.experiment == experiment}
            if len(conditions) > 1:
                found.append(
                    "%s: results of %d different commits, machines, versions or options are shown together"
                    % (experiment, len(conditions))
                )
        return found


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
    def is_below_bound(self) -> bool:
        """Impossible: the rate, the computation or the bound is not what it is taken for. But the bound is of workers
        that wait for each other; of others, one with a faster link may take less."""
        waits = self.configuration.store not in APART
        return waits and self.above_bound is not None and self.above_bound < -BOUND_TOLERANCE


def summarise(runs: Iterable[Run]) -> List[Summary]:
    """One summary for each configuration, in the order of first runs; stores as in STORES."""
    groups: Dict[Configuration, List[Run]] = {}
    for run in runs:
        groups.setdefault(run.configuration, []).append(run)
    first = {comparable(key): number for number, key in reversed(list(enumerate(groups)))}
    ordered = sorted(groups, key=lambda key: (first[comparable(key)], store_rank(key.store)))
    return [_summary(configuration, groups[configuration]) for configuration in ordered]


def _summary(configuration: Configuration, runs: Sequence[Run]) -> Summary:
    medians = [run.median_s for run in runs if run.result == "right"]
    bounds = [run.bound_s for run in runs if run.bound_s is not None]
    cpu_s = [run.cpu_s for run in runs if run.result == "right"]
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


def sent_by_a_card(run: Run, nics: Iterable[Nic]) -> Optional[float]:
    """Bytes in an iteration, in the mean over the hosts whose cards were sampled; None if none was."""
    cards = [sum(one.bytes_out) for one in nics if (one.configuration, one.repeat) == (run.configuration, run.repeat)]
    return statistics.fmean(cards) / len(run.iteration_s) if cards else None


def speedup(summary: Summary, store: str, among: Iterable[Summary]) -> Optional[float]:
    """How many times as fast as `store` in the same setting; None where one of both has no right run."""
    others = [one for one in among if one.store == store and comparable(one) == comparable(summary)]
    others.sort(key=lambda one: one.slice_elements != summary.slice_elements)
    if not others or not others[0].median_s or not summary.median_s:
        return None
    return others[0].median_s / summary.median_s


def idle_share(bytes_: Sequence[float], interval_s: float, rate_mbit: Optional[float]) -> float:
    """Fraction of the intervals in which a NIC was idle in one direction; without a rate, in which no byte passed."""
    if not bytes_:
        raise ValueError("no interval was sampled")
    full = (rate_mbit or 0) * 1e6 / 8 * interval_s
    return sum(one <= IDLE_SHARE * full for one in bytes_) / len(bytes_)


def store_rank(store: str) -> Tuple[int, str]:
    names = list(STORES)
    base = store if store in names else "p3_sync" if store.startswith("p3_") else names[-1]
    return names.index(base), "" if store == base else store


def store_label(store: str) -> str:
    """Also of p3_CODEC, any codec of gradients: this module needs no core."""
    return STORES.get(store) or ("p3_sync, " + store[len("p3_"):] if store.startswith("p3_") else store)


def rate(mbit: Optional[float]) -> str:
    if mbit is None:
        return "no limit"
    return "%.4g Gbit/s" % (mbit / 1000) if mbit >= 1000 else "%.4g Mbit/s" % mbit


def rates_text(one: Configuration) -> str:
    """The rate of all links; where they differ, that of each host."""
    return rate(one.rate_mbit) if one.rates_mbit is None else ", ".join(map(rate, one.rates_mbit))


def model_label(model: str) -> str:
    return MODELS.get(model, model)


def setting(one: Configuration, told: Sequence[str]) -> str:
    """In words: those of model, rate, compute, delay, hosts, slice and release that are to be told and say something.
    """
    parts = {
        "model": "%s, %.3g MB" % (model_label(one.model), one.bytes / 1e6),
        "rate": rates_text(one),
        "compute": "" if one.compute_s is None else "%.4g s of computation" % one.compute_s,
        "delay": "%g ms delay" % one.delay_ms if one.delay_ms else "",
        "hosts": "%d host%s" % (one.hosts, "" if one.hosts == 1 else "s"),
        "slice": "" if one.slice_elements is None else "slices of %d" % one.slice_elements,
        "batch": "" if one.batch is None else "batches of %d" % one.batch,
        "release": "gradients at the end" if one.release == "end" else "",
    }
    return ", ".join(parts[name] for name in told if parts[name])


def comparable(one: Configuration) -> Configuration:
    """What is alike in a fair comparison of stores."""
    return Configuration(**dict(vars(one.configuration), store="", slice_elements=None))


# Reading


def read(paths: Sequence[str]) -> Results:
    """All lines of the files. ConfigError names the file and the line of what is wrong."""
    results = Results([], [], [])
    for path in unique(map(str, paths)):
        try:
            with open(path, encoding="utf-8") as file:
                text = file.read()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("results %s cannot be read: %s" % (path, error)) from None
        announced: Set[str] = set()
        for number, line in enumerate(text.splitlines(), 1):
            try:
                _take(results, announced, _object(line))
            except ValueError as error:
                raise ConfigError("%s, line %d: %s" % (path, number, error)) from None
    if not results.runs:
        raise ConfigError("no run in %s: `p3 bench EXPERIMENT --out FILE` writes them" % ", ".join(map(str, paths)))
    return results


def of_records(records: Iterable[Dict[str, Any]]) -> Results:
    """Of lines that were not written, or not yet. ValueError says what is wrong with one."""
    results = Results([], [], [])
    announced: Set[str] = set()
    for record in records:
        _take(results, announced, record)
    return results


def _object(line: str) -> Dict[str, Any]:
    def refuse(name):
        raise ValueError("%s is no number" % name)

    try:
        found = json.loads(line, parse_constant=refuse)
    except json.JSONDecodeError as error:
        raise ValueError("no JSON (%s); a line cut short by an interruption can be deleted" % error) from None
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return found


def _take(results: Results, announced: Set[str], found: Dict[str, Any]) -> None:
    kind = found.get("kind")
    if kind == "settings":
        results.settings.append(_make(Settings, found))
        announced.add(results.settings[-1].experiment)
        return
    if kind not in ("run", "nic"):
        raise ValueError("kind is %r; it must be settings, run or nic" % (kind,))
    if kind == "run":
        one = _make(Run, found)
        _check_run(one)
        results.runs.append(one)
    else:
        one = _make(Nic, found)
        if len(one.bytes_in) != len(one.bytes_out) or not one.bytes_in:
            raise ValueError("%d intervals in, %d out" % (len(one.bytes_in), len(one.bytes_out)))
        results.nics.append(one)
    if one.experiment not in announced:
        raise ValueError("a %s of experiment %r before any settings of it" % (kind, one.experiment))


def _check_run(run: Run) -> None:
    if run.result == "failed":
        if not run.error:
            raise ValueError("a failed run must say its error")
        return
    if not run.iteration_s or run.median_s is None:
        raise ValueError("a run whose result is %r has iteration_s and median_s" % run.result)
    median = statistics.median(run.iteration_s)
    if abs(run.median_s / median - 1) > 1e-3:
        raise ValueError("median_s is %g, but the median of iteration_s is %g" % (run.median_s, median))
    if len(run.accuracies or ()) != len(run.accuracy_at_s or ()):
        raise ValueError("%d accuracies at %d moments" % (len(run.accuracies or ()), len(run.accuracy_at_s or ())))
    if len(run.losses or ()) != len(run.loss_at_s or ()):
        raise ValueError("%d losses at %d moments" % (len(run.losses or ()), len(run.loss_at_s or ())))


def _make(kind, found: Dict[str, Any]):
    """The fields of `found` that `kind` has, checked; others are for other readers."""
    values = {}
    for field in fields(kind):
        if field.name in _ADDED and field.name not in found:
            values[field.name] = None
            continue
        if field.name not in found:
            raise ValueError("%r is missing" % field.name)
        value = found[field.name]
        allowed, wanted = _RULES[field.name]
        optional = "Optional" in field.type and value is None
        if not optional and not allowed(value):
            raise ValueError("%s is %.60r; it must be %s" % (field.name, value, wanted))
        values[field.name] = tuple(value) if isinstance(value, list) else value
    return kind(**values)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _numbers_from(least: float) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(_is_number(one) and one >= least for one in value)


# Older results lack them, or those of other experiments.
_ADDED = ("rates_mbit", "path", "release", "batch", "cpu_s", "goal_loss", "losses", "loss_at_s", "accuracies",
          "accuracy_at_s", "card_bytes", "worker_peak_bytes", "server_peak_bytes")  # fmt: skip

_TEXT = (lambda value: isinstance(value, str) and value != "", "a text")
_POSITIVE = (lambda value: _is_number(value) and value > 0, "a number above 0")
_NOT_NEGATIVE = (lambda value: _is_number(value) and value >= 0, "a number, 0 or more")
_COUNT = (_is_count, "a whole number, 0 or more")
_AT_LEAST_ONE = (lambda value: _is_count(value) and value > 0, "a whole number above 0")
_MAPPING = (lambda value: isinstance(value, dict), "an object")
_RULES: Dict[str, Tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("experiment", "store", "model", "path", "command", "time", "commit"), _TEXT),
    **dict.fromkeys(("bound_reason", "worst_layer", "error"), (lambda value: isinstance(value, str), "a text")),
    **dict.fromkeys(("size", "bytes", "card_bytes", "rate_mbit", "interval_s", "median_s"), _POSITIVE),
    **dict.fromkeys(("bound_s", "goal_loss"), _POSITIVE),
    **dict.fromkeys(("compute_s", "delay_ms", "stall_s", "cpu_s"), _NOT_NEGATIVE),
    **dict.fromkeys(("hosts", "workers", "servers", "slice_elements", "batch"), _AT_LEAST_ONE),
    **dict.fromkeys(("worker_peak_bytes", "server_peak_bytes"), _AT_LEAST_ONE),
    **dict.fromkeys(("repeat", "host"), _COUNT),
    **dict.fromkeys(("machine", "versions", "options"), _MAPPING),
    "computation": (lambda value: value in ("emulated", "real"), "emulated or real"),
    "release": (lambda value: value in models.RELEASES, " or ".join(models.RELEASES)),
    "result": (lambda value: value in RESULTS, "one of " + ", ".join(RESULTS)),
    "iteration_s": (_numbers_from(1e-9), "a list of seconds"),
    "losses": (_numbers_from(-math.inf), "a list of losses"),
    "loss_at_s": (_numbers_from(1e-9), "a list of seconds"),
    "accuracies": (_numbers_from(0), "a list of shares"),
    "accuracy_at_s": (_numbers_from(1e-9), "a list of seconds"),
    "rates_mbit": (_numbers_from(1e-9), "a list of numbers above 0"),
    "bytes_in": (_numbers_from(0), "a list of bytes"),
    "bytes_out": (_numbers_from(0), "a list of bytes"),
}


def unique(values: Iterable) -> List:
    return list(dict.fromkeys(values))
