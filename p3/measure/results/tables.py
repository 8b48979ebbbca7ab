"""The results of `p3 bench` as tables: for each setting every store's time, the bound, and how stores stand to it.

    print(text(made))          # for a terminal
    print(markdown(made))      # for docs/benchmarks.md

An experiment's entry (p3/measure/bench/experiments.py) says which of these tables it has: each is made of the Results
of that experiment alone. All arithmetic is in summaries.py.
"""

from __future__ import annotations

import math
import operator
import statistics
from dataclasses import replace
from functools import partial
from typing import Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from p3.frontend.local_steps.options import Outer
from p3.measure.jobs import stores
from p3.measure.planning.verdict import RANKED_APART, Judged, Verdict, verdict
from p3.measure.results import accuracies, curves, endings, seeds
from p3.measure.results.records import Configuration, Nic, Results, unique
from p3.measure.results.summaries import (
    FAR_FROM_BOUND, IDLE_SHARE, PAPER_SPEEDUPS, Spread, Summary, comparable, idle_share, mean, mean_difference,
    median_of, model_label, rate, runs_text, sent_by_a_card, setting, speedup, spread, summarise,
)  # fmt: skip
from p3.measure.trainings import mxnet_convnet

OURS = stores.OURS
ERROR_CHARACTERS = 100


class Table(NamedTuple):
    title: str
    rows: Sequence[Sequence[str]]  # the first one holds the columns' names
    notes: Sequence[str] = ()


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


class Row(NamedTuple):
    """What has a row of its own in a table of times; all else is in the table's title."""

    name: str
    cell: Callable[[Configuration], str]
    titled: Sequence[str]


MODEL = Row("model", lambda one: setting(one, ["model"]), ("rate", "compute", "delay", "hosts"))
SLICE = Row("slice", lambda one: setting(one, ["slice"]) or "-", ("model", "rate", "compute", "delay", "hosts"))
RATE = Row("rate", lambda one: rate(one.rate_mbit), ("model", "compute", "delay", "hosts"))
RATES = Row("rates", lambda one: setting(one, ["rate"]), ("model", "compute", "delay", "hosts"))
HOSTS = Row("hosts", lambda one: "%d" % one.hosts, ("model", "rate", "compute", "delay"))
PATH = Row("path", lambda one: one.path or "-", ("model", "rate", "compute", "delay", "hosts"))
TOLERANCE = PATH._replace(name="goes on without lost")
DISTANCE = Row("distance", lambda one: setting(one, ["delay"]) or "-", ("model", "rate", "compute", "hosts"))
RATIO = Row("ratio", lambda one: "-" if one.ratio is None else "%.2f" % one.ratio, ("model", "rate", "delay", "hosts"))
ALL = Row("configuration", lambda one: setting(one, ("model", "rate", "compute", "hosts", "slice")), ("delay",))


def times(row: Row, results: Results) -> List[Table]:
    """A table for each title, with a row for each setting; and another one of CPU seconds, where they are known."""
    summaries = summarise(results.runs)
    sized = {(comparable(one), one.slice_elements) for one in summaries if one.slice_elements is not None}
    has_several = len(sized) > len({place for place, _ in sized})  # sizes in one setting; by itself P3 takes one
    told = [*row.titled, "release", "clip", *(["slice"] if has_several and row is not SLICE else [])]
    titles: Dict[str, Dict[Configuration, Dict[str, Summary]]] = {}
    for one in summaries:
        for place in _places(one, summaries):
            title = ": ".join(filter(None, (one.experiment, setting(place, told))))
            titles.setdefault(title, {}).setdefault(place, {})[one.store] = one
    made = [Table(title, _times(row, places)) for title, places in titles.items()]
    made[-1] = made[-1]._replace(notes=_notes(summaries))
    return made + [
        Table(title + ": CPU seconds", _cells(row, places, [(store, partial(_cpu, store)) for store in _shown(places)]),
              [_CPU_NOTE])
        for title, places in titles.items()
        if any(one.cpu_s is not None for by_store in places.values() for one in by_store.values())
    ]  # fmt: skip


