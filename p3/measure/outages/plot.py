"""The figure of `p3 bench outages`: throughput over time, and who died when."""

from __future__ import annotations

from typing import Sequence

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from p3.measure.outages.story import Story
from p3.measure.outages.ways import WAYS
from p3.measure.results.drawing import METADATA, SETTINGS, WARNING_COLOUR

_STEPS_OF_A_WINDOW = 4
_COLOUR, _GREY = "#009E73", "#666666"
# How each death is marked, by who died: a line, and above it a sign.
_MARKS = {"worker": (WARNING_COLOUR, "v"), "server": ("#0072B2", "s"), "scheduler": ("#CC79A7", "D")}
_ROW_INCHES, _WIDTH_INCHES = 0.95, 9.0
_TOP = 1.25  # of an axis


def save(stories: Sequence[Story], title: str, path: str) -> None:
    """SVG or PNG, by the end of `path`. The first story is what others are held against."""
    with matplotlib.rc_context({**SETTINGS, "axes.grid": False}):
        made = Figure((_WIDTH_INCHES, 1.4 + _ROW_INCHES * len(stories)), layout="constrained")
        FigureCanvasAgg(made)
        made.suptitle(title, fontsize=11)
        rows = made.subplots(len(stories), 1, sharex=True, squeeze=False)[:, 0]
        for axes, story in zip(rows, stories):
            _draw(axes, story, stories[0])
        rows[-1].set_xlabel("seconds")
        died = {_role(who) for story in stories for _, who in story.deaths}
        signs = [Line2D([], [], color=colour, marker=sign, markersize=5, label=f"a {role} is killed")
                 for role, (colour, sign) in _MARKS.items() if role in died]  # fmt: skip
        if signs:
            made.legend(handles=signs, loc="outside lower center", ncols=len(signs))
        kind = path.rpartition(".")[2]
        made.savefig(path, format=kind, metadata=METADATA.get(kind, {}), dpi=110)


def _draw(axes, story: Story, reference: Story) -> None:
    window_s = _STEPS_OF_A_WINDOW * reference.step_s
    begins, ends = np.array(story.spans()).T - story.begin
    edges = np.arange(0, ends.max() + window_s, window_s)
    # A step counts for the time that it takes: counted where it ends, a window would have one more or less by chance.
    done = np.array([np.clip((edge - begins) / np.maximum(ends - begins, 1e-9), 0, 1).sum() for edge in edges])
    share = np.diff(done) / window_s / reference.rate
    axes.stairs(share, edges, fill=True, color=_COLOUR if WAYS[story.way].is_p3 else _GREY)
    for at, who in story.deaths:
        colour, sign = _MARKS[_role(who)]
        axes.plot([at - story.begin] * 2, [0, 1.12], color=colour, linewidth=1.0,
                  marker=sign, markersize=4, markevery=[1])  # fmt: skip
    axes.set_ylim(0, _TOP)
    axes.set_yticks([0, 1], ["0", "100%"])
    axes.set_title(f"{WAYS[story.way].label}: {story.rate / reference.rate:.0%}", loc="left", fontsize=10)


def _role(who: str) -> str:
    return who.split()[0]
