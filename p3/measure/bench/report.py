"""All tables and figures of results: each experiment's own, as its entry has them."""

from __future__ import annotations

from pathlib import Path
from typing import List, Sequence

from p3.errors import ConfigError
from p3.measure.bench import experiments
from p3.measure.results.records import Results
from p3.measure.results.tables import Table


def tables(results: Results) -> List[Table]:
    """Experiments in the order of their first runs."""
    return [
        table
        for name in results.experiments()
        for make in experiments.named(name).tables
        for table in make(results.only(name))
    ]


def with_figures() -> List[str]:
    return [one.name for one in experiments.EXPERIMENTS if one.figure is not None]


def save_figures(results: Results, folder: Path, formats: Sequence[str]) -> List[Path]:
    """Writes a figure for each experiment that was run; where they are. Needs matplotlib."""
    from p3.measure.results import figures

    known = with_figures()
    for name in results.experiments():
        if name not in known:
            raise ConfigError("there is no figure for the experiment %s, only for %s" % (name, ", ".join(known)))
    written: List[Path] = []
    for name in results.experiments():
        view = experiments.named(name).figure
        written += figures.save(view, results.only(name), folder / name, formats)
    return written