def times_by_compression(row: Row, results: Results) -> List[Table]:
    """times() of the stores that send all as it is; and for each setting with compressed ones a table of all, with a
    row for each store: what no schedule with its bytes can beat, and how it stands to the usual way, DDP, with and
    without a hook."""
    compressed = {run.store for run in results.runs if stores.named(run.store).compression is not None}
    plain = results._replace(runs=[run for run in results.runs if run.store not in compressed])
    made = times(row, plain) if plain.runs else []
    if not compressed:
        return made
    summaries = summarise(results.runs)
    for place in unique(comparable(one) for one in summaries if one.store in compressed):
        by_store = {one.store: one for one in summaries if comparable(one) == place}
        bases = [one for one in (_best_ddp(by_store, False), _best_ddp(by_store, True)) if one is not None]
        rows = [
            [
                store, _time(store, by_store), _or_dash(one.bound_s, _seconds), _above(store, by_store),
                *(_over(store, base, by_store) for base in bases), _cpu(store, by_store),
            ]
            for store, one in by_store.items()
        ]  # fmt: skip
        head = ["store", "seconds", "bound", "above bound", *("over " + base for base in bases), "CPU s"]
        title = "%s: %s" % (_name(results), setting(place, _TOLD_OF_COMPRESSED))
        made.append(Table(title, [head, *rows], [*_notes(list(by_store.values())), _COMPRESSED_NOTE]))
    return made


_TOLD_OF_COMPRESSED = ("model", "rate", "compute", "delay", "hosts", "release", "clip")
_COMPRESSED_NOTE = (
    "The bound is that of P3's frames, compressed so; for DDP's half precision hooks it counts half of all bytes, for "
    "others it is not known. Over: times as fast as DDP's best bucket size, without a hook, and with half precision."
)


def _best_ddp(by_store: Dict[str, Summary], halved: bool) -> Optional[str]:
    """Its fastest bucket size, sent as it is, or with a half precision hook; None where none was right."""
    found = []
    for one in by_store.values():
        store = stores.named(one.store)
        fits = store.compression is None if not halved else store.compression and store.compression.halves_all
        if store.is_ddp and one.median_s and fits:
            found.append(one)
    return min(found, key=lambda one: one.median_s).store if found else None


_Column = Tuple[str, Callable[[Dict[str, Summary]], str]]  # its name, and a cell of the stores in one place


def _places(one: Summary, summaries: Sequence[Summary]) -> List[Configuration]:
    """The rows that show a summary: a store that knows no slices stands beside P3's of every size."""
    if one.slice_elements is not None:
        sizes = [one.slice_elements]
    else:
        beside = [other.slice_elements for other in summaries if comparable(other) == comparable(one)]
        sizes = unique(size for size in beside if size is not None) or [None]
    return [replace(comparable(one), slice_elements=size) for size in sizes]


def _shown(places: Dict[Configuration, Dict[str, Summary]]) -> List[str]:
    return sorted({store for by_store in places.values() for store in by_store}, key=stores.rank)


def _cells(row: Row, places: Dict[Configuration, Dict[str, Summary]], columns: Sequence[_Column]) -> List[List[str]]:
    return [
        [row.name, *(name for name, _ in columns)],
        *([row.cell(place), *(cell(by_store) for _, cell in columns)] for place, by_store in places.items()),
    ]


def _times(row: Row, places: Dict[Configuration, Dict[str, Summary]]) -> List[List[str]]:
    shown = _shown(places)
    has_bound = any(one.bound_s for by_store in places.values() for one in by_store.values())
    columns: List[_Column] = [(store, partial(_time, store)) for store in shown]
    columns += [("bound", _bound)] * has_bound
    for store in shown:
        over = stores.named(store).over
        columns += [("over " + base, partial(_over, store, base)) for base in over if base in shown]
        columns += [("above bound", partial(_above, store))] * (has_bound and bool(over))
    return _cells(row, places, columns)


_CPU_NOTE = "CPU seconds that all processes of the job use for an iteration, on all hosts: median (least..greatest)."


def _cpu(store: str, by_store: Dict[str, Summary]) -> str:
    one = by_store.get(store)
    return _or_dash(one and one.cpu_s, _spread)


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
    """Three significant digits. 0 is of processor time, which the kernel counts in ticks: a short run may have none."""
    if value == 0:
        return "0"
    return "%.*f" % (max(0, 2 - math.floor(math.log10(value))), value)


