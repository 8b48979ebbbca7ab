"""A figure of predictions against the number of hosts, with what was measured in it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Dict, List, Sequence, Tuple

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from p3.errors import ConfigError
from p3.measure.jobs import stores
from p3.measure.replay import groups as trees
from p3.measure.results import records, summaries
from p3.measure.results.drawing import FORMATS, METADATA, SETTINGS
from p3.measure.simulate.predict import Prediction
from p3.measure.simulate.report import LAYERS, compressed
from p3.measure.simulate.setting import Setting

_COLOURS = (stores.GREEN, stores.RED, stores.BLUE, stores.PINK, stores.ORANGE, stores.SKY)


def save(
    settings: Sequence[Setting], predictions: Sequence[Prediction], measured: Sequence[str], path: str
) -> None:
    """A line for each scheme, slice size and groups; ConfigError if more than the hosts differs besides."""
    kind = Path(path).suffix[1:]
    if kind not in FORMATS:
        raise ConfigError(f"--plot {path}: the name must end in .{' or .'.join(FORMATS)}")
    first = settings[0]
    alike = {
        (one.model.name, one.model.size, one.compute_s, one.network.up_mbit[0], one.release, one.clip, one.compression)
        for one in settings
    }
    if len(alike) > 1:
        raise ConfigError("--plot takes one model, size, computation, rate, release, clip and compression")
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **SETTINGS}):
        figure = Figure((7.2, 4.6), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        colour_of = _draw_lines(axes, settings, predictions)
        _draw_points(axes, first, measured, colour_of)
        _finish(axes, first, sorted({one.network.hosts for one in settings}))
        figure.savefig(path, format=kind, dpi=150, metadata=METADATA[kind])


_Kind = Tuple[str, Tuple[int, ...]]  # a scheme, and its groups


def _draw_lines(axes, settings, predictions) -> Dict[_Kind, str]:
    """The colour of the first line of each kind."""
    lines: Dict[Tuple[_Kind, str], List[Tuple[int, float]]] = {}
    bounds: Dict[int, float] = {}
    for setting, prediction in zip(settings, predictions):
        at, kind = setting.network.hosts, (setting.scheme, _shared(setting.groups))
        lines.setdefault((kind, _label(setting)), []).append((at, prediction.mean_s))
        if prediction.bound_s is not None:
            bounds[at] = min(prediction.bound_s, bounds.get(at, prediction.bound_s))
    colour_of: Dict[_Kind, str] = {}
    for ((kind, label), points), colour in zip(lines.items(), _COLOURS):
        axes.plot(*zip(*points), color=colour, linewidth=1.8, label=label)
        colour_of.setdefault(kind, colour)
    if bounds:
        axes.plot(*zip(*sorted(bounds.items())), color="black", linestyle=(0, (5, 2)), linewidth=1.3,
                  label="bound of P3's slices")
    return colour_of


def _shared(groups: Sequence[int]) -> Tuple[int, ...]:
    """The same, but nothing if each host is a group of its own."""
    return tuple(groups) if math.prod(groups) > 1 else ()


def _label(setting: Setting) -> str:
    if setting.scheme == "ddp":
        return f"DDP's ring, buckets of {setting.bucket_mb:g} MB, simulated"
    if setting.scheme == "layers":
        return f"{LAYERS}, simulated"
    slices = "" if setting.slice_elements == "auto" else f" slices of {setting.slice_elements},"
    groups = f" groups of {trees.told(setting.groups)}," if _shared(setting.groups) else ""
    return f"P3,{slices}{groups} simulated"


def _draw_points(axes, first: Setting, measured: Sequence[str], colour_of: Dict[_Kind, str]) -> None:
    """Of the same model, size, computation and rate; the median of the runs, from the least to the greatest."""
    if not measured:
        return
    drawn = set()
    for one in summaries.summarise(records.read(measured).runs):
        asked = (first.model.name, first.compute_s, first.network.up_mbit[0], first.release, first.clip != "none")
        same = (one.model, one.compute_s, one.rate_mbit, one.release or "layer", one.clip is not None) == asked
        store = stores.named(one.store)
        is_drawn = store.simulated is not None and store.simulated.get("priorities", True)
        is_drawn = is_drawn and store.simulated.get("compression") == first.compression
        if not (same and is_drawn and one.median_s) or abs(one.size / first.model.size - 1) > 1e-6:
            continue
        label = f"{store.label}, measured"
        kind = (store.simulated.get("scheme", "p3"), _shared(store.simulated.get("groups", ())))
        axes.errorbar([one.hosts], [one.median_s], [[one.median_s - one.low_s], [one.high_s - one.median_s]],
                      color=colour_of.get(kind, "#333333"), marker=store.look[1],
                      markersize=6, capsize=3, linestyle="", zorder=5, label=None if label in drawn else label)
        drawn.add(label)
    if not drawn:
        raise ConfigError(
            "no run in %s is of this model, size, computation, rate, release, clipping and compression"
            % ", ".join(measured)
        )


def _finish(axes, first: Setting, places: List[int]) -> None:
    axes.set_title(
        f"{summaries.model_label(first.model.name)}, {first.model.bytes / 1e6:.3g} MB, "
        f"{first.network.up_mbit[0]:g} Mbit/s, {first.compute_s:g} s of computation"
        + compressed(first)
        + (", gradients at the end" if first.release == "end" else "")
        + (", clipped" if first.clip != "none" else "")
    )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: format(value, ",.10g")))
    axes.set_xticks(places)
    axes.set_xlabel("hosts, each with one worker and one server")
    axes.set_ylabel("seconds for an iteration")
    axes.legend(loc="upper left", fontsize=9)
