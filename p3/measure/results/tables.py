"""The results of `p3 bench` as tables: for each setting every store's time, the bound, and how p3_sync stands to both.

    print(text(tables(results)))          # for a terminal
    print(markdown(tables(results)))      # for docs/benchmarks.md

`p3 bench` and `p3 plot` print the same. All arithmetic is in results.py.
"""

from __future__ import annotations

import math
import operator
import statistics
from dataclasses import replace
from functools import partial
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from p3.measure.bench import accuracies, curves, train
from p3.measure.bench.results import (
    IDLE_SHARE, PAPER_SPEEDUPS, Configuration, Nic, Results, Run, Spread, Summary, comparable, idle_share, model_label,
    rate, sent_by_a_card, setting, speedup, spread, store_rank, summarise, unique,
)  # fmt: skip

OURS = "p3_sync"
BASES = {
    OURS: ("dist_sync", "mxnet_p3"),
    "p3_async": ("dist_async", "p3_sync"),
    "p3_torch": ("ddp_1", "ddp_5", "ddp_25"),
}
ERROR_CHARACTERS = 100


class Table(NamedTuple):
    title: str
    rows: Sequence[Sequence[str]]  # the first one holds the columns' names
    notes: Sequence[str] = ()


class _Row(NamedTuple):
    """What has a row of its own in an experiment's table; all else is in the table's title."""

    name: str
    cell: Callable[[Configuration], str]
    titled: Sequence[str]


_MODEL = _Row("model", lambda one: setting(one, ["model"]), ("rate", "compute", "delay", "hosts"))
_SLICE = _Row("slice", lambda one: setting(one, ["slice"]) or "-", ("model", "rate", "compute", "delay", "hosts"))
_RATE = _Row("rate", lambda one: rate(one.rate_mbit), ("model", "compute", "delay", "hosts"))
_ROWS: Dict[str, _Row] = {
    "bandwidth": _RATE,
    "compute": _RATE,
    "scale": _Row("hosts", lambda one: "%d" % one.hosts, ("model", "rate", "compute", "delay")),
    "slices": _SLICE,
    "staleness": _Row("rates", lambda one: setting(one, ["rate"]), ("model", "compute", "delay", "hosts")),
    "paths": _Row("path", lambda one: one.path or "-", ("model", "rate", "compute", "delay", "hosts")),
    "ratio": _Row("ratio", lambda one: "-" if one.ratio is None else "%.2f" % one.ratio,
                  ("model", "rate", "delay", "hosts")),
    "validation": _Row("configuration", lambda one: setting(one, ("model", "rate", "compute", "hosts", "slice")),
                       ("delay",)),
}  # fmt: skip


def tables(results: Results) -> List[Table]:
    """Experiments in the order of their first runs."""
    made = []
    for experiment in unique(run.experiment for run in results.runs):
        if experiment in _COUNTED:
            made += _counted([run for run in results.runs if run.experiment == experiment], results.nics)
            continue
        if experiment == "accuracy":
            made += _accuracies(accuracies.bands(run for run in results.runs if run.experiment == experiment))
        made += _experiment(experiment, summarise(run for run in results.runs if run.experiment == experiment))
        if experiment == "learn":
            made += _seconds_to_goals(curves.curves(run for run in results.runs if run.experiment == experiment))
        if experiment == "compute":
            of_it = [run for run in results.runs if run.experiment == experiment]
            made += _last_losses(of_it) + _ways_to_goals(of_it)
        if experiment == "bandwidth":
            made += _best_speedups([one for one in summarise(results.runs) if one.experiment == experiment])
    return made + _idle_shares([one for one in results.nics if one.experiment == "utilization"])


def text(made: Sequence[Table]) -> str:
    return "\n\n".join("\n".join([one.title, *_columns(one.rows), *one.notes]) for one in made)