def _megabytes(bytes_: float) -> str:
    return _seconds(bytes_ / 1e6)


def _or_dash(value, form: Callable[..., str]) -> str:
    return "-" if value is None else form(value)


def _notes(summaries: Sequence[Summary]) -> List[str]:
    emulated = any(one.computation == "emulated" for one in summaries)
    notes = [
        "Seconds for an iteration: median (least..greatest) of %s. %s"
        % (runs_text(summaries),
           "Computation is emulated: a timed wait for each layer." if emulated else "Nothing is emulated.")
    ]  # fmt: skip
    notes += _failures(summaries)
    if any(one.is_below_bound for one in summaries):
        notes.append("(!) Below the bound, which is impossible: check the rate of the network, and the bound.")
    return notes


def _failures(summaries: Sequence[Summary]) -> List[str]:
    errors = [(one, " ".join((one.error or "").split())[:ERROR_CHARACTERS]) for one in summaries if one.failed]
    return ["%s: %d of %d runs failed: %s" % (one, one.failed, one.runs, error) for one, error in errors]


def far_from_bound(results: Results) -> List[Table]:
    """The settings in which a store is far from its bound, and of how many; also if there are none."""
    known = [one for one in summarise(results.runs) if one.above_bound is not None]
    rows = [
        [
            one.store, setting(one, ["model"]), rate(one.rate_mbit), setting(one, ["compute", "release", "clip"]),
            _time(one.store, {one.store: one}), _seconds(one.bound_s), _above(one.store, {one.store: one}),
        ]
        for one in known
        if one.is_far_from_bound
    ]  # fmt: skip
    title = "{}: more than {:.0%} above the bound: {} of {}"
    title = title.format(_name(results), FAR_FROM_BOUND, len(rows), len(known))
    return [Table(title, [["store", "model", "rate", "computation", "seconds", "bound", "above bound"], *rows])]


def planned(results: Results) -> List[Table]:
    """A row for each store and strategy: measured, as the simulator had it, and as no schedule can beat it."""
    rows, predictions = [], {run.configuration: run.predicted_s for run in results.runs}
    for one in summarise(results.runs):
        predicted_s = predictions[one.configuration]
        off = one.median_s / predicted_s - 1 if one.median_s and predicted_s else None
        rows.append([
            setting(one, ("model", "rate", "compute", "delay")), one.store, one.strategy or "-",
            _time(one.store, {one.store: one}), _or_dash(predicted_s, _seconds), _or_dash(off, "{:+.1%}".format),
            _or_dash(one.bound_s, _seconds), _above(one.store, {one.store: one}),
        ])  # fmt: skip
    head = ["setting", "store", "strategy", "seconds", "predicted", "off by", "bound", "above bound"]
    return [Table(_name(results), [head, *rows], _notes(summarise(results.runs)))]


def judged(results: Results, predicted: Optional[Mapping[Configuration, float]] = None) -> List[Table]:
    """A row for each setting: how the planner's choices stand to the best of all strategies that were measured.
    `predicted`: seconds, where they are not to be those that were written down when it was measured."""
    predicted = predicted or {run.configuration: run.predicted_s for run in results.runs if run.predicted_s}
    by_setting: Dict[Configuration, List[Judged]] = {}
    for one in summarise(results.runs):
        if one.strategy and one.median_s and one.configuration in predicted:
            place = replace(one.configuration, strategy=None)
            known = Judged(one.strategy, one.median_s, predicted[one.configuration])
            by_setting.setdefault(place, []).append(known)
    found = {place: verdict(of_it) for place, of_it in by_setting.items()}
    rows = [[
        setting(place, ("model", "rate", "compute", "delay")), "%d" % one.strategies,
        *("%s (%s)" % (_seconds(its.measured_s), its.name) for its in (one.best, one.first)),
        "%.1f%%" % (100 * one.regret), "%.1f%%" % (100 * one.regret_of_trials),
        "%d of %d" % (one.ranked_right, one.pairs), "%.1f%%, %.1f%%" % (100 * one.mean_error, 100 * one.greatest_error),
    ] for place, one in found.items()]  # fmt: skip
    head = ["setting", "strategies", "best", "first choice", "regret", "of five", "ranked right", "off by"]
    return [Table(_name(results), [head, *rows], [*_summed_up(list(found.values())), *_notes(summarise(results.runs))])]


