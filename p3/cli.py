"""The `p3` command: run a job, be one process of it, look at this machine, or measure in a lab and read the results."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import signal
import sys
from typing import Iterable, List, Optional

from p3 import __version__, first_process, loading
from p3.errors import ConfigError, NotBuilt, RendezvousError
from p3.settings import Settings

# The module of each command, in the order of `p3 --help`; only that of the one that is asked for is loaded.
COMMANDS = {
    "run": "p3.launch.commands.run",
    "exec": "p3.launch.commands.exec",
    "join": "p3.launch.commands.join",
    "lab": "p3.measure.lab.command",
    "plot": "p3.measure.bench.plot_command",
    "trace": "p3.measure.tracing.command",
    "bench": "p3.measure.bench.command",
    "chaos": "p3.measure.chaos.command",
    "simulate": "p3.measure.simulate.command",
    "plan": "p3.measure.planning.command",
    "doctor": "p3.doctor.command",
    "top": "p3.top.command",
}


def main(arguments: Optional[List[str]] = None) -> int:
    if os.getpid() == 1:
        first_process.stand_aside()
    arguments = sys.argv[1:] if arguments is None else arguments
    asked = [name for name in arguments[:1] if name in COMMANDS]
    options = parser(asked or COMMANDS).parse_args(arguments)
    command = getattr(options, "command", [])
    if command[:1] == ["--"]:
        command = command[1:]
    try:
        logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
        settings = Settings.from_env(os.environ)
        logging.getLogger("p3").setLevel(settings.log_level.upper())
        return options.handler(options, settings, command)
    except (ConfigError, RendezvousError, NotBuilt) as error:
        print("p3: %s" % error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def parser(names: Iterable[str] = COMMANDS) -> argparse.ArgumentParser:
    """With the options of these commands."""
    made = argparse.ArgumentParser(
        prog="p3", description="Data-parallel training with PyTorch or MXNet that stays fast on slow networks."
    )
    made.add_argument(
        "--version", action="version", version="p3 " + __version__, help="print the version of P3 and exit"
    )
    commands = made.add_subparsers(title="commands", metavar="COMMAND")
    commands.required = True
    for name in names:
        with loading.for_good():
            module = importlib.import_module(COMMANDS[name])
        module.add_parser(commands)
    return made
