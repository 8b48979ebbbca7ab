"""A figure of two timelines on one axis, for a light page and for a dark one."""

from __future__ import annotations

from pathlib import Path
from typing import Dict, List, NamedTuple, Sequence, Tuple

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch, Rectangle
from matplotlib.path import Path as Outline

from p3.measure.results.drawing import METADATA, SETTINGS
from p3.measure.simulate.setting import Setting
from p3.measure.simulate.timeline import Bar, Timeline, groups, timelines


class Theme(NamedTuple):
    """Colours. The first layers have one of their own; the others go from `second` to `last`."""

    ink: str
    muted: str
    line: str
    first: str
    second: str
    last: str


THEMES = {
    "light": Theme("#1f2328", "#59636e", "#d1d9e0", "#d55e00", "#0b4a80", "#bcd9f0"),
    "dark": Theme("#e6edf3", "#9198a1", "#3d444d", "#ff8c42", "#8ccbff", "#24496e"),
}
TITLES = {
    "layers": "The usual way: whole layers, first come, first served",
    "p3": "P3: small slices; what the next forward pass needs first goes first",
}

_INCHES = (9.4, 5.0)
_BINS = 240  # of the axis; within one, layers are stacked by their shares of the link
_STEPS = 16  # a share is drawn as so many steps of a row
_ROWS = ("computes", "sends", "receives")
_ROW_HEIGHT, _ROW_GAP, _HEAD, _FOOT = 1.0, 0.28, 1.55, 0.75  # in units of a row
_BLOCK = len(_ROWS) * (_ROW_HEIGHT + _ROW_GAP) + _HEAD + _FOOT


def save(setting: Setting, prefix: str) -> Tuple[List[str], Tuple[Timeline, Timeline]]:
    """Writes PREFIX-light.svg and PREFIX-dark.svg; their names, and what they show."""
    drawn = timelines(setting)
    written = []
    for name, theme in THEMES.items():
        with matplotlib.rc_context({**matplotlib.rcParamsDefault, **SETTINGS}):
            written.append(f"{prefix}-{name}.svg")
            _figure(setting, drawn, theme).savefig(
                Path(written[-1]), format="svg", transparent=True, metadata=METADATA["svg"]
            )
    return written, drawn


def _figure(setting: Setting, drawn: Sequence[Timeline], theme: Theme) -> Figure:
    count = groups(setting.model.layers)[-1] + 1
    colours = [theme.first, *_ramp(theme, count - 1)]
    figure = Figure(_INCHES)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.095, 0.155, 0.895, 0.84))
    longest = max(one.seconds for one in drawn)
    axes.set_xlim(0, 1.02 * longest)
    axes.set_ylim(len(drawn) * _BLOCK - _FOOT + 0.1, 0)
    for number, one in enumerate(drawn):
        _draw(axes, one, number * _BLOCK, colours, theme, 1.02 * longest)
    _finish(axes, theme)
    _legend(figure, "layers" if count == len(setting.model.layers) else "groups of layers", colours, theme)
    return figure


def _draw(axes, one: Timeline, top: float, colours, theme: Theme, width_s: float) -> None:
    axes.text(0, top + 0.1, TITLES[one.scheme], va="top", fontsize=12, fontweight="bold", color=theme.ink)
    head = top + _HEAD - 0.12
    for text, bars in (("backward", one.backward), ("next forward", one.forward)):
        axes.text(min(bar.begin_s for bar in bars), head, text, va="bottom", fontsize=9.5, color=theme.muted)
    rows = [top + _HEAD + number * (_ROW_HEIGHT + _ROW_GAP) for number in range(len(_ROWS))]
    for label, row in zip(_ROWS, rows):
        axes.annotate(label, (0, row + _ROW_HEIGHT / 2), (-6, 0), textcoords="offset points", ha="right", va="center",
                      fontsize=10.5, color=theme.ink, annotation_clip=False)
        axes.plot([0, one.seconds], [row + _ROW_HEIGHT] * 2, color=theme.line, linewidth=0.8, zorder=1)
    for bars in (one.backward, one.forward):
        for group, begin, end in _merged(bars):
            axes.add_patch(Rectangle((begin, rows[0]), end - begin, _ROW_HEIGHT, facecolor=colours[group],
                                     linewidth=0))
            if end - begin > 0.016 * width_s:
                axes.text((begin + end) / 2, rows[0] + _ROW_HEIGHT / 2, str(group + 1), ha="center", va="center",
                          fontsize=9.5, color=_readable(colours[group]))
    for wait in one.waits:
        if wait.end_s - wait.begin_s > 0.09 * width_s:
            axes.text((wait.begin_s + wait.end_s) / 2, rows[0] + _ROW_HEIGHT / 2,
                      f"waits {wait.end_s - wait.begin_s:.2f} s", ha="center", va="center", fontsize=10.5,
                      color=colours[wait.group])
    for row, bars in zip(rows[1:], (one.sent, one.received)):
        for group, outline in _stacked(bars, width_s, one.seconds, row).items():
            axes.add_patch(PathPatch(outline, facecolor=colours[group], linewidth=0))
    axes.plot([one.seconds] * 2, [head, rows[-1] + _ROW_HEIGHT], color=theme.ink, linewidth=1.2)
    axes.text(one.seconds, head - 0.05, f"{one.seconds:.2f} s", ha="right", va="bottom", fontsize=12,
              fontweight="bold", color=theme.ink)


