"""A results file of `p3 bench`: what its lines hold, and how they are read.

    results = read(["results.jsonl"])

A results file holds one JSON object a line: `settings` (what was asked for, where and with what), then `run`s (one job
of one store) and `nic`s (bytes that crossed one host's NIC in such a job). A run belongs to the last settings of its
experiment above it. docs/benchmarks.md describes the fields. A field's type here says what its values may be.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from dataclasses import dataclass, fields
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Sequence, Set, Tuple, Union

from p3.errors import ConfigError
from p3.measure.replay import models

RESULTS = ("right", "wrong", "failed")

# Types of fields, see _RULES.
Text = Words = Computation = Release = Result = str
Positive = NotNegative = float
Count = AtLeastOne = int
SliceElements = Union[int, str]
Object = Dict[str, Any]
Seconds = Shares = Losses = Rates = Bytes = Tuple[float, ...]
Later = Optional  # older results lack it, or those of other experiments


@dataclass(frozen=True)
class Configuration:
    """What was run. All but `store`, and `slice_elements` where a store has slices, are alike in a fair comparison."""

    experiment: Text
    store: Text
    model: Text
    size: Optional[Positive]  # fraction of the model's parameters
    bytes: Positive
    computation: Computation
    compute_s: Optional[NotNegative]
    rate_mbit: Optional[Positive]  # of each NIC, each way; None: not limited
    delay_ms: NotNegative
    hosts: AtLeastOne
    workers: AtLeastOne
    servers: AtLeastOne
    slice_elements: Optional[SliceElements]
    rates_mbit: Later[Rates]  # of each host, where they differ; then rate_mbit is the greatest
    path: Later[Text]  # what else is unlike the lab as it is
    release: Later[Release]  # "end": all gradients became ready when the backward pass ended
    batch: Later[AtLeastOne]  # of real fully connected layers
    clip: Later[Positive]  # the global norm to which gradients were clipped
    compute_share: Later[Positive]  # compute_s was chosen so: of what the bound's communication takes
    strategy: Later[Text]  # how the servers' shares were chosen: "none": equal; or as `p3 plan` does
    from_mbit: Later[Positive]  # the links' rate before it changed to rate_mbit, while the job ran
    packet_loss: Later[NotNegative]  # share of the packets
    shaper: Later[Text]  # of the links, and TCP's congestion control, where they were chosen
    congestion: Later[Text]

    @property
    def configuration(self) -> Configuration:
        return Configuration(*(getattr(self, field.name) for field in fields(Configuration)))

    @property
    def ratio(self) -> Optional[float]:
        """Seconds that a NIC of this rate needs for the model's bytes, to seconds of computation."""
        if not self.rate_mbit or not self.compute_s:
            return None
        return self.bytes * 8 / (self.rate_mbit * 1e6) / self.compute_s


@dataclass(frozen=True)
class Run(Configuration):
    """One job. `iteration_s` is of the slowest worker in each iteration, without warm-up."""

    repeat: Count
    iteration_s: Seconds
    median_s: Optional[Positive]
    bound_s: Optional[Positive]
    bound_reason: Optional[Words]
    stall_s: Optional[NotNegative]
    worst_layer: Optional[Words]
    result: Result
    error: Optional[Words]
    cpu_s: Later[NotNegative]  # of all processes, for an iteration
    # Of a training: the loss that it shall reach, and each step's, with the seconds after which it was known.
    goal_loss: Later[Positive]
    losses: Later[Losses]
    loss_at_s: Later[Seconds]
    batch_accuracies: Later[Shares]  # of the batches whose losses these are
    heldout_loss: Later[Positive]  # at the end, of what no batch has; and the share of right answers
    heldout_accuracy: Later[NotNegative]
    accuracies: Later[Shares]  # after each epoch, with the seconds of training until then
    accuracy_at_s: Later[Seconds]
    card_bytes: Later[Positive]  # that each card sends in an iteration, by formula, in the mean over the hosts
    worker_peak_bytes: Later[AtLeastOne]  # of memory, of the worker and of the server that had most
    server_peak_bytes: Later[AtLeastOne]
    strategy_text: Later[Words]  # of the strategy's file
    predicted_s: Later[Positive]  # by the simulator
    before_s: Later[Seconds]  # of iterations before the links' rate changed, and of the first ones behind that, which
    settling_s: Later[Seconds]  # iteration_s has not


@dataclass(frozen=True)
class Nic(Configuration):
    """Bytes that one host's NIC carried in each interval of a run."""

    repeat: Count
    host: Count
    interval_s: Positive
    bytes_in: Bytes
    bytes_out: Bytes
    packets_out: Later[Bytes]


