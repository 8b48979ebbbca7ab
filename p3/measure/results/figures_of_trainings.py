"""The figure of `p3 bench accuracy`: the test accuracy of each store against epochs, and against seconds."""

from __future__ import annotations

from matplotlib.figure import Figure

from p3.measure.bench import accuracies, drawing
from p3.measure.bench.results import Results, comparable, summarise

_ERRORS_SHOWN = 6  # as many times the greatest error of the last epoch; what lies further below is training's begin


def accuracy(results: Results) -> Figure:
    """A row for each net and rate. A line is the median over the seeds, its band from the least to the greatest."""
    summaries = summarise(results.runs)
    bands = accuracies.bands(results.runs)
    panels = drawing.panels(summaries, lambda one: {})
    seeds = max((len(one.finals) for one in bands), default=0)
    meaning = (
        "Test accuracy after each epoch: median of %d seed%s, band from the least to the greatest. Seconds are those "
        "of training: tests are not counted."
    )
    footer = [meaning % (seeds, "" if seeds == 1 else "s"), accuracies.HERE, accuracies.PAPER]
    figure, grid = drawing.figure(results, "Accuracy with and without lost gradients", len(panels), 2, footer=footer)
    for (by_epoch, by_seconds), (_, members) in zip(grid, panels):
        here = [one for one in bands if comparable(one.configuration) == comparable(members[0])]
        by_epoch.set_title(drawing.title(members[0], ("rate", "hosts")))
        by_epoch.set_xlabel("epochs")
        by_seconds.set_title("the same over seconds")
        by_seconds.set_xlabel("seconds")
        for number, one in enumerate(here):
            count = range(1, len(one.epochs) + 1)
            _draw(by_epoch, count, one, number)
            _draw(by_seconds, one.at_s, one, number)
        for axes in (by_epoch, by_seconds):
            axes.set_ylabel("test accuracy")
            axes.set_xlim(left=0)
            worst = max((1 - one.epochs[-1].low for one in here), default=1.0)
            axes.set_ylim(max(0.0, 1 - _ERRORS_SHOWN * worst), 1.0)
            if not here:
                axes.text(0.5, 0.5, "no right run", ha="center", transform=axes.transAxes, color=drawing.WARNING_COLOUR)
    drawing.legend(figure, summaries)
    return figure


def _draw(axes, places, band: accuracies.Band, number: int) -> None:
    colour, _ = drawing.style(band.configuration.store)
    median, low, high = zip(*band.epochs)
    axes.fill_between(places, low, high, color=colour, alpha=0.18, linewidth=0, zorder=2)
    axes.plot(places, median, color=colour, linewidth=1.5, zorder=3 + number / 10)
