"""Figures of what `p3 bench` measured: from a view (views.py) and the Results of one experiment to matplotlib's.

The bound is the goal line in every figure of a replay. A store that failed, or was not run, where others were, is
marked by a cross; in a sweep, whose parts may differ in size and rates, only one that failed. All arithmetic is in
summaries.py.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Tuple

import matplotlib
from matplotlib import figure as matplotlibs
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullLocator

from p3.errors import ConfigError
from p3.measure.jobs.stores import BLUE, GREEN, ORANGE, PINK, RED
from p3.measure.results import drawing
from p3.measure.results.figures_of_trainings import accuracies, curves, losses
from p3.measure.results.records import Nic, Results, unique
from p3.measure.results.summaries import FAR_FROM_BOUND, Summary, idle_share, setting, summarise
from p3.measure.results.views import Axis, Figure, Measure


def draw(view: Figure, results: Results) -> matplotlibs.Figure:
    return _KINDS[view.kind](view, results)


def save(view: Figure, results: Results, path: Path, formats: Sequence[str]) -> List[Path]:
    """As PATH.png and so on; where they are."""
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **drawing.SETTINGS}):
        made = draw(view, results)
        written = [path.with_name("%s.%s" % (path.name, kind)) for kind in formats]
        for kind, place in zip(formats, written):
            made.savefig(place, format=kind, dpi=150, metadata=drawing.METADATA[kind])
    return written


# Lines


def _lines(view: Figure, results: Results) -> matplotlibs.Figure:
    """A panel for each model and setting, in it a line for each store and the bound."""
    summaries, x, y = summarise(results.runs), view.x, view.y
    has_dotted = any(x.value(one) is None for one in summaries)
    for one in summaries:
        if x.value(one) is None and not x.may_lack:
            raise ConfigError("%s has no place in the figure: no %s" % (one, x.label))
    panels = drawing.panels(summaries, lambda one: dict.fromkeys(x.varying))
    rows = -(-len(panels) // drawing.COLUMNS)
    figure, grid = drawing.figure(
        results, view.title, rows, min(len(panels), drawing.COLUMNS),
        remark=" Dotted: a store without slices of a set size." if has_dotted else "",
    )  # fmt: skip
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


def _draw_lines(axes, members: Sequence[Summary], stores: Sequence[str], x: Axis, y: Measure) -> None:
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
        _draw_line(axes, own, places, x, y, (colour, marker, "-"), number)
    axes.set_ylim(0, 1.04 * axes.get_ylim()[1])
    _set_places(axes, places, x.log_base is not None)


def _draw_line(
    axes, own: Sequence[Summary], places: Sequence[float], x: Axis, y: Measure, look: Tuple[str, str, str], number: int
) -> None:
    """With a cross at those places where none of `own` was right. `look`: colour, marker and dashes."""
    colour, marker, dashes = look
    right = sorted((one for one in own if one.median_s and x.value(one) is not None), key=x.value)
    if right:
        values = [y.value(one) for one in right]
        low, high = zip(*(y.spread(one) for one in right))
        at = [x.value(one) for one in right]
        axes.plot(at, values, color=colour, linewidth=1.8, linestyle=dashes, zorder=3 + number / 10)
        axes.errorbar(at, values, [_less(values, low), _less(high, values)], fmt="none", ecolor=colour, capsize=3,
                      elinewidth=1.2, zorder=3 + number / 10)
        for place, value, one in zip(at, values, right):
            axes.plot([place], [value], color=colour, marker=marker, markersize=6,
                      markerfacecolor="white" if one.failed else colour, zorder=4 + number / 10)
    lost = [place for place in places if place not in {x.value(one) for one in right}]
    for place in lost:
        axes.plot([place], [0.03 + 0.05 * number], color=colour, marker="x", markersize=8, markeredgewidth=2,
                  transform=axes.get_xaxis_transform(), zorder=5)


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


def _shares(view: Figure, results: Results) -> matplotlibs.Figure:
    """A panel for each store and setting, in it a line for each model and share of computation; the bound is 1."""
    summaries, x, y = [one for one in summarise(results.runs) if one.bound_s], view.x, view.y
    if not summaries:
        raise ConfigError("%s: no run has a bound" % results.runs[0].experiment)
    models = unique(setting(one, ["model"]) for one in summaries)
    shares = unique(setting(one, ["compute"]) for one in summaries)
    looks = {model: _LOOKS[number % len(_LOOKS)] for number, model in enumerate(models)}
    dashes = {share: _DASHES[number % len(_DASHES)] for number, share in enumerate(shares)}
    panels = drawing.panels(summaries, lambda one: {**dict.fromkeys(x.varying), "store": one.store})
    dotted = " Dotted: {:.0%} above the bound.".format(FAR_FROM_BOUND)
    figure, grid = drawing.figure(results, view.title, len(panels), 1, remark=dotted, legend_rows=_ROWS_OF_SHARES)
    for (axes,), (_, members) in zip(grid, panels):
        axes.set_title("%s\n%s" % (drawing.label(members[0].store), setting(members[0], x.told)))
        axes.set_xlabel(x.label)
        axes.set_ylabel(y.label)
        axes.set_xscale("log", base=x.log_base)
        axes.axhline(1, **drawing.BOUND_STYLE)
        axes.axhline(1 + FAR_FROM_BOUND, color="#333333", linewidth=0.9, linestyle=":")
        places = sorted({x.value(one) for one in members})
        for number, (model, share) in enumerate(itertools.product(models, shares)):
            own = [one for one in members if (setting(one, ["model"]), setting(one, ["compute"])) == (model, share)]
            _draw_line(axes, own, sorted({x.value(one) for one in own}), x, y, (*looks[model], dashes[share]), number)
        _set_places(axes, places, is_log=True)
    handles = [Line2D([], [], color=colour, marker=marker, linewidth=1.8, label=model)
               for model, (colour, marker) in looks.items()]
    handles += [Line2D([], [], color="#333333", linewidth=1.8, linestyle=line, label=share)
                for share, line in dashes.items()]
    drawing.place_legend(figure, [*handles, drawing.bound_handle()], _ROWS_OF_SHARES)
    return figure


_LOOKS = [(GREEN, "D"), (BLUE, "o"), (ORANGE, "s"), (RED, "^"), (PINK, "v")]
_DASHES = ["-", "--", "-.", ":"]
_ROWS_OF_SHARES = 2  # of the legend


def _less(greater: Sequence[float], smaller: Sequence[float]) -> List[float]:
    return [max(0.0, one - other) for one, other in zip(greater, smaller)]


# Bars


def _bars(view: Figure, results: Results) -> matplotlibs.Figure:
    """A panel for each rate and computation, in it a group for each model: a bar for each store, and the bound."""
    summaries = summarise(results.runs)
    regimes: Dict[Tuple, List[Summary]] = {}
    for one in summaries:
        links = (one.rate_mbit, one.delay_ms, one.packet_loss, one.shaper)
        regime = (*links, one.compute_s, one.hosts, one.release, one.clip)
        regimes.setdefault(regime, []).append(one)
    stores = drawing.stores(summaries)
    groups = max(len({one.model for one in members}) for members in regimes.values())
    width_inches = max(drawing.PANEL_INCHES[0], 1.0 + groups * (0.42 * len(stores) + 0.3))
    figure, grid = drawing.figure(results, view.title, len(regimes), 1, width_inches)
    for (axes,), members in zip(grid, regimes.values()):
        emulated = members[0].computation == "emulated"
        told = ("rate", "compute", "delay", "hosts", "release", "clip") if emulated else ("rate", "hosts", "clip")
        axes.set_title(setting(members[0], told))
        axes.set_ylabel("seconds for an iteration")
        _draw_bars(axes, members, stores)
    drawing.legend(figure, summaries)
    return figure


def _draw_bars(axes, members: Sequence[Summary], stores: Sequence[str]) -> None:
    models = {(one.model, one.bytes): setting(one, ["model"]) for one in members}
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
    axes.set_xticklabels(list(models.values()))
    axes.set_xlim(-0.55, len(models) - 0.45)
    axes.set_ylim(bottom=0)
    axes.margins(y=0.12)


def _hlines(style: Dict) -> Dict:
    return {{"color": "colors", "linestyle": "linestyles", "linewidth": "linewidths"}[key]: value
            for key, value in style.items()}


# Network cards


def _cards(_view: Figure, results: Results) -> matplotlibs.Figure:
    """A column for each setting, a row for each store: what its first host sent, and below the axis, received."""
    if not results.nics:
        raise ConfigError("%s: the results have no nic line" % results.runs[0].experiment)
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
            axes.set_title("%s%s: %s" % (head, drawing.label(store), _times(summary)))
            if sampled:
                _draw_nic(axes, sampled[0])
            else:
                drawing.nothing_right(axes, "failed, or not sampled")
            axes.set_ylabel("Gbit/s: sent, received" if column == 0 else "")
            axes.set_xlabel("seconds" if row == len(stores) - 1 else "")
    extent = max((abs(value) for row in grid for axes in row for value in axes.get_ylim()), default=1)
    ends = [axes.get_xlim()[1] for row in grid for axes in row if axes.has_data()]
    for axes in (axes for row in grid for axes in row):
        axes.set_ylim(-extent, extent)
        axes.set_xlim(0, max(ends, default=1))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: "%g" % abs(value)))
    return figure


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


_KINDS = {
    "lines": _lines, "shares": _shares, "bars": _bars, "cards": _cards, "curves": curves, "losses": losses,
    "accuracies": accuracies,
}  # fmt: skip
