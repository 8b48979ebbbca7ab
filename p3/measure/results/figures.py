"""Figures of what `p3 bench` measured: a function for each experiment, from Results to a matplotlib figure.

The bound is the goal line in every figure of a replay. A store that failed, or was not run, where others were, is
marked by a cross. All arithmetic is in results.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from p3.measure.bench import curves, drawing
from p3.measure.bench.plot_accuracy import accuracy
from p3.measure.bench.results import (
    Nic, Results, Summary, comparable, idle_share, model_label, setting, store_label, summarise,
)  # fmt: skip
from p3.errors import ConfigError

def save(results: Results, folder: Path, formats: Sequence[str] = drawing.FORMATS) -> List[Path]:
    """Writes a figure for each experiment that was run; where they are."""
    experiments = list(dict.fromkeys(run.experiment for run in results.runs))
    unknown = [name for name in experiments if name not in FIGURES]
    if unknown:
        raise ConfigError("there is no figure for the experiment %s, only for %s" % (unknown[0], ", ".join(FIGURES)))
    written = []
    for experiment in experiments:
        with matplotlib.rc_context({**matplotlib.rcParamsDefault, **drawing.SETTINGS}):
            figure = FIGURES[experiment](_only(results, experiment))
            for kind in formats:
                written.append(folder / ("%s.%s" % (experiment, kind)))
                figure.savefig(written[-1], format=kind, dpi=150, metadata=drawing.METADATA[kind])
    return written


# A figure for each experiment


def bandwidth(results: Results) -> Figure:
    return _lines(results, "Throughput against bandwidth", _RATE, _THROUGHPUT)


def scale(results: Results) -> Figure:
    return _lines(results, "Throughput against the number of hosts", _HOSTS, _BATCHES)


def slices(results: Results) -> Figure:
    return _lines(results, "Throughput against the size of a slice", _SLICE, _THROUGHPUT)


def ratio(results: Results) -> Figure:
    return _lines(results, "Iteration time against the ratio of communication to computation", _RATIO, _TIME)


def targets(results: Results) -> Figure:
    return _bars(results, "Iteration time")


def compute(results: Results) -> Figure:
    return _bars(results, "Iteration time of real training")


def learn(results: Results) -> Figure:
    """A row for each training: each store's loss over seconds, and beside it the CPU seconds of an iteration."""
    summaries = summarise(results.runs)
    drawn = curves.curves(run for run in results.runs if run.experiment == "learn")
    panels = drawing.panels(summaries, lambda one: {})
    figure, grid = drawing.figure(results, "Loss over seconds of real training", len(panels), 2)
    for (losses, cpu), (_, members) in zip(grid, panels):
        losses.set_title(drawing.title(members[0], ("rate", "compute", "delay", "hosts")))
        here = [one for one in drawn if comparable(one.configuration) == comparable(members[0])]
        _draw_curves(losses, here)
        cpu.set_title("CPU seconds of all processes")
        cpu.set_ylabel("CPU seconds for an iteration")
        known = [one for one in members if one.cpu_s is not None]
        for one in known:
            median, low, high = one.cpu_s
            place = store_label(one.store)
            cpu.bar(place, median, 0.7, color=drawing.style(one.store)[0])
            cpu.errorbar(place, median, [[median - low], [high - median]], fmt="none", ecolor="#333333", capsize=3)
            cpu.annotate("%.3g" % median, (place, high), (0, 3), textcoords="offset points", ha="center", fontsize=8)
        cpu.tick_params(axis="x", labelrotation=15, labelsize=8)
        cpu.margins(y=0.12)
    drawing.legend(figure, summaries)
    return figure


def _draw_curves(axes, drawn: Sequence[curves.Curve]) -> None:
    for number, one in enumerate(drawn):
        colour = drawing.style(one.configuration.store)[0]
        axes.plot(one.at_s, one.losses, color=colour, linewidth=1.5, zorder=3 + number / 10)
        axes.fill_betweenx(one.losses, one.low_s, one.high_s, color=colour, alpha=0.2, linewidth=0)
        if one.goal_s:
            marker = drawing.style(one.configuration.store)[1]
            axes.plot([one.goal_s.median], [one.goal_loss], color=colour, marker=marker, markersize=7,
                      zorder=4 + number / 10)
    for goal_loss in dict.fromkeys(one.goal_loss for one in drawn):
        axes.axhline(goal_loss, color="#333333", linewidth=0.9, linestyle=":")
    if not drawn:
        axes.text(0.5, 0.5, "no right run", ha="center", transform=axes.transAxes, color=drawing.WARNING_COLOUR)
    axes.set_xlabel("seconds")
    axes.set_ylabel("loss, mean of %d steps" % curves.SMOOTHED_STEPS)
    axes.set_xlim(left=0)


