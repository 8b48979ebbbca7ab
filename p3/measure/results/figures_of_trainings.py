"""The figures of real trainings: losses over steps and seconds, and accuracies over epochs and seconds."""

from __future__ import annotations

import textwrap
from typing import Any, Callable, Dict, Sequence

from matplotlib import figure as matplotlibs

from p3.measure.results import accuracies as over_epochs
from p3.measure.results import curves as losses_over_time
from p3.measure.results import drawing
from p3.measure.results import seeds as of_seeds
from p3.measure.results.records import Results
from p3.measure.results.summaries import Spread, comparable, summarise
from p3.measure.results.views import Figure

_SHOWN = 60  # points of a line with a band, about, if there are more
_ERRORS_SHOWN = 6  # as many times the greatest error of the last epoch; what lies further below is training's begin


def curves(_view: Figure, results: Results) -> matplotlibs.Figure:
    """A row for each training: each store's loss over seconds, and beside it the CPU seconds of an iteration."""
    summaries = summarise(results.runs)
    drawn = losses_over_time.curves(results.runs)
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
            place = drawing.label(one.store)
            cpu.bar(place, median, 0.7, color=drawing.style(one.store)[0])
            cpu.errorbar(place, median, [[median - low], [high - median]], fmt="none", ecolor="#333333", capsize=3)
            cpu.annotate("%.3g" % median, (place, high), (0, 3), textcoords="offset points", ha="center", fontsize=8)
        names = [textwrap.fill(drawing.label(one.store), 11) for one in known]
        cpu.set_xticks(range(len(names)), names, fontsize=7)
        cpu.margins(y=0.12)
    drawing.legend(figure, summaries)
    return figure


def _draw_curves(axes, drawn: Sequence[losses_over_time.Curve]) -> None:
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
        drawing.nothing_right(axes)
    axes.set_xlabel("seconds")
    axes.set_ylabel("loss, mean of %d steps" % losses_over_time.SMOOTHED_STEPS)
    axes.set_xlim(left=0)


def losses(view: Figure, results: Results) -> matplotlibs.Figure:
    """Two rows for each training, its losses and its accuracies, if they are known. A line is the median over the
    seeds, its band from the least to the greatest."""
    bands = of_seeds.bands(results.runs)
    footer = "Of batches, mean of %d steps: %s. Dashed: DDP's hooks." % (
        losses_over_time.SMOOTHED_STEPS, _meaning(bands))  # fmt: skip
    rows = {"loss": lambda one: one.losses, "accuracy": lambda one: one.accuracies}
    if not any(one.accuracies for one in bands):
        del rows["accuracy"]
    return _of_bands(results, view.title, [footer], bands, rows, "steps")


def accuracies(_view: Figure, results: Results) -> matplotlibs.Figure:
    """A row for each net and rate. A line is the median over the seeds, its band from the least to the greatest."""
    bands = over_epochs.bands(results.runs)
    footer = [
        "Test accuracy after each epoch: %s. Seconds are those of training: tests are not counted." % _meaning(bands),
        over_epochs.HERE,
        over_epochs.PAPER,
    ]

    def finish(axes, here) -> None:
        worst = max((1 - one.epochs[-1].low for one in here), default=1.0)
        axes.set_ylim(max(0.0, 1 - _ERRORS_SHOWN * worst), 1.0)

    title = "Accuracy with and without lost gradients"
    return _of_bands(results, title, footer, bands, {"test accuracy": lambda one: one.epochs}, "epochs", finish)


def _meaning(bands: Sequence[Any]) -> str:
    count = max((len(one.finals) for one in bands), default=0)
    return "median of %d seed%s, band from the least to the greatest" % (count, "" if count == 1 else "s")


def _of_bands(
    results: Results, title: str, footer: Sequence[str], bands: Sequence[Any],
    rows: Dict[str, Callable[[Any], Sequence[Spread]]], counted: str,
    finish: Callable[[Any, Sequence[Any]], None] = lambda axes, here: None,
) -> matplotlibs.Figure:  # fmt: skip
    """Rows for each training: what each tells of a band, for all that is `counted`, over that and over seconds.
    `finish`: of the axes, and the bands that are in them."""
    summaries = summarise(results.runs)
    panels = [(*row, members) for _, members in drawing.panels(summaries, lambda one: {}) for row in rows.items()]
    figure, grid = drawing.figure(results, title, len(panels), 2, footer=footer)
    for (by_count, by_seconds), (told, spreads, members) in zip(grid, panels):
        here = [one for one in bands if comparable(one.configuration) == comparable(members[0])]
        by_count.set_title(drawing.title(members[0], ("rate", "hosts")))
        by_count.set_xlabel(counted)
        by_seconds.set_title("the same over seconds")
        by_seconds.set_xlabel("seconds")
        for number, one in enumerate(here):
            values = spreads(one)
            if not values:
                continue
            _draw_band(by_count, range(1, len(values) + 1), one.configuration.store, values, number)
            _draw_band(by_seconds, one.at_s, one.configuration.store, values, number)
        for axes in (by_count, by_seconds):
            axes.set_ylabel(told)
            axes.set_xlim(left=0)
            finish(axes, here)
            if not here:
                drawing.nothing_right(axes)
    drawing.legend(figure, summaries)
    return figure


def _draw_band(axes, places, store: str, spreads: Sequence[Spread], number: int) -> None:
    colour, _ = drawing.style(store)
    every = len(spreads) // _SHOWN + 1
    shown = slice((len(spreads) - 1) % every, None, every)  # the last one, too
    places, (median, low, high) = places[shown], zip(*spreads[shown])
    axes.fill_between(places, low, high, color=colour, alpha=0.18, linewidth=0, zorder=2)
    axes.plot(places, median, color=colour, linewidth=1.5, zorder=3 + number / 10, linestyle=drawing.dashes(store))
