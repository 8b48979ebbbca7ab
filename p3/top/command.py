"""The `p3 top` command."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from typing import List

from p3 import pictures
from p3.cluster.watching import watcher
from p3.cluster.watching.history import LONGEST_S
from p3.settings import Settings
from p3.top import find, screen

_SPAN_S = 10.0  # of rates


def add_parser(commands) -> None:
    """Adds `top` to the subparsers of `p3`."""
    top = commands.add_parser(
        "top",
        help="show what the workers, servers and links of a running job are doing",
        description="Shows the job that DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT and P3_SECRET or P3_SECRET_FILE name, or "
        "this user's job on this host, in a table that is drawn anew until Ctrl-C or the job's end.",
    )
    top.add_argument("--once", action="store_true", help="print the table one time")
    top.add_argument("--every", type=_seconds, default=2.0, metavar="S", help="seconds between two views (default 2)")
    of_pid = "the job of this process, or of this p3 run, on this host"
    top.add_argument("--pid", type=find.process_number, metavar="PID", help=of_pid)
    top.add_argument("--svg", metavar="PREFIX", help="draw the table one time, as PREFIX-light.svg and PREFIX-dark.svg")
    top.set_defaults(handler=_top)


def _top(options, settings: Settings, _command: List[str]) -> int:
    job = find.settings_of(settings, options.pid)
    try:
        asyncio.run(_once(job, options.svg) if options.once or options.svg else _again_and_again(job, options.every))
    except watcher.Ended as end:
        print("p3 top: %s" % ("the job failed: " + end.failure if end.failure else end), file=sys.stderr)
        return 1 if end.failure else 0
    except BrokenPipeError:  # who reads has seen enough; nor can what is left in the buffer go there
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:  # how to end it
        return 0
    return 0


async def _once(job: Settings, svg: str) -> None:
    drawn = screen.lines(await watcher.look(job, LONGEST_S))
    if svg is None:
        print("\n".join(drawn), flush=True)
        return
    print("\n".join(pictures.save(drawn, svg, "p3 top")))


async def _again_and_again(job: Settings, every_s: float) -> None:
    """On a terminal each view in the place of the one before; else one after the other."""
    watching = watcher.views(job, every_s, _SPAN_S)
    try:
        view = await watching.__anext__()  # an error comes before the screen is another one
        if not sys.stdout.isatty():
            print("\n".join(screen.lines(view)), flush=True)
            async for view in watching:
                print("\n" + "\n".join(screen.lines(view)), flush=True)
            return
        with screen.Terminal() as terminal:
            terminal.show(view)
            async for view in watching:
                terminal.show(view)
    finally:
        await watching.aclose()


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.5 <= value <= 3600:
        raise argparse.ArgumentTypeError("%r is not a number of seconds from 0.5 to 3600" % text)
    return value