def utilization(results: Results) -> Figure:
    """A column for each setting, a row for each store: what its first host sent, and below the axis, received."""
    if not results.nics:
        raise ConfigError("utilization: the results have no nic line")
    summaries = summarise(results.runs)
    right = {(run.configuration, run.repeat) for run in results.runs if run.result == "right"}
    first = min(nic.host for nic in results.nics)
    nics = [nic for nic in results.nics if nic.host == first and (nic.configuration, nic.repeat) in right]
    panels = drawing.panels([*summaries, *nics], lambda one: {})
    stores = drawing.stores(summaries)
    figure, grid = drawing.figure(results, "Use of host %d's network card" % first, len(stores), len(panels))
    for row, store in enumerate(stores):
        for column, (_, members) in enumerate(panels):
            axes = grid[row][column]
            chosen = [one for one in members if one.store == store]
            summary = next((one for one in chosen if isinstance(one, Summary)), None)
            sampled = sorted((one for one in chosen if isinstance(one, Nic)), key=lambda one: one.repeat)
            head = drawing.title(members[0], ("rate", "compute", "delay", "hosts")) + "\n" if row == 0 else ""
            axes.set_title("%s%s: %s" % (head, store_label(store), _times(summary)))
            if sampled:
                _draw_nic(axes, sampled[0])
            else:
                axes.text(0.5, 0.5, "failed, or not sampled", ha="center", transform=axes.transAxes,
                          color=drawing.WARNING_COLOUR)
            axes.set_ylabel("Gbit/s: sent, received" if column == 0 else "")
            axes.set_xlabel("seconds" if row == len(stores) - 1 else "")
    extent = max((abs(value) for row in grid for axes in row for value in axes.get_ylim()), default=1)
    ends = [axes.get_xlim()[1] for row in grid for axes in row if axes.has_data()]
    for axes in (axes for row in grid for axes in row):
        axes.set_ylim(-extent, extent)
        axes.set_xlim(0, max(ends, default=1))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: "%g" % abs(value)))
    return figure


FIGURES: Dict[str, Callable[[Results], Figure]] = {
    one.__name__: one for one in (bandwidth, utilization, scale, slices, targets, ratio, compute, learn, accuracy)
}


# Lines


class _Axis(NamedTuple):
    """What is on the x axis, and which fields change along it; the others make a panel each."""

    label: str
    value: Callable[[Summary], Optional[float]]
    varying: Sequence[str]
    told: Sequence[str]  # in a panel's title
    log_base: Optional[int]


class _Measure(NamedTuple):
    """What is on the y axis."""

    label: str
    value: Callable[[Summary], Optional[float]]
    spread: Callable[[Summary], Optional[Tuple[float, float]]]
    bound: Callable[[Summary], Optional[float]]


_RATE = _Axis("rate of each network card, Mbit/s", lambda one: one.rate_mbit, ["rate_mbit"],
              ("compute", "delay", "hosts"), 2)
_HOSTS = _Axis("hosts", lambda one: one.hosts, ["hosts", "workers", "servers"], ("rate", "compute", "delay"), None)
_SLICE = _Axis("elements of a slice", lambda one: one.slice_elements, ["slice_elements"],
               ("rate", "compute", "delay", "hosts"), 10)
_RATIO = _Axis("seconds of communication for each of computation", lambda one: one.ratio and round(one.ratio, 3),
               ["compute_s"], ("rate", "delay", "hosts"), None)

_TIME = _Measure("seconds for an iteration", lambda one: one.median_s, lambda one: (one.low_s, one.high_s),
                 lambda one: one.bound_s)
_THROUGHPUT = _Measure("iterations per second", lambda one: one.throughput, lambda one: one.throughput_spread,
                       lambda one: one.bound_throughput)
_BATCHES = _Measure("batches per second, of all workers", lambda one: one.workers * one.throughput,
                    lambda one: tuple(one.workers * value for value in one.throughput_spread),
                    lambda one: one.bound_throughput and one.workers * one.bound_throughput)