def _summed_up(verdicts: Sequence[Verdict]) -> List[str]:
    if not verdicts:
        return []
    regrets = [one.regret for one in verdicts]
    of_trials = max(one.regret_of_trials for one in verdicts)
    pairs, right = sum(one.pairs for one in verdicts), sum(one.ranked_right for one in verdicts)
    return [
        "Regret: %.1f%% in the mean, %.1f%% at worst; with five trials %.1f%% at worst. Of %d pairs more than %.0f%% "
        "apart %.3f are ranked right. Off by: the predictions, in the mean and at worst."
        % (100 * statistics.fmean(regrets), 100 * max(regrets), 100 * of_trials, pairs, 100 * RANKED_APART,
           right / max(pairs, 1))
    ]  # fmt: skip


def changed(results: Results) -> List[Table]:
    """A row for each store and change of the links' rate: iterations before it, the longest one behind it, and those
    from ten behind it on, which are what the bound is compared with."""
    rows, summaries = [], summarise(results.runs)
    for one in summaries:
        right = [run for run in results.runs if run.configuration == one.configuration and run.result == "right"]
        before = spread([statistics.median(run.before_s) for run in right]) if right else None
        worst = spread([max(run.settling_s) for run in right]) if right else None
        rows.append([
            setting(one, ("model", "rate", "compute", "delay", "hosts")), one.store, _or_dash(before, _spread),
            _or_dash(worst, _spread), _time(one.store, {one.store: one}), _or_dash(one.bound_s, _seconds),
            _above(one.store, {one.store: one}),
        ])  # fmt: skip
    head = ["setting", "store", "before", "longest behind", "ten later", "bound", "above bound"]
    return [Table(_name(results), [head, *rows], _notes(summaries))]


def best_speedups(results: Results) -> List[Table]:
    """Of P3 over MXNet's default store, of all settings, beside the paper's."""
    rows, summaries = [], summarise(results.runs)
    for model in unique(one.model for one in summaries):
        ours = [one for one in summaries if (one.model, one.store) == (model, OURS)]
        found = [(times, one) for one in ours for times in [speedup(one, "dist_sync", summaries)] if times is not None]
        if found:
            best, one = max(found, key=lambda pair: pair[0])
            paper = _or_dash(PAPER_SPEEDUPS.get(model), _gain)
            rows.append([model_label(model), _gain(best), rate(one.rate_mbit), paper])
    title = "%s: the best speedup of p3_sync over dist_sync"
    return _unless_empty(title % _name(results), ["model", "best", "at", "paper's best"], rows)


def _gain(times: float) -> str:
    return "{:+.0%}".format(times - 1)


def _name(results: Results) -> str:
    return results.runs[0].experiment


def _unless_empty(title: str, head: List[str], rows: List[List[str]], *notes: str) -> List[Table]:
    return [Table(title, [head, *rows], notes)] if rows else []


# Trainings


def seconds_to_goals(results: Results) -> List[Table]:
    """A row for each training, a column for each store, and how many times as fast as the best DDP p3.torch is."""
    places: Dict[Tuple[Configuration, float], Dict[str, curves.Curve]] = {}
    for one in curves.curves(results.runs):
        places.setdefault((comparable(one.configuration), one.goal_loss), {})[one.configuration.store] = one
    shown = _shown(places)
    rows = []
    for (place, goal_loss), by_store in places.items():
        ddp = [one.goal_s.median for store, one in by_store.items() if store.startswith("ddp_") and one.goal_s]
        ours = by_store.get("p3_torch")
        gain = min(ddp) / ours.goal_s.median if ddp and ours and ours.goal_s else None
        name = "%s at %s, to %g" % (model_label(place.model), setting(place, ("rate", "clip")), goal_loss)
        cells = [_or_dash(by_store.get(store), lambda one: _reached(one.goal_s)) for store in shown]
        rows.append([name, *cells, _or_dash(gain, "{:.2f}x".format)])
    note = (
        "Seconds from the first step's begin until the loss, as the mean of %d steps, is no greater than the goal: "
        "median (least..greatest)." % curves.SMOOTHED_STEPS
    )
    head = ["training", *shown, "over best DDP"]
    return _unless_empty(_name(results) + ": seconds to a given loss", head, rows, note)


