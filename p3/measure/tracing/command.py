"""`p3 trace`: what a job recorded with P3_TRACE=DIR, as a Chrome trace file and in words; or held against changes."""

from __future__ import annotations

import argparse
import os
from typing import List

from p3 import pictures
from p3.errors import ConfigError
from p3.settings import Settings


def add_parser(commands) -> None:
    """Adds `trace` to the subparsers of `p3`."""
    trace = commands.add_parser(
        "trace",
        help="put together what a job recorded with P3_TRACE=DIR, and say what training waited for",
        description="Writes a Chrome trace file, which ui.perfetto.dev opens, and prints which keys the forward passes "
        "waited for and why.",
    )
    trace.add_argument("folder", metavar="DIR", help="with the files of all processes of one job")
    trace.add_argument("--out", metavar="FILE", help="of the Chrome trace (default: DIR/trace.json)")
    trace.add_argument("--round", type=_round, metavar="N", help="explain the waits of this round, on each worker")
    trace.add_argument("--svg", metavar="PREFIX", help="draw what is printed, as PREFIX-light.svg and PREFIX-dark.svg")
    trace.add_argument("--what-if", action="append", default=[], metavar="CHANGE[,CHANGE]",
                       help="simulate the run with hosts=, rate=, servers=, slice= or codec= of your own, as "
                       "rate=100mbit,codec=int8; may be repeated")
    trace.add_argument("--rate", metavar="R", help="of the links of the run, each way, as 200mbit; one for each host: "
                       "40mbit:20mbit. To simulate a run on several hosts")
    trace.set_defaults(handler=_trace)


def _trace(options, _settings: Settings, _command: List[str]) -> int:
    from p3.trace import chrome, report  # here, as they need NumPy
    from p3.trace.lives import load

    trace = load(options.folder)
    if options.what_if or options.rate:
        return _what_if(trace, options)
    lines = list(report.lines(trace, options.round))
    print("\n".join(lines))
    if options.svg:
        of_round = " --round %d" % options.round if options.round else ""
        pictures.save(lines, options.svg, "p3 trace %s%s" % (options.folder, of_round))
    path = options.out or os.path.join(options.folder, "trace.json")
    try:
        count = chrome.write(trace, path)
    except OSError as error:
        raise ConfigError("--out %s cannot be written: %s" % (path, error.strerror)) from None
    print("\n%s: %d events, for https://ui.perfetto.dev" % (path, count))
    return 0


def _what_if(trace, options) -> int:
    from p3.measure.simulate.options import link_rate
    from p3.measure.tracing import what_if

    try:
        rate = None if options.rate is None else link_rate(options.rate)
        for line in what_if.lines(trace, rate, [what_if.parse(text) for text in options.what_if]):
            print(line)
    except argparse.ArgumentTypeError as error:
        raise ConfigError("p3 trace: %s" % error) from None
    except ValueError as error:
        raise error if isinstance(error, ConfigError) else ConfigError("p3 trace: %s" % error) from None
    return 0


def _round(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError("%r is not a round; they count from 1" % text)
    return int(text)