def _lines(results: Results, title: str, x: _Axis, y: _Measure) -> Figure:
    """A panel for each model and setting, in it a line for each store and the bound."""
    summaries = summarise(results.runs)
    for one in summaries:
        if x.value(one) is None and x is not _SLICE:
            raise ConfigError("%s has no place in the figure: no %s" % (one, x.label))
    panels = drawing.panels(summaries, lambda one: dict.fromkeys(x.varying))
    rows = -(-len(panels) // drawing.COLUMNS)
    figure, grid = drawing.figure(results, title, rows, min(len(panels), drawing.COLUMNS))
    flat = [axes for row in grid for axes in row]
    for axes, (_, members) in zip(flat, panels):
        axes.set_title(drawing.title(members[0], x.told))
        axes.set_xlabel(x.label)
        axes.set_ylabel(y.label)
        if x.log_base:
            axes.set_xscale("log", base=x.log_base)
        _draw_lines(axes, members, drawing.stores(summaries), x, y)
    for axes in flat[len(panels):]:
        axes.remove()
    drawing.legend(figure, summaries)
    return figure


def _draw_lines(axes, members: Sequence[Summary], stores: Sequence[str], x: _Axis, y: _Measure) -> None:
    places = sorted({x.value(one) for one in members if x.value(one) is not None})
    goal = {place: min((y.bound(one) for one in members if x.value(one) == place and y.bound(one)), default=None)
            for place in places}
    goal = {place: value for place, value in goal.items() if value is not None}
    marker = "_" if len(goal) == 1 else ""
    axes.plot(list(goal), list(goal.values()), marker=marker, markersize=30, **drawing.BOUND_STYLE)
    for number, store in enumerate(stores):
        colour, marker = drawing.style(store)
        own = [one for one in members if one.store == store]
        if own and x.value(own[0]) is None and own[0].median_s:  # knows no slices: the same for all sizes
            axes.axhline(y.value(own[0]), color=colour, linewidth=1.5, linestyle=":")
            axes.axhspan(*y.spread(own[0]), color=colour, alpha=0.15, linewidth=0)
            continue
        right = sorted((one for one in own if one.median_s and x.value(one) is not None), key=x.value)
        if right:
            values = [y.value(one) for one in right]
            low, high = zip(*(y.spread(one) for one in right))
            at = [x.value(one) for one in right]
            axes.plot(at, values, color=colour, linewidth=1.8, zorder=3 + number / 10)
            axes.errorbar(at, values, [_less(values, low), _less(high, values)], fmt="none", ecolor=colour, capsize=3,
                          elinewidth=1.2, zorder=3 + number / 10)
            for place, value, one in zip(at, values, right):
                axes.plot([place], [value], color=colour, marker=marker, markersize=6,
                          markerfacecolor="white" if one.failed else colour, zorder=4 + number / 10)
        lost = [place for place in places if place not in {x.value(one) for one in right}]
        for place in lost:
            axes.plot([place], [0.03 + 0.05 * number], color=colour, marker="x", markersize=8, markeredgewidth=2,
                      transform=axes.get_xaxis_transform(), zorder=5)
    axes.set_ylim(0, 1.04 * axes.get_ylim()[1])
    _set_places(axes, places, x.log_base is not None)


def _set_places(axes, places: Sequence[float], is_log: bool) -> None:
    """Ticks where something was measured, and nowhere else."""
    if is_log:
        room = (places[-1] / places[0]) ** 0.08 if len(places) > 1 else 1.5
        axes.set_xlim(places[0] / room, places[-1] * room)
    else:
        room = (places[-1] - places[0]) * 0.08 or 0.5
        axes.set_xlim(places[0] - room, places[-1] + room)
    axes.set_xticks(places)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format(value, ",.10g")))
    if len(places) > 4:
        axes.tick_params(axis="x", rotation=45)


def _less(greater: Sequence[float], smaller: Sequence[float]) -> List[float]:
    return [max(0.0, one - other) for one, other in zip(greater, smaller)]


# Bars


def _bars(results: Results, title: str) -> Figure:
    """A panel for each rate and computation, in it a group for each model: a bar for each store, and the bound."""
    summaries = summarise(results.runs)
    regimes: Dict[Tuple, List[Summary]] = {}
    for one in summaries:
        regimes.setdefault((one.rate_mbit, one.compute_s, one.delay_ms, one.hosts, one.release), []).append(one)
    stores = drawing.stores(summaries)
    groups = max(len({one.model for one in members}) for members in regimes.values())
    width_inches = max(drawing.PANEL_INCHES[0], 1.0 + groups * (0.42 * len(stores) + 0.3))
    figure, grid = drawing.figure(results, title, len(regimes), 1, width_inches)
    for (axes,), members in zip(grid, regimes.values()):
        emulated = members[0].computation == "emulated"
        told = ("rate", "compute", "delay", "hosts", "release") if emulated else ("rate", "hosts")
        axes.set_title(setting(members[0], told))
        axes.set_ylabel("seconds for an iteration")
        _draw_bars(axes, members, stores)
    drawing.legend(figure, summaries)
    return figure