def _reached(goal_s: Optional[Spread]) -> str:
    return _spread(goal_s) if goal_s else "not reached"


def last_losses(results: Results) -> List[Table]:
    """Of trainings to which each store gives as many steps: a row for each rate, a column for each store."""
    known = [run for run in results.runs if run.losses and run.result == "right"]
    shown = sorted({run.store for run in known}, key=stores.rank)
    rows = []
    for place in unique(comparable(run.configuration) for run in known):
        row = [setting(place, ("rate", "clip"))]
        for store in shown:
            its = [run for run in known if run.store == store and comparable(run.configuration) == place]
            losses = [statistics.fmean(run.losses[-mxnet_convnet.LAST_STEPS:]) for run in its]
            row.append(_spread(spread(losses)) if losses else "-")
        rows.append(row)
    note = "Mean over the workers and the last %d steps: median (least..greatest)." % mxnet_convnet.LAST_STEPS
    return _unless_empty(_name(results) + ": loss at the end", ["rate", *shown], rows, note)


def ways_to_goals(results: Results) -> List[Table]:
    """Of trainings that shall reach a loss: a table for each setting, a row for each store."""
    known = [run for run in results.runs if run.losses and run.goal_loss and run.result == "right"]
    made = []
    for place, goal_loss in unique((comparable(run.configuration), run.goal_loss) for run in known):
        here = [run for run in known if (comparable(run.configuration), run.goal_loss) == (place, goal_loss)]
        rows = []
        for store in sorted({run.store for run in here}, key=stores.rank):
            its = [run for run in here if run.store == store]
            steps = [curves.steps_to(goal_loss, run.losses) for run in its]
            if None in steps:
                rows.append([store, "not reached", "-", "-"])
                continue
            seconds = [run.loss_at_s[count - 1] for run, count in zip(its, steps)]
            paces = [count / one for count, one in zip(steps, seconds)]
            rows.append([store, *(_spread(spread(values)) for values in (steps, seconds, paces))])
        where = setting(place, ("model", "rate", "delay", "hosts", "clip"))
        title = "%s: to a loss of %g: %s" % (_name(results), goal_loss, where)
        made.append(Table(title, [["store", "steps", "seconds", "steps a second"], *rows], [_WAYS_NOTE]))
    return made


_WAYS_NOTE = (
    "A step takes as many batches as there are workers. The loss is reached when the mean of %d steps is no greater: "
    "median (least..greatest)." % curves.SMOOTHED_STEPS
)


def final_accuracies(results: Results) -> List[Table]:
    """A table for each net and rate, in it a row for each store."""
    found, made = accuracies.bands(results.runs), []
    for place in unique(comparable(one.configuration) for one in found):
        by_store = {one.configuration.store: one for one in found if comparable(one.configuration) == place}
        rows = []
        for store, one in by_store.items():
            is_compared = OURS in by_store and store != OURS
            less = mean_difference(one.finals, by_store[OURS].finals) if is_compared else None
            rows.append([
                store, "%.4f (%.4f..%.4f)" % mean(one.finals.values()),
                _or_dash(less, lambda mean: "%+.4f (%+.4f..%+.4f)" % mean),
                _reached(one.goal_s), _seconds(one.at_s[-1]), "%d" % len(one.finals),
            ])  # fmt: skip
        head = ["store", "final accuracy", "against " + OURS, "seconds to %g" % accuracies.GOAL, "all seconds", "seeds"]
        notes = [
            "Test accuracy after the last epoch, and seed by seed against p3_sync: mean (least..greatest) over the "
            "seeds. Seconds of training: medians; tests are not counted.",
            accuracies.HERE,
            accuracies.PAPER,
        ]
        title = "%s: %s" % (_name(results), setting(place, ("model", "rate", "delay", "hosts")))
        made.append(Table(title, [head, *rows], notes))
    return made


