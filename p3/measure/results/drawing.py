"""What all figures of `p3 bench` have in common: how stores look, titles and legends, what was measured where."""

from __future__ import annotations

import textwrap
from typing import Callable, Collection, Dict, List, Optional, Sequence, Tuple

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from p3.measure.jobs.stores import named, rank
from p3.measure.results.records import Results
from p3.measure.results.summaries import IDLE_SHARE, Summary, runs_text, setting, summarise

FORMATS = ("png", "svg")

BOUND_STYLE = {"color": "black", "linestyle": (0, (5, 2)), "linewidth": 1.3}
WARNING_COLOUR = "#B00000"

# The same file from the same results: no date, and no random names in SVG.
SETTINGS = {
    "svg.hashsalt": "p3",
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}
METADATA = {"png": {}, "svg": {"Date": None}}

PANEL_INCHES = (4.6, 3.5)
COLUMNS = 3
_TITLE_WIDTH = 54  # characters
_HEAD_INCHES = 0.8
_FOOT_LINE_INCHES = 0.13
_LEGEND_ROW_INCHES = 0.17
_LEGEND_COLUMNS = 6  # at most
_HANDLE_INCHES, _LETTER_INCHES = 0.5, 0.07  # of an entry


def panels(members: Sequence, varying: Callable) -> List[Tuple[Tuple, List]]:
    """Members that differ in the store, its slices and `varying` alone share a panel."""
    found: Dict[Tuple, List] = {}
    for one in members:
        values = dict(vars(one.configuration), store=None, slice_elements=None)
        values.update(varying(one))
        found.setdefault(tuple(values.values()), []).append(one)
    return list(found.items())


def figure(
    results: Results,
    title: str,
    rows: int,
    columns: int,
    panel_width: float = PANEL_INCHES[0],
    footer: Sequence[str] = (),
    remark: str = "",
    legend_rows: Optional[int] = None,
):
    """A figure and its axes, by row and column. `footer`: what its marks mean, where they are not those of medians;
    `remark`: and what else they mean. `legend_rows`: None: those of a legend of the stores."""
    width = max(panel_width * columns, 2 * PANEL_INCHES[0])
    warnings, footer = _warnings(results, int(width * 16)), _footer(results, footer, remark, int(width * 17))
    foot = _FOOT_LINE_INCHES * (len(warnings) + len(footer) + 1)
    legend_rows = legend_rows or _legend_rows({run.store for run in results.runs}, width)
    head = _HEAD_INCHES + _LEGEND_ROW_INCHES * (legend_rows - 1)
    height = PANEL_INCHES[1] * rows + head + foot
    made = Figure((width, height), layout="constrained")
    FigureCanvasAgg(made)
    made.get_layout_engine().set(
        rect=(0, foot / height, 1, 1 - (head + foot) / height), w_pad=0.1, h_pad=0.12
    )
    emulated = any(run.computation == "emulated" for run in results.runs)
    made.text(0.5, 1 - 0.12 / height, title, ha="center", va="top", fontsize=13, fontweight="bold")
    made.text(0.5, 1 - 0.38 / height,
              "computation is emulated: a timed wait for each layer" if emulated else "real computation",
              ha="center", va="top", fontsize=10, style="italic")
    for number, line in enumerate([*warnings, *footer], 1):
        made.text(0.1 / width, (foot - _FOOT_LINE_INCHES * number) / height, line, fontsize=7.5, va="center",
                  color=WARNING_COLOUR if number <= len(warnings) else "#444444")
    return made, made.subplots(rows, columns, squeeze=False)


def _warnings(results: Results, columns: int) -> List[str]:
    """Why this figure may mislead: lines of at most so many characters."""
    warnings = results.mixtures()
    if any(one.is_below_bound for one in summarise(results.runs)):
        warnings.append("results below the bound are impossible: check the rate, and the bound")
    return [part for line in warnings for part in textwrap.wrap("NOTE: " + line, columns)]


def _footer(results: Results, meaning: Sequence[str], remark: str, columns: int) -> List[str]:
    """What the marks mean, and what was run where: lines of at most so many characters."""
    summaries = summarise(results.runs)
    lines = list(meaning) or ["Medians of %s, whiskers from the least to the greatest." % runs_text(summaries)]
    if any(one.failed for one in summaries):
        lines[0] += " Hollow: some of the runs failed. Cross: all failed, or not run."
    lines[0] += remark
    if results.nics:
        lines.append(
            "Idle: share of the intervals of %g ms in which at most %g%% of the rate passed."
            % (1e3 * results.nics[0].interval_s, 100 * IDLE_SHARE)
        )
    for one in results.settings:
        machine = ", ".join("%s %s" % item for item in one.machine.items() if isinstance(item[1], (str, int, float)))
        lines.append("%s (%s; commit %s; %s)" % (one.command, machine, one.commit, one.time))
    wrapped = [part for line in dict.fromkeys(lines) for part in textwrap.wrap(line, columns)]
    return wrapped if len(wrapped) <= 6 else [*wrapped[:5], "... and more; see the results file"]


def legend(figure: Figure, summaries: Sequence[Summary]) -> None:
    handles = []
    for store in stores(summaries):
        colour, marker = style(store)
        handles.append(
            Line2D([], [], color=colour, marker=marker, linewidth=1.8, linestyle=dashes(store), label=label(store))
        )
    if any(one.bound_s for one in summaries):
        handles.append(bound_handle())
    place_legend(figure, handles, _legend_rows(stores(summaries), figure.get_figwidth()))


def bound_handle() -> Line2D:
    return Line2D([], [], label="bound: no schedule is faster", **BOUND_STYLE)


def place_legend(figure: Figure, handles: Sequence[Line2D], rows: int) -> None:
    height = figure.get_figheight()
    figure.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, 1 - 0.55 / height),
                  ncols=-(-len(handles) // rows), fontsize=9, borderaxespad=0.0, columnspacing=1.4)


def _legend_rows(names: Collection[str], width: float) -> int:
    """Of these stores, in a figure of so many inches."""
    longest = max((len(label(name)) for name in names), default=1)
    columns = min(_LEGEND_COLUMNS, max(1, int(width / (_HANDLE_INCHES + _LETTER_INCHES * longest))))
    return -(-len(names) // columns)


def dashes(store: str) -> str:
    """Of a line: those of DDP's hooks have the codecs' colours."""
    one = named(store)
    return "--" if one.is_ddp and one.compression is not None else "-"


def title(one, told: Sequence[str]) -> str:
    """Of a panel, in lines that are no wider than it is."""
    return "\n".join([setting(one, ["model"]), *textwrap.wrap(setting(one, [*told, "release", "clip"]), _TITLE_WIDTH)])


def nothing_right(axes, words: str = "no right run") -> None:
    axes.text(0.5, 0.5, words, ha="center", transform=axes.transAxes, color=WARNING_COLOUR)


def stores(summaries: Sequence[Summary]) -> List[str]:
    return sorted({one.store for one in summaries}, key=rank)


def style(store: str) -> Tuple[str, str]:
    return named(store).look


def label(store: str) -> str:
    return named(store).label
