"""`p3 plot`: figures and tables of what `p3 bench` measured.

    p3 plot results.jsonl --out figures --format png,svg
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import List

from p3.errors import ConfigError
from p3.settings import Settings

_FORMATS = ("png", "svg")


def add_parser(commands) -> None:
    """Adds `plot` to the subparsers of `p3`."""
    plot = commands.add_parser(
        "plot",
        help="draw figures and tables of what `p3 bench` measured",
        description="Prints a table of each experiment in the results, and writes a figure of it.",
    )
    plot.add_argument("results", nargs="+", metavar="RESULTS.jsonl", help="what `p3 bench --out` wrote")
    plot.add_argument("--out", default=".", metavar="DIR", help="folder for the figures (default: this one)")
    plot.add_argument("--format", type=_formats, default=list(_FORMATS), metavar="F[,F]",
                      help="of the figures (default png,svg)")
    plot.add_argument("--markdown", action="store_true", help="tables for GitHub instead of for a terminal")
    plot.set_defaults(handler=_plot)


def _plot(options, _settings: Settings, _command: List[str]) -> int:
    from p3.measure.bench import report
    from p3.measure.results import records, tables

    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError("p3 plot needs matplotlib (%s): pip install matplotlib" % error) from None

    found = records.read(options.results)
    for mixture in found.mixtures():
        logging.getLogger("p3.measure.bench").warning(mixture)
    folder = Path(options.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written = report.save_figures(found, folder, options.format)
    except OSError as error:
        raise ConfigError("--out %s: %s" % (options.out, error)) from None
    print((tables.markdown if options.markdown else tables.text)(report.tables(found)))
    print("wrote " + ", ".join(map(str, written)), file=sys.stderr)
    return 0


def _formats(text: str) -> List[str]:
    found = text.split(",")
    for one in found:
        if one not in _FORMATS:
            raise argparse.ArgumentTypeError("%r is not one of %s" % (one, ", ".join(_FORMATS)))
    return found