def markdown(made: Sequence[Table]) -> str:
    parts = []
    for one in made:
        head, *rows = [[cell.replace("|", "/") for cell in row] for row in one.rows]
        lines = ["| %s |" % " | ".join(row) for row in (head, ["---"] * len(head), *rows)]
        parts += ["**%s**" % one.title, "\n".join(lines), *one.notes]
    return "\n\n".join(parts)


def _columns(rows: Sequence[Sequence[str]]) -> List[str]:
    """Names of two words take two lines, so that a column is as narrow as its cells."""
    names = [name.rpartition(" ") for name in rows[0]]
    head = [[first for first, _, _ in names], [last for _, _, last in names]]
    lines = [*(head if any(head[0]) else head[1:]), *rows[1:]]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]


# Times


def _experiment(experiment: str, summaries: Sequence[Summary]) -> List[Table]:
    """A table for each title, with a row for each setting."""
    row = _ROWS.get(experiment, _MODEL)
    sized = {(comparable(one), one.slice_elements) for one in summaries if one.slice_elements is not None}
    has_several = len(sized) > len({place for place, _ in sized})  # sizes in one setting; by itself P3 takes one
    told = [*row.titled, "release", *(["slice"] if has_several and row is not _SLICE else [])]
    titles: Dict[str, Dict[Configuration, Dict[str, Summary]]] = {}
    for one in summaries:
        for place in _places(one, summaries):
            title = ": ".join(filter(None, (experiment, setting(place, told))))
            titles.setdefault(title, {}).setdefault(place, {})[one.store] = one
    made = [Table(title, _times(row, places)) for title, places in titles.items()]
    made[-1] = made[-1]._replace(notes=_notes(summaries))
    return made + [
        Table(title + ": CPU seconds", _cpu_times(row, places), [_CPU_NOTE])
        for title, places in titles.items()
        if any(one.cpu_s is not None for by_store in places.values() for one in by_store.values())
    ]


def _places(one: Summary, summaries: Sequence[Summary]) -> List[Configuration]:
    """The rows that show a summary: a store that knows no slices stands beside P3's of every size."""
    if one.slice_elements is not None:
        sizes = [one.slice_elements]
    else:
        beside = [other.slice_elements for other in summaries if comparable(other) == comparable(one)]
        sizes = unique(size for size in beside if size is not None) or [None]
    return [replace(comparable(one), slice_elements=size) for size in sizes]


def _times(row: _Row, places: Dict[Configuration, Dict[str, Summary]]) -> List[List[str]]:
    shown = [one for by_store in places.values() for one in by_store.values()]
    stores = sorted({one.store for one in shown}, key=store_rank)
    columns = [(store, partial(_time, store)) for store in stores]
    if any(one.bound_s for one in shown):
        columns.append(("bound", _bound))
    for ours in (store for store in stores if store in BASES):
        columns += [("over " + base, partial(_over, ours, base)) for base in BASES[ours] if base in stores]
        if any(one.bound_s for one in shown):
            columns.append(("above bound", partial(_above, ours)))
    return [
        [row.name, *(name for name, _ in columns)],
        *([row.cell(place), *(cell(by_store) for _, cell in columns)] for place, by_store in places.items()),
    ]


_CPU_NOTE = "CPU seconds that all processes of the job use for an iteration, on all hosts: median (least..greatest)."


def _cpu_times(row: _Row, places: Dict[Configuration, Dict[str, Summary]]) -> List[List[str]]:
    stores = sorted({store for by_store in places.values() for store in by_store}, key=store_rank)
    return [
        [row.name, *stores],
        *([row.cell(place), *(_cpu(by_store.get(store)) for store in stores)] for place, by_store in places.items()),
    ]


def _cpu(one: Optional[Summary]) -> str:
    return "-" if one is None or one.cpu_s is None else _spread(one.cpu_s)


def _bound(by_store: Dict[str, Summary]) -> str:
    return _or_dash(min((one.bound_s for one in by_store.values() if one.bound_s), default=None), _seconds)


