"""A prediction in words: one in full, several as a table; and as a record."""

from __future__ import annotations

import dataclasses
from typing import Dict, Iterator, List, Sequence

from p3.measure.replay import groups as trees
from p3.measure.simulate.predict import Prediction
from p3.measure.simulate.setting import Setting

_SHOWN_LINKS = 16
LAYERS = "whole layers, first come, first served"
CLIPPING = {"none": "not clipped", "norm": "clipped by the servers' norm", "wait": "clipped after all values"}


def full(setting: Setting, prediction: Prediction) -> Iterator[str]:
    """Lines: the iteration, the bound, where the time went, and each link."""
    yield job(setting)
    yield _iteration(prediction)
    if prediction.bound_s is None:
        yield f"bound unknown: {prediction.bound_reason}"
    else:
        yield f"bound {prediction.bound_s:.4f} s: {prediction.bound_reason}"
    yield ""
    yield "an average worker's iteration"
    total = prediction.compute_s + sum(seconds for _, seconds in prediction.waits)
    for name, seconds in [("computation", prediction.compute_s), *prediction.waits]:
        if seconds > 0.0005 * total:
            waits = "" if name == "computation" else "waits for "
            yield f"  {seconds:9.4f} s  {seconds / total:6.1%}  {waits}{name}"
    yield ""
    yield from _links(prediction)


def job(setting: Setting) -> str:
    network = setting.network
    rates = sorted(set(network.up_mbit + network.down_mbit))
    grouped = f"groups of {trees.told(setting.groups)}, " if setting.groups else ""
    scheme = {"p3": "P3", "layers": LAYERS}.get(setting.scheme, f"DDP's ring, buckets of {setting.bucket_mb:g} MB")
    return (
        f"{setting.model.name}, {setting.model.bytes / 1e6:.1f} MB, {scheme}{compressed(setting)}: "
        f"{network.hosts} hosts, {grouped}"
        f"{' and '.join(f'{rate:g}' for rate in rates)} Mbit/s, {setting.compute_s:g} s of computation"
        + (", gradients at the end" if setting.release == "end" else "")
        + (f", {CLIPPING[setting.clip]}" if setting.clip != "none" and setting.scheme != "ddp" else "")
    )


def compressed(setting: Setting) -> str:
    """In words, behind others."""
    return "" if setting.compression is None else f", {setting.compression}"


def _iteration(prediction: Prediction) -> str:
    text = f"iteration {prediction.mean_s:.4f} s"
    if prediction.above_bound is not None:
        text += f", {prediction.above_bound:+.1%} above the bound"
    return text + f"; the slowest worker's: {min(prediction.iteration_s):.4f} to {max(prediction.iteration_s):.4f} s"


def _links(prediction: Prediction) -> Iterator[str]:
    by_use = sorted(enumerate(zip(prediction.up, prediction.down)),
                    key=lambda one: -max(link["use"] for link in one[1]))
    shown = sorted(by_use[:_SHOWN_LINKS], key=lambda one: one[0])
    yield "link     use: up   down    queue, ms: mean up   down   greatest up   down    segments lost: up   down"
    for host, (up, down) in shown:
        yield "%4d %12.1f%% %5.1f%% %19.1f %6.1f %13.1f %6.1f %19.2f%% %5.2f%%" % (
            host, 100 * up["use"], 100 * down["use"], 1e3 * up["mean_queue_s"], 1e3 * down["mean_queue_s"],
            1e3 * up["greatest_queue_s"], 1e3 * down["greatest_queue_s"], _lost(up), _lost(down),
        )  # fmt: skip
    if len(by_use) > len(shown):
        yield f"and {len(by_use) - len(shown)} less used ones"


def _lost(link: Dict[str, float]) -> float:
    return 100 * link["lost"] / max(1, link["segments"] + link["lost"])


def table(settings: Sequence[Setting], predictions: Sequence[Prediction]) -> Iterator[str]:
    """A line for each; columns that are alike for all are said once, above."""
    columns = [_columns(setting) for setting in settings]
    differing = [name for name in columns[0] if len({one[name] for one in columns}) > 1]
    alike = [f"{name} {value}" for name, value in columns[0].items() if name not in differing and value]
    yield ", ".join(alike)
    head = [*differing, "iteration, s", "bound, s", "above", "use of links"]
    rows = []
    for one, prediction in zip(columns, predictions):
        use = max(link["use"] for link in prediction.up + prediction.down)
        rows.append([
            *(one[name] for name in differing),
            f"{prediction.mean_s:.3f}",
            "unknown" if prediction.bound_s is None else f"{prediction.bound_s:.3f}",
            "" if prediction.above_bound is None else f"{prediction.above_bound:+.1%}",
            f"{use:.1%}",
        ])  # fmt: skip
    yield from aligned([head, *rows])


def aligned(rows: List[List[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        yield "  ".join(text.rjust(width) for text, width in zip(row, widths)).rstrip()


def _columns(setting: Setting) -> Dict[str, str]:
    network = setting.network
    return {
        "model": setting.model.name,
        "MB": f"{setting.model.bytes / 1e6:.1f}",
        "scheme": setting.scheme,
        "slice": "" if setting.scheme == "layers" else str(setting.slice_elements),
        "compute, s": f"{setting.compute_s:g}",
        "gradients": "" if setting.release == "layer" else "at the end",
        "compression": "" if setting.compression is None else str(setting.compression),
        "clip": "" if setting.scheme == "ddp" else setting.clip,
        "Mbit/s": _told(network.up_mbit) + ("" if network.up_mbit == network.down_mbit
                                            else " down " + _told(network.down_mbit)),
        "delay, ms": f"{network.delay_ms:g}",
        "lost": f"{100 * network.loss:g}%" if network.loss else "",
        "congestion": network.congestion,
        "hosts": str(network.hosts),
        "groups": trees.told(setting.groups),
    }  # fmt: skip


def _told(rates: Sequence[float]) -> str:
    """One for each host, the last one for all further ones, as the option has it."""
    kept = len(rates)
    while kept > 1 and rates[kept - 2] == rates[-1]:
        kept -= 1
    return ":".join(f"{rate:g}" for rate in rates[:kept])


def record(setting: Setting, prediction: Prediction) -> Dict:
    """For --out: what was asked, then what is predicted."""
    asked = {
        field.name: getattr(setting, field.name)
        for field in dataclasses.fields(setting)
        if field.name not in ("model", "network", "traced_iterations", "traces_links")
    }
    told = {
        field.name: getattr(prediction, field.name)
        for field in dataclasses.fields(prediction)
        if field.name not in ("spans",)
    }
    return {
        "kind": "simulation",
        "model": setting.model.name,
        "size": setting.model.size,
        "bytes": setting.model.bytes,
        "hosts": setting.network.hosts,
        **asked,
        "compression": None if setting.compression is None else str(setting.compression),
        "network": dataclasses.asdict(setting.network),
        **told,
    }