def losses_of_seeds(results: Results) -> List[Table]:
    """A table for each training, in it a row for each store: its loss at equal steps, and at equal seconds."""
    summaries, made = summarise(results.runs), []
    found = {one.configuration: one for one in seeds.bands(results.runs)}
    for place in unique(comparable(one) for one in summaries):
        here = [one for one in summaries if comparable(one) == place]
        bands = [found[one.configuration] for one in here if one.configuration in found]
        base, least_s = seeds.exact(bands), min((band.at_s[-1] for band in bands), default=0.0)
        rows = [_losses(one, found.get(one.configuration), base, least_s) for one in here]
        steps = max((len(band.losses) for band in bands), default=0)
        head = ["store", "loss after %d steps" % steps, "against exact", "within the seeds", "right of held out",
                "loss after %.3g s" % least_s, "right after %.3g s" % least_s, "seconds for a step", "CPU s",
                "seeds"]  # fmt: skip
        title = "%s: %s" % (_name(results), setting(place, ("model", "rate", "delay", "hosts", "clip")))
        made.append(Table(title, [head, *rows], [_SEEDS_NOTE, *_failures(here)]))
    return made


_SEEDS_NOTE = (
    "Losses are means of %d steps; over the seeds mean (least..greatest). Against exact: seed by seed, training that "
    "compresses nothing. Within the seeds: whether the mean is no greater than the greatest of exact training. Right "
    "of held out: answers about data that no batch has, behind the last step. After as many seconds as the fastest "
    "store took for all steps: medians, right of the batches themselves." % curves.SMOOTHED_STEPS
)


def _losses(one: Summary, band: Optional[seeds.Band], base: Optional[seeds.Band], least_s: float) -> List[str]:
    by_store = {one.store: one}
    if band is None:
        return [one.store, "has not learnt", *["-"] * 7, "0"]
    less = None if base in (None, band) else mean_difference(band.finals, base.finals)
    return [
        one.store, "%.3f (%.3f..%.3f)" % mean(band.finals.values()),
        _or_dash(less, lambda mean: "%+.3f (%+.3f..%+.3f)" % mean),
        _or_dash(less and base, lambda base: "yes" if band.ends_within(base) else "no"),
        _percent(band.heldout) if band.heldout else "-",
        _or_dash(band.loss_at(least_s), "{:.3f}".format), _or_dash(band.accuracy_at(least_s), "{:.1%}".format),
        _time(one.store, by_store), _cpu(one.store, by_store), "%d" % len(band.finals),
    ]  # fmt: skip


def of_local_steps(results: Results) -> List[Table]:
    """A table for each training: a row for each number of steps between two exchanges, outer momentum and codec, and of
    each number of workers what it ends with, beside training in step."""
    found: Dict[Configuration, Dict[Tuple[str, int], endings.Ending]] = {}
    for one in endings.endings(results.runs):
        place = replace(comparable(one.configuration), hosts=1, workers=1, servers=1)
        found.setdefault(place, {})[one.configuration.store, one.configuration.hosts] = one
    made = []
    for place, here in found.items():
        counts, shown = unique(count for _, count in here), sorted({name for name, _ in here}, key=stores.rank)
        base = next((name for name in shown if stores.named(name).trains_exactly), None)
        rows = [
            [*_course(name), *(cell for count in counts for cell in _ends(here, name, base, count))] for name in shown
        ]
        of_each = ("loss, %d workers", "against every step, %d workers", "MB of a card, %d workers")
        head = ["exchange every", "codec", "outer momentum", *(name % count for count in counts for name in of_each)]
        steps = " or ".join(map(str, sorted({one.steps for one in here.values()})))
        title = "%s: %s" % (_name(results), setting(place, ("model", "rate", "delay", "clip")))
        made.append(Table(title, [head, *rows], [_ENDINGS_NOTE % steps, *_failures(summarise(results.runs))]))
    return made


_ENDINGS_NOTE = (
    "Loss of what no batch has, after %s steps, with the weights that all workers have then: mean (least..greatest) "
    "over the seeds. Against every step: seed by seed, exact training of as many workers. MB: what a card sends in a "
    "step, in the mean, by formula."
)


def _course(name: str) -> List[str]:
    store = stores.named(name)
    momentum = (store.outer_momentum or "%g" % Outer().momentum) if store.is_local else "-"
    return ["%d" % store.every, "-" if store.compression is None else str(store.compression), momentum]