def _draw_bars(axes, members: Sequence[Summary], stores: Sequence[str]) -> None:
    models = list(dict.fromkeys((one.model, one.bytes) for one in members))
    width = 0.84 / len(stores)
    for group, model in enumerate(models):
        own = {one.store: one for one in members if (one.model, one.bytes) == model}
        for number, store in enumerate(stores):
            middle = group + (number - (len(stores) - 1) / 2) * width
            one = own.get(store)
            colour = drawing.style(store)[0]
            if one is None or not one.median_s:
                text = "not run" if one is None else "failed" if one.error != "the weights are wrong" else "wrong"
                axes.plot([middle], [0.03], color=colour, marker="x", markersize=8, markeredgewidth=2,
                          transform=axes.get_xaxis_transform(), zorder=5)
                axes.text(middle, 0.08, text, rotation=90, ha="center", va="bottom", fontsize=9,
                          color=drawing.WARNING_COLOUR, transform=axes.get_xaxis_transform())
                continue
            axes.bar(middle, one.median_s, width * 0.92, edgecolor=colour, linewidth=1.5,
                     color="white" if one.failed else colour)
            axes.errorbar(middle, one.median_s, [[one.median_s - one.low_s], [one.high_s - one.median_s]], fmt="none",
                          ecolor="#333333", capsize=3, elinewidth=1.2)
            axes.annotate("%.3g" % one.median_s, (middle, one.high_s), (0, 3), textcoords="offset points", ha="center",
                          fontsize=8)
        bounds = [one.bound_s for one in own.values() if one.bound_s]
        if bounds:
            axes.hlines(min(bounds), group - 0.46, group + 0.46, zorder=4, **_hlines(drawing.BOUND_STYLE))
    axes.set_xticks(range(len(models)))
    axes.set_xticklabels(["%s, %.3g MB" % (model_label(name), bytes_ / 1e6) for name, bytes_ in models])
    axes.set_xlim(-0.55, len(models) - 0.45)
    axes.set_ylim(bottom=0)
    axes.margins(y=0.12)


def _hlines(style: Dict) -> Dict:
    return {{"color": "colors", "linestyle": "linestyles", "linewidth": "linewidths"}[key]: value
            for key, value in style.items()}


# Network cards


def _draw_nic(axes, nic: Nic) -> None:
    colour = drawing.style(nic.store)[0]
    at = [number * nic.interval_s for number in range(len(nic.bytes_out) + 1)]
    for bytes_, sign, name, alpha in ((nic.bytes_out, 1, "sent", 0.9), (nic.bytes_in, -1, "received", 0.5)):
        gbit = [sign * one * 8 / nic.interval_s / 1e9 for one in bytes_]
        idle = idle_share(bytes_, nic.interval_s, nic.rate_mbit)
        axes.stairs(gbit, at, fill=True, color=colour, alpha=alpha, linewidth=0,
                    label="%s: idle %.0f%%" % (name, 100 * idle))
    axes.axhline(0, color="#333333", linewidth=0.8)
    if nic.rate_mbit:
        for sign in (1, -1):
            axes.axhline(sign * nic.rate_mbit / 1e3, color="black", linewidth=0.9, linestyle=":",
                         label="its rate" if sign > 0 else None)
    low, high = axes.get_ylim()
    extent = max(-low, high) * 1.35  # leaves a strip above for the legend
    axes.set_ylim(-extent, extent)
    axes.legend(loc="upper right", ncols=3, fontsize=8, borderaxespad=0.1, handlelength=1.2, columnspacing=1.0)


def _times(summary: Optional[Summary]) -> str:
    if summary is None or not summary.median_s:
        return "no right run"
    bound = ", bound %.3g s" % summary.bound_s if summary.bound_s else ""
    return "%.3g s an iteration%s" % (summary.median_s, bound)


# For one experiment of several


def _only(results: Results, experiment: str) -> Results:
    return Results(*([one for one in part if one.experiment == experiment] for part in results))
