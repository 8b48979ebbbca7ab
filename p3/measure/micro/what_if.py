"""Whether `p3 trace --what-if` is right: a run is recorded in the lab, its changes are predicted, and run there, too.

    sudo p3 bench what_if [--models vgg19,resnet50] [--hosts 4] [--rate 200mbit] [--compute 1] [--change hosts=2] ...

A job of the replay (docs/replay.md) with PyTorch runs on hosts of a lab, with a worker and a server on each, and leaves
a trace. `p3 trace --what-if` predicts from the trace what an iteration takes with each of the changes; then jobs run
with each of them, and with none, in turns. Given are the prediction, the median (least..greatest) of the jobs' median
iterations, and how far the prediction is off: as it is, and if it is only believed to be so many times the run as it
was. In the line "none" the prediction is of the run as simulated. Each model's computation is emulated.

Close other programs first.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Dict, List, Mapping, Sequence

from p3.measure import arguments as given
from p3.measure.bench import measured
from p3.measure.bench.computations import REPLAY
from p3.measure.bench.configuration import Configuration, Course
from p3.measure.jobs import machine, stores
from p3.measure.jobs.job import Job
from p3.measure.lab import hosts
from p3.measure.lab.command import rates
from p3.measure.replay import models
from p3.measure.simulate.options import of_hosts
from p3.measure.simulate.predict import predict
from p3.measure.tracing import what_if
from p3.measure.tracing.what_if import WhatIf
from p3.trace import lives

_STORE = "p3_torch"
_CHANGES = ("rate=100mbit", "rate=400mbit", "rate=200mbit:100mbit", "hosts=2", "hosts=6", "codec=int8", "codec=fp16",
            "slice=100000", "servers=2", "hosts=2,rate=100mbit,codec=int8")  # fmt: skip
_TIMEOUT_S = 600.0
_AS_IT_IS = WhatIf("none", {})


def main(arguments: Sequence[str]) -> int:
    parser = given.parser("what_if", __doc__)
    parser.add_argument("--models", type=given.names_among(models.NAMES), default=["vgg19", "resnet50"],
                        help="default vgg19,resnet50")  # fmt: skip
    parser.add_argument("--size", type=given.number(1e-6, 1), metavar="SHARE",
                        help="of a model's parameters (default: some 16 MB)")  # fmt: skip
    parser.add_argument("--compute", type=given.number(0, 1e4), default=1.0, metavar="SECONDS", help="default 1")
    parser.add_argument("--hosts", type=given.number(2, 64, int), default=4, metavar="N", help="default 4")
    parser.add_argument("--rate", type=rates, default=[200.0], metavar="R", help="of each link (default 200mbit)")
    parser.add_argument("--change", type=what_if.parse, action="append", dest="changes", metavar="CHANGE[,CHANGE]",
                        help="as --what-if of p3 trace; may be repeated (default: %s)" % " ".join(_CHANGES))
    parser.add_argument("--iterations", type=given.number(1, 10000, int), default=4, help="that count (default 4)")
    parser.add_argument("--repeats", type=given.number(1, 1000, int), default=3, help="default 3")
    options = parser.parse_args(arguments)
    if len(options.rate) != 1 or options.rate[0] is None:
        parser.error("--rate is one rate, of all links of the run that is recorded")
    changes = [_AS_IT_IS, *(options.changes or map(what_if.parse, _CHANGES))]
    print(machine.in_a_line())
    print(f"{options.hosts} hosts, {options.rate[0]:g} Mbit/s, {options.compute:g} s of computation")
    errors: List[float] = []
    for model in options.models:
        base = _configuration(model, options)
        predicted = _predicted(base, changes, options)
        seconds: Dict[str, List[float]] = {one.text: [] for one in changes}
        for _ in range(options.repeats):
            for one in changes:
                seconds[one.text].append(_seconds(base, one.changes, options))
        print(f"\n{model}, {models.load(model, base.size).bytes / 1e6:.1f} MB")
        errors += _print(predicted, seconds)
    print("\nchanges: off by %.1f%% in the mean, by %.1f%% at most" % (
        100 * statistics.fmean(errors), 100 * max(errors)
    ))  # fmt: skip
    return 0


def _configuration(model: str, options) -> Configuration:
    return Configuration(
        experiment="what_if", model=model, size=options.size or models.LAB_SIZES[model] * 0.2,
        compute_s=options.compute, rate_mbit=options.rate[0], delay_ms=0.0, hosts=options.hosts,
        slice_elements="auto",
    )  # fmt: skip


def _predicted(base: Configuration, changes: Sequence[WhatIf], options) -> Dict[str, float]:
    """Seconds by change, from a run that is recorded now."""
    with tempfile.TemporaryDirectory(prefix="p3-bench-") as folder:
        _seconds(base, {}, options, {"P3_TRACE": folder})
        trace = lives.load(folder)
    rate = tuple(options.rate)
    recorded = what_if.recorded_setting(trace, rate)
    return {one.text: predict(what_if.changed(recorded, rate, one)).mean_s for one in changes}


def _seconds(base: Configuration, changes: Mapping, options, environment: Mapping[str, str] = {}) -> float:
    """The median iteration of a job with these changes, of those that `p3 trace --what-if` knows."""
    count = changes.get("hosts", base.hosts)
    links = of_hosts(changes.get("rate", (base.rate_mbit,)), count)
    codec = changes.get("codec")
    store = stores.named(_STORE if codec is None else f"{_STORE}_{codec}")
    cut = {"P3_SLICE_ELEMENTS": str(changes.get("slice", "auto"))}
    course = Course(options.iterations, 1, 0.0, "none", machine.omp_threads(count), None)
    with hosts.lab(count, list(links)) as lab, tempfile.TemporaryDirectory(prefix="p3-bench-") as folder:
        with Job(
            store, lab, REPLAY.command(store, base, course, 0), root=lab[0], port=9100, folder=Path(folder),
            omp_threads=course.omp_threads, servers=changes.get("servers"), environment={**environment, **cut},
        ) as job:  # fmt: skip
            job.start()
            job.wait(_TIMEOUT_S)
            workers = [job.lines(f"worker {number}") for number in range(count)]
    summary = measured.summary(workers)
    if summary["result"] != "right":
        raise SystemExit(f"p3 bench what_if: the weights are wrong with {store.name} and {dict(changes)}")
    return summary["median_s"]


def _print(predicted: Mapping[str, float], seconds: Mapping[str, Sequence[float]]) -> List[float]:
    """The table of a model; the errors of its changes."""
    as_it_is = statistics.median(seconds[_AS_IT_IS.text])
    print("%-34s %10s %24s %8s %12s" % ("change", "predicted", "measured, s", "off by", "as a ratio"))
    errors = []
    for text, of_it in seconds.items():
        median = statistics.median(of_it)
        error = predicted[text] / median - 1
        ratio = predicted[text] / predicted[_AS_IT_IS.text] / (median / as_it_is) - 1
        print("%-34s %10.3f %24s %+7.1f%% %+11.1f%%" % (
            text, predicted[text], "%.3f (%.3f..%.3f)" % (median, min(of_it), max(of_it)), 100 * error, 100 * ratio
        ))  # fmt: skip
        errors.append(abs(error))
    return errors[1:]
