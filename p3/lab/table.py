"""The records of an experiment as a table: for each configuration the bound, and each store's median and spread.

    rows = summarize(records)
    print(text(rows))
"""

from __future__ import annotations

import statistics
from typing import Dict, Iterable, List, NamedTuple, Optional

# Speedups over dist_sync that the paper reports, the best of its bandwidth sweep.
PAPER = {"resnet50": 1.26, "inception_v3": 1.18, "vgg19": 1.66, "sockeye": 1.38}
BASES = ("dist_sync", "mxnet_p3", "p3_slicing")


class Spread(NamedTuple):
    """Medians of runs: their median, and how far they lie apart."""

    median_s: float
    least_s: float
    most_s: float

    def __str__(self) -> str:
        return f"{self.median_s:.3f} ({self.least_s:.3f}..{self.most_s:.3f})"


class Row(NamedTuple):
    """One configuration. A store without any right run is in `failures` alone."""

    record: Dict  # any of its runs: what it is
    stores: Dict[str, Spread]
    failures: Dict[str, str]

    def speedup(self, base: str) -> Optional[float]:
        if "p3_sync" not in self.stores or base not in self.stores:
            return None
        return self.stores[base].median_s / self.stores["p3_sync"].median_s

    @property
    def over_bound(self) -> Optional[float]:
        """By what fraction p3_sync takes longer than the bound."""
        if "p3_sync" not in self.stores or self.record["bound_s"] is None:
            return None
        return self.stores["p3_sync"].median_s / self.record["bound_s"] - 1


def summarize(records: Iterable[Dict]) -> List[Row]:
    """Configurations and stores in the order of their first run."""
    runs: Dict[tuple, Dict[str, List[Dict]]] = {}
    for record in records:
        if record["kind"] == "run":
            # By what a configuration is, not by its label: two may differ in the rate alone.
            key = tuple(record[name] for name in ("model", "size", "compute_s", "rate_mbit", "delay_ms", "hosts",
                                                  "slice_elements", "label"))  # fmt: skip
            runs.setdefault(key, {}).setdefault(record["store"], []).append(record)
    return [_row(by_store) for by_store in runs.values()]


def text(rows: List[Row]) -> str:
    """For people."""
    if not rows:
        return "no run has ended"
    stores = sorted({store for row in rows for store in (*row.stores, *row.failures)}, key=_order)
    bases = [base for base in BASES if base in stores and "p3_sync" in stores]
    emulated = rows[0].record["computation"] == "emulated"
    header = ["model", "", "bound", *stores, *(f"over {base}" for base in bases)]
    lines = [header + (["to the bound"] if "p3_sync" in stores else [])]
    for row in rows:
        cells = [row.record["model"], row.record["label"], _or_dash(row.record["bound_s"], "{:.3f}")]
        cells += [str(row.stores.get(store, row.failures.get(store) and "failed" or "-")) for store in stores]
        cells += [_or_dash(row.speedup(base), "{:.2f}x") for base in bases]
        if "p3_sync" in stores:
            cells.append(_or_dash(row.over_bound, "{:+.1%}"))
        lines.append(cells)
    widths = [max(map(len, column)) for column in zip(*lines)]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]
    about = "seconds per iteration: median of the runs' medians (least..most); "
    about += "computation is emulated" if emulated else "nothing is emulated"
    return "\n".join([about, *table])


def best_speedups(rows: List[Row]) -> str:
    """Of each model, over dist_sync, beside the paper's."""
    lines = []
    for model in dict.fromkeys(row.record["model"] for row in rows):
        found = [(row.speedup("dist_sync"), row.record["label"]) for row in rows if row.record["model"] == model]
        found = [one for one in found if one[0] is not None]
        if found:
            speedup, label = max(found)
            paper = f"; the paper's best is {PAPER[model]:.2f}x" if model in PAPER else ""
            lines.append(f"{model}: p3_sync is at best {speedup:.2f}x as fast as dist_sync, at {label}{paper}")
    return "\n".join(lines)


def _row(by_store: Dict[str, List[Dict]]) -> Row:
    stores, failures = {}, {}
    for store, runs in by_store.items():
        medians = [run["median_s"] for run in runs if run["result"] == "right"]
        if medians:
            stores[store] = Spread(statistics.median(medians), min(medians), max(medians))
        bad = [run for run in runs if run["result"] != "right"]
        if bad:
            failures[store] = bad[0]["error"] or bad[0]["result"]
    record = next(iter(by_store.values()))[0]
    return Row(record, stores, failures)


def _order(store: str) -> int:
    known = (*BASES, "p3_sync")
    return known.index(store) if store in known else len(known)


def _or_dash(value, form: str) -> str:
    return "-" if value is None else form.format(value)
