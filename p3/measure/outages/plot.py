"""The figure of `p3 bench outages`: throughput over time, and when something died."""

from __future__ import annotations

from typing import Sequence

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from p3.measure.outages.story import Story
from p3.measure.outages.ways import WAYS
from p3.measure.results.drawing import METADATA, SETTINGS, WARNING_COLOUR

_STEPS_OF_A_WINDOW = 4
_COLOUR, _GREY = "#009E73", "#666666"
_ROW_INCHES, _WIDTH_INCHES = 0.95, 9.0


def save(stories: Sequence[Story], title: str, path: str) -> None:
    """SVG or PNG, by the end of `path`. The first story is what others are held against."""
    with matplotlib.rc_context({**SETTINGS, "axes.grid": False}):
        made = Figure((_WIDTH_INCHES, 1.1 + _ROW_INCHES * len(stories)), layout="constrained")
        FigureCanvasAgg(made)
        made.suptitle(title, fontsize=11)
        rows = made.subplots(len(stories), 1, sharex=True, squeeze=False)[:, 0]
        for axes, story in zip(rows, stories):
            _draw(axes, story, stories[0])
        rows[-1].set_xlabel("seconds")
        kind = path.rpartition(".")[2]
        made.savefig(path, format=kind, metadata=METADATA.get(kind, {}), dpi=110)


def _draw(axes, story: Story, reference: Story) -> None:
    window_s = _STEPS_OF_A_WINDOW * reference.step_s
    times = np.array(story.completions()) - story.begin
    edges = np.arange(0, times[-1] + window_s, window_s)
    counts, _ = np.histogram(times, edges)
    share = counts / window_s / reference.rate
    axes.stairs(share, edges, fill=True, color=_COLOUR if WAYS[story.way].is_p3 else _GREY)
    for at, _ in story.deaths:
        axes.axvline(at - story.begin, color=WARNING_COLOUR, linewidth=1.0)
    axes.set_ylim(0, 1.15)
    axes.set_yticks([0, 1], ["0", "100%"])
    axes.set_title(f"{WAYS[story.way].label}: {story.rate / reference.rate:.0%}", loc="left", fontsize=10)