@dataclass(frozen=True)
class Settings:
    experiment: Text
    command: Text
    time: Text
    machine: Object
    versions: Object
    commit: Text
    options: Object

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

    def experiments(self) -> List[str]:
        """In the order of their first runs."""
        return unique(run.experiment for run in self.runs)

    def only(self, experiment: str) -> Results:
        return Results(*([one for one in part if one.experiment == experiment] for part in self))

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


def unique(values: Iterable) -> List:
    return list(dict.fromkeys(values))


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
    if kind not in _KINDS:
        raise ValueError("kind is %r; it must be settings, run or nic" % (kind,))
    one = _KINDS[kind](**_values(_KINDS[kind], found))
    if kind == "settings":
        announced.add(one.experiment)
    elif one.experiment not in announced:
        raise ValueError("a %s of experiment %r before any settings of it" % (kind, one.experiment))
    _check(one)
    results[list(_KINDS).index(kind)].append(one)


_KINDS: Dict[str, Callable] = {"settings": Settings, "run": Run, "nic": Nic}  # as Results has them


def _check(one) -> None:
    """What a field alone does not show. ValueError."""
    has_shares = getattr(one, "batch_accuracies", None) is not None
    for name, values, moments in (
        ("accuracies", "accuracies", "accuracy_at_s"), ("losses", "losses", "loss_at_s"),
        *([("batch accuracies", "batch_accuracies", "loss_at_s")] if has_shares else []),
    ):  # fmt: skip
        count, at = (len(getattr(one, field, None) or ()) for field in (values, moments))
        if count != at:
            raise ValueError("%d %s at %d moments" % (count, name, at))
    if isinstance(one, Nic) and (len(one.bytes_in) != len(one.bytes_out) or not one.bytes_in):
        raise ValueError("%d intervals in, %d out" % (len(one.bytes_in), len(one.bytes_out)))
    if isinstance(one, Nic) and len(one.packets_out or one.bytes_out) != len(one.bytes_out):
        raise ValueError("%d intervals of bytes, %d of packets" % (len(one.bytes_out), len(one.packets_out or ())))
    if not isinstance(one, Run):
        return
    if one.result == "failed":
        if not one.error:
            raise ValueError("a failed run must say its error")
        return
    if not one.iteration_s or one.median_s is None:
        raise ValueError("a run whose result is %r has iteration_s and median_s" % one.result)
    median = statistics.median(one.iteration_s)
    if abs(one.median_s / median - 1) > 1e-3:
        raise ValueError("median_s is %g, but the median of iteration_s is %g" % (one.median_s, median))


def _values(kind, found: Dict[str, Any]) -> Dict[str, Any]:
    """The fields of `found` that `kind` has, checked; others are for other readers."""
    values = {}
    for field in fields(kind):
        absence, type_ = re.fullmatch(r"(?:(\w+)\[)?(\w+)\]?", field.type).groups()
        if field.name not in found and absence != "Later":
            raise ValueError("%r is missing" % field.name)
        value = found.get(field.name)
        allowed, wanted = _RULES[type_]
        if not (absence and value is None) and not allowed(value):
            raise ValueError("%s is %.60r; it must be %s" % (field.name, value, wanted))
        values[field.name] = tuple(value) if isinstance(value, list) else value
    return values


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_above_0(value: Any) -> bool:
    return _is_count(value) and value > 0


def _numbers_from(least: float) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(_is_number(one) and one >= least for one in value)


def _among(*known: str) -> Callable[[Any], bool]:
    return lambda value: value in known


# By the name of a field's type.
_RULES: Dict[str, Tuple[Callable[[Any], bool], str]] = {
    "Text": (lambda value: isinstance(value, str) and value != "", "a text"),
    "Words": (lambda value: isinstance(value, str), "a text"),
    "Positive": (lambda value: _is_number(value) and value > 0, "a number above 0"),
    "NotNegative": (lambda value: _is_number(value) and value >= 0, "a number, 0 or more"),
    "Count": (_is_count, "a whole number, 0 or more"),
    "AtLeastOne": (_is_above_0, "a whole number above 0"),
    "SliceElements": (lambda value: value == "auto" or _is_above_0(value), "auto, or a whole number above 0"),
    "Object": (lambda value: isinstance(value, dict), "an object"),
    "Computation": (_among("emulated", "real"), "emulated or real"),
    "Release": (_among(*models.RELEASES), " or ".join(models.RELEASES)),
    "Result": (_among(*RESULTS), "one of " + ", ".join(RESULTS)),
    "Seconds": (_numbers_from(1e-9), "a list of seconds"),
    "Losses": (_numbers_from(-math.inf), "a list of losses"),
    "Shares": (_numbers_from(0), "a list of shares"),
    "Rates": (_numbers_from(1e-9), "a list of numbers above 0"),
    "Bytes": (_numbers_from(0), "a list of bytes"),
}