def _over(store: str, base: str, by_store: Dict[str, Summary]) -> str:
    ours = by_store.get(store)
    return _or_dash(ours and speedup(ours, base, by_store.values()), "{:.2f}x".format)


def _above(store: str, by_store: Dict[str, Summary]) -> str:
    ours = by_store.get(store)
    return _or_dash(ours and ours.above_bound, "{:+.1%}".format)


def _time(store: str, by_store: Dict[str, Summary]) -> str:
    one = by_store.get(store)
    if one is None:
        return "-"
    if one.median_s is None:
        return "failed"
    seconds = _spread(Spread(one.median_s, one.low_s, one.high_s))
    some = " %d of %d" % (one.runs - one.failed, one.runs) if one.failed else ""
    return seconds + some + (" (!)" if one.is_below_bound else "")


def _spread(seconds: Spread) -> str:
    return "%s (%s..%s)" % tuple(map(_seconds, seconds))


def _seconds(value: float) -> str:
    """Three significant digits."""
    return "%.*f" % (max(0, 2 - math.floor(math.log10(value))), value)


def _or_dash(value: Optional[float], form: Callable[[float], str]) -> str:
    return "-" if value is None else form(value)


def _notes(summaries: Sequence[Summary]) -> List[str]:
    counts = sorted({one.runs for one in summaries})
    runs = "%d" % counts[0] if len(counts) == 1 else "%d to %d" % (counts[0], counts[-1])
    emulated = any(one.computation == "emulated" for one in summaries)
    notes = [
        "Seconds for an iteration: median (least..greatest) of %s run%s. %s"
        % (runs, "" if counts == [1] else "s",
           "Computation is emulated: a timed wait for each layer." if emulated else "Nothing is emulated.")
    ]  # fmt: skip
    for one in summaries:
        if one.failed:
            error = " ".join((one.error or "").split())[:ERROR_CHARACTERS]
            notes.append("%s: %d of %d runs failed: %s" % (one, one.failed, one.runs, error))
    if any(one.is_below_bound for one in summaries):
        notes.append("(!) Below the bound, which is impossible: check the rate of the network, and the bound.")
    return notes


def _seconds_to_goals(found: Sequence[curves.Curve]) -> List[Table]:
    """A row for each training, a column for each store, and how many times as fast as the best DDP p3.torch is."""
    places: Dict[Tuple[Configuration, float], Dict[str, curves.Curve]] = {}
    for one in found:
        places.setdefault((comparable(one.configuration), one.goal_loss), {})[one.configuration.store] = one
    stores = sorted({one.configuration.store for one in found}, key=store_rank)
    rows = []
    for (place, goal_loss), by_store in places.items():
        name = "%s at %s, to %g" % (model_label(place.model), rate(place.rate_mbit), goal_loss)
        ddp = [one.goal_s.median for store, one in by_store.items() if store.startswith("ddp_") and one.goal_s]
        ours = by_store.get("p3_torch")
        gain = min(ddp) / ours.goal_s.median if ddp and ours and ours.goal_s else None
        cells = [_goal_time(by_store.get(store)) for store in stores]
        rows.append([name, *cells, _or_dash(gain, "{:.2f}x".format)])
    if not rows:
        return []
    note = (
        "Seconds from the first step's begin until the loss, as the mean of %d steps, is no greater than the goal: "
        "median (least..greatest)." % curves.SMOOTHED_STEPS
    )
    title = "learn: seconds to a given loss"
    return [Table(title, [["training", *stores, "over best DDP"], *rows], [note])]


def _last_losses(runs: Sequence[Run]) -> List[Table]:
    """Of trainings to which each store gives as many steps: a row for each rate, a column for each store."""
    known = [run for run in runs if run.losses and run.result == "right"]
    stores = sorted({run.store for run in known}, key=store_rank)
    rows = []
    for place in unique(comparable(run.configuration) for run in known):
        row = [rate(place.rate_mbit)]
        for store in stores:
            its = [run for run in known if run.store == store and comparable(run.configuration) == place]
            losses = [statistics.fmean(run.losses[-train.LAST_STEPS:]) for run in its]
            row.append(_spread(Spread(statistics.median(losses), min(losses), max(losses))) if losses else "-")
        rows.append(row)
    note = "Mean over the workers and the last %d steps: median (least..greatest)." % train.LAST_STEPS
    return [Table("compute: loss at the end", [["rate", *stores], *rows], [note])] if rows else []