def _merged(bars: Sequence[Bar]) -> List[Tuple[int, float, float]]:
    """Neighbours of one group as one."""
    merged: List[Tuple[int, float, float]] = []
    for bar in bars:
        if merged and merged[-1][0] == bar.group and bar.begin_s - merged[-1][2] < 1e-9:
            merged[-1] = (bar.group, merged[-1][1], bar.end_s)
        else:
            merged.append((bar.group, bar.begin_s, bar.end_s))
    return merged


def _stacked(bars: Sequence[Bar], width_s: float, end_s: float, row: float) -> Dict[int, Outline]:
    """Of each group: what it has of the link in each bin, the first layers at the bottom."""
    bin_s = width_s / _BINS
    shares: List[Dict[int, float]] = [{} for _ in range(_BINS)]
    for bar in bars:
        for number in range(int(bar.begin_s / bin_s), min(_BINS - 1, int(bar.end_s / bin_s)) + 1):
            inside = min(bar.end_s, (number + 1) * bin_s) - max(bar.begin_s, number * bin_s)
            shares[number][bar.group] = shares[number].get(bar.group, 0.0) + max(0.0, inside) / bin_s
    boxes: Dict[int, List[Tuple[float, float, float, float]]] = {}
    for number, one in enumerate(shares):
        below = 0.0
        for group in sorted(one):
            low, high = (round(_STEPS * value) / _STEPS for value in (below, below + one[group]))
            below += one[group]
            if high <= low:
                continue
            of_group, begin = boxes.setdefault(group, []), number * bin_s
            if of_group and of_group[-1][1] == begin and of_group[-1][2:] == (low, high):
                begin = of_group.pop()[0]
            of_group.append((begin, min(end_s, (number + 1) * bin_s), low, high))
    return {group: _outline(of_group, row) for group, of_group in boxes.items()}


def _outline(boxes: Sequence[Tuple[float, float, float, float]], row: float) -> Outline:
    points, codes = [], []
    for begin, end, low, high in boxes:
        bottom, top = row + _ROW_HEIGHT * (1 - low), row + _ROW_HEIGHT * (1 - high)
        points += [(begin, bottom), (end, bottom), (end, top), (begin, top), (begin, bottom)]
        codes += [Outline.MOVETO, Outline.LINETO, Outline.LINETO, Outline.LINETO, Outline.CLOSEPOLY]
    return Outline(points, codes)


def _finish(axes, theme: Theme) -> None:
    axes.grid(False)
    axes.patch.set_visible(False)
    axes.set_yticks([])
    for side in ("left", "top", "right"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(theme.line)
    axes.tick_params(axis="x", colors=theme.muted, labelsize=10)
    axes.set_xlabel("seconds since the backward pass began", color=theme.muted, fontsize=10)


def _legend(figure: Figure, what: str, colours: Sequence[str], theme: Theme) -> None:
    """A box for each group, in forward order."""
    axes = figure.add_axes((0.095, 0.01, 0.895, 0.05))
    axes.set_axis_off()
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 1)
    axes.text(0, 0.5, f"{what}, in forward order:", va="center", fontsize=10, color=theme.muted)
    for number, colour in enumerate(colours):
        left = 34 + 5 * number
        axes.add_patch(Rectangle((left, 0), 4.6, 1, facecolor=colour, linewidth=0))
        axes.text(left + 2.3, 0.48, str(number + 1), ha="center", va="center", fontsize=9.5, color=_readable(colour))


def _ramp(theme: Theme, count: int) -> List[str]:
    begin, end = to_rgb(theme.second), to_rgb(theme.last)
    places = [number / max(1, count - 1) for number in range(count)]
    return [to_hex([a + (b - a) * place for a, b in zip(begin, end)]) for place in places]


def _readable(colour: str) -> str:
    """Black or white, whichever stands out."""
    red, green, blue = to_rgb(colour)
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "#ffffff"