def _ends(
    here: Mapping[Tuple[str, int], endings.Ending], name: str, base: Optional[str], count: int
) -> List[str]:
    one, exact = here.get((name, count)), here.get((base, count))
    if one is None:
        return ["-", "-", "-"]
    above = one.above(exact) if exact not in (None, one) else None
    return [
        "%.3f (%.3f..%.3f)" % mean(one.losses.values()),
        _or_dash(above, lambda shares: "%+.1f%% (%+.1f..%+.1f)" % tuple(100 * one for one in shares)),
        _or_dash(one.card_bytes, _megabytes),
    ]


def _percent(shares: Sequence[float]) -> str:
    return "%.1f%% (%.1f..%.1f)" % mean([100 * share for share in shares])


# Network cards


def counted(plain: str, results: Results) -> List[Table]:
    """Of what reduces the bytes on the cards, beside the store `plain`: a table for each setting, a row for each store.
    """
    summaries, made = summarise(results.runs), []
    for place in unique(comparable(one) for one in summaries):
        by_store = {one.store: one for one in summaries if comparable(one) == place}
        rows = []
        for store, one in by_store.items():
            right = [run for run in results.runs if run.configuration == one.configuration and run.result == "right"]
            of_cards, in_frames = (
                median_of(right, partial(sent_by_a_card, nics=results.nics, without_headers=without))
                for without in (False, True)
            )
            formula, *memory = (
                median_of(right, operator.attrgetter(field))
                for field in ("card_bytes", "worker_peak_bytes", "server_peak_bytes")
            )
            rows.append([
                store, _time(store, by_store), _or_dash(one.bound_s, _seconds), _above(store, by_store),
                _over(store, plain, by_store), _cpu(store, by_store), _or_dash(of_cards, _megabytes),
                _or_dash(formula, _megabytes), _or_dash(of_cards and formula and of_cards / formula, "{:.3f}".format),
                _or_dash(in_frames and formula and in_frames / formula, "{:.3f}".format),
                *(_or_dash(peak, _megabytes) for peak in memory),
            ])  # fmt: skip
        head = ["store", "seconds", "bound", "above bound", "over " + plain, "CPU s",
                "MB counted", "by formula", "over it", "frames over it", "worker MB", "server MB"]
        told = ("model", "rate", "compute", "delay", "hosts", "batch", "release", "clip")
        notes = [*_notes(list(by_store.values())), _CARD_NOTE]
        made.append(Table("%s: %s" % (_name(results), setting(place, told)), [head, *rows], notes))
    return made


_CARD_NOTE = (
    "MB that each network card sends in an iteration, and receives, in the mean over the hosts: counted by the kernel, "
    "which includes headers of TCP and IP, acknowledgements and heartbeats; and computed of P3's frames alone. Frames "
    "over it: what was counted, but for the headers of the packets that the kernel counted. "
    "Of memory, the most that a worker and a server have had."
)


def idle_shares(results: Results) -> List[Table]:
    """Of each host's card, median over the repeats."""
    cards: Dict[Tuple[Configuration, int], List[Nic]] = {}
    for nic in results.nics:
        cards.setdefault((nic.configuration, nic.host), []).append(nic)
    titles: Dict[str, List[List[str]]] = {}
    for one, host in sorted(cards, key=lambda card: (stores.rank(card[0].store), card[1])):
        shares = [_idle(cards[one, host], way) for way in ("bytes_out", "bytes_in")]
        title = setting(one, ("model", "rate", "compute", "delay", "hosts", "release", "clip"))
        titles.setdefault(title, []).append([one.store, "%d" % host, *shares])
    made = [
        Table("idle share of network cards: " + title, [["store", "host", "sending", "receiving"], *rows])
        for title, rows in titles.items()
    ]
    if made:
        interval_ms = 1e3 * results.nics[0].interval_s
        note = "Idle: an interval of %g ms in which at most %g%% of the rate passed." % (interval_ms, 100 * IDLE_SHARE)
        made[-1] = made[-1]._replace(notes=[note])
    return made


def _idle(samples: Sequence[Nic], way: str) -> str:
    shares = [idle_share(getattr(one, way), one.interval_s, one.rate_mbit) for one in samples]
    return "{:.0%}".format(statistics.median(shares))