def _accuracies(found: Sequence[accuracies.Band]) -> List[Table]:
    """A table for each net and rate, in it a row for each store."""
    made = []
    for place in unique(comparable(one.configuration) for one in found):
        by_store = {one.configuration.store: one for one in found if comparable(one.configuration) == place}
        rows = []
        for store, one in by_store.items():
            less = accuracies.differences(one, by_store[OURS]) if OURS in by_store and store != OURS else None
            rows.append([
                store, "%.4f (%.4f..%.4f)" % accuracies.mean(one.finals.values()),
                _or_dash(less, lambda mean: "%+.4f (%+.4f..%+.4f)" % mean),
                _spread(one.goal_s) if one.goal_s else "not reached", _seconds(one.at_s[-1]), "%d" % len(one.finals),
            ])  # fmt: skip
        head = ["store", "final accuracy", "against " + OURS, "seconds to %g" % accuracies.GOAL, "all seconds", "seeds"]
        notes = [
            "Test accuracy after the last epoch, and seed by seed against p3_sync: mean (least..greatest) over the "
            "seeds. Seconds of training: medians; tests are not counted.",
            accuracies.HERE,
            accuracies.PAPER,
        ]
        made.append(Table("accuracy: " + setting(place, ("model", "rate", "delay", "hosts")), [head, *rows], notes))
    return made


# What reduces the bytes on the cards, and beside which store.
_COUNTED = {"dgc": OURS, "factors": "p3_dense"}


def _counted(runs: Sequence[Run], nics: Sequence[Nic]) -> List[Table]:
    """A table for each setting, in it a row for each store."""
    summaries, plain = summarise(runs), _COUNTED[runs[0].experiment]
    made = []
    for place in unique(comparable(one) for one in summaries):
        by_store = {one.store: one for one in summaries if comparable(one) == place}
        rows = []
        for store, one in by_store.items():
            right = [run for run in runs if run.configuration == one.configuration and run.result == "right"]
            counted = _median_of(right, partial(sent_by_a_card, nics=nics))
            formula, *memory = (
                _median_of(right, operator.attrgetter(field))
                for field in ("card_bytes", "worker_peak_bytes", "server_peak_bytes")
            )
            rows.append([
                store, _time(store, by_store), _or_dash(one.bound_s, _seconds), _above(store, by_store),
                _over(store, plain, by_store), _cpu(one), _or_dash(counted, _megabytes), _or_dash(formula, _megabytes),
                _or_dash(counted and formula and counted / formula, "{:.3f}".format),
                *(_or_dash(peak, _megabytes) for peak in memory),
            ])  # fmt: skip
        head = ["store", "seconds", "bound", "above bound", "over " + plain, "CPU s",
                "MB counted", "by formula", "over it", "worker MB", "server MB"]
        told = ("model", "rate", "compute", "delay", "hosts", "batch", "release")
        notes = [*_notes(list(by_store.values())), _CARD_NOTE]
        made.append(Table(f"{runs[0].experiment}: " + setting(place, told), [head, *rows], notes))
    return made


_CARD_NOTE = (
    "MB that each network card sends in an iteration, and receives, in the mean over the hosts: counted by the kernel, "
    "which includes headers of TCP and IP, acknowledgements and heartbeats; and computed of P3's frames alone. "
    "Of memory, the most that a worker and a server have had."
)


def _median_of(runs: Sequence[Run], value: Callable[[Run], Optional[float]]) -> Optional[float]:
    known = [one for one in map(value, runs) if one is not None]
    return statistics.median(known) if known else None


def _megabytes(bytes_: float) -> str:
    return _seconds(bytes_ / 1e6)


def _ways_to_goals(runs: Sequence[Run]) -> List[Table]:
    """Of trainings that shall reach a loss: a table for each setting, a row for each store."""
    known = [run for run in runs if run.losses and run.goal_loss and run.result == "right"]
    made = []
    for place, goal_loss in unique((comparable(run.configuration), run.goal_loss) for run in known):
        here = [run for run in known if (comparable(run.configuration), run.goal_loss) == (place, goal_loss)]
        rows = []
        for store in sorted({run.store for run in here}, key=store_rank):
            its = [run for run in here if run.store == store]
            steps = [curves.steps_to(goal_loss, run.losses) for run in its]
            if None in steps:
                rows.append([store, "not reached", "-", "-"])
                continue
            seconds = [run.loss_at_s[count - 1] for run, count in zip(its, steps)]
            paces = [count / one for count, one in zip(steps, seconds)]
            rows.append([store, *(_spread(spread(values)) for values in (steps, seconds, paces))])
        title = "compute: to a loss of %g: %s" % (goal_loss, setting(place, ("model", "rate", "delay", "hosts")))
        made.append(Table(title, [["store", "steps", "seconds", "steps a second"], *rows], [_WAYS_NOTE]))
    return made


_WAYS_NOTE = (
    "A step takes as many batches as there are workers. The loss is reached when the mean of %d steps is no greater: "
    "median (least..greatest)." % curves.SMOOTHED_STEPS
)


def _goal_time(one: Optional[curves.Curve]) -> str:
    if one is None:
        return "-"
    return _spread(one.goal_s) if one.goal_s else "not reached"


def _best_speedups(summaries: Sequence[Summary]) -> List[Table]:
    rows = []
    for model in unique(one.model for one in summaries):
        ours = [one for one in summaries if (one.model, one.store) == (model, OURS)]
        found = [(times, one) for one in ours for times in [speedup(one, "dist_sync", summaries)] if times is not None]
        if found:
            times, one = max(found, key=lambda pair: pair[0])
            paper = _or_dash(PAPER_SPEEDUPS.get(model), _gain)
            rows.append([model_label(model), _gain(times), rate(one.rate_mbit), paper])
    title = "bandwidth: the best speedup of p3_sync over dist_sync"
    return [Table(title, [["model", "best", "at", "paper's best"], *rows])] if rows else []


def _gain(times: float) -> str:
    return "{:+.0%}".format(times - 1)


# Network cards


def _idle_shares(nics: Sequence[Nic]) -> List[Table]:
    """Of each host's card, median over the repeats."""
    cards: Dict[Tuple[Configuration, int], List[Nic]] = {}
    for nic in nics:
        cards.setdefault((nic.configuration, nic.host), []).append(nic)
    titles: Dict[str, List[List[str]]] = {}
    for one, host in sorted(cards, key=lambda card: (store_rank(card[0].store), card[1])):
        shares = [_idle(cards[one, host], way) for way in ("bytes_out", "bytes_in")]
        title = setting(one, ("model", "rate", "compute", "delay", "hosts", "release"))
        titles.setdefault(title, []).append([one.store, "%d" % host, *shares])
    made = [
        Table("idle share of network cards: " + title, [["store", "host", "sending", "receiving"], *rows])
        for title, rows in titles.items()
    ]
    if made:
        interval_ms = 1e3 * nics[0].interval_s
        note = "Idle: an interval of %g ms in which at most %g%% of the rate passed." % (interval_ms, 100 * IDLE_SHARE)
        made[-1] = made[-1]._replace(notes=[note])
    return made


def _idle(samples: Sequence[Nic], way: str) -> str:
    shares = [idle_share(getattr(one, way), one.interval_s, one.rate_mbit) for one in samples]
    return "{:.0%}".format(statistics.median(shares))
