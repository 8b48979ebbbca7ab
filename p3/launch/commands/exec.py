"""`p3 exec`: the options of one process of a job; p3/launch/execute.py becomes it."""

from __future__ import annotations

import argparse
import os
import sys
from typing import List

from p3.errors import ConfigError
from p3.launch import execute
from p3.launch.commands.arguments import timeout
from p3.launch.execute import Launched
from p3.launch.launchers import adapters, place
from p3.launch.launchers.options import add_options
from p3.settings import Settings


def add_parser(commands) -> None:
    """Adds `exec` to the subparsers of `p3`."""
    parser = commands.add_parser(
        "exec",
        help="run a process of a job that srun, mpirun or another launcher starts",
        description="Under srun, mpirun, torchrun or an indexed Kubernetes Job: runs COMMAND as the worker that the "
        "launcher's variables describe, and a server beside the first of each machine. With DMLC_ROLE, the other "
        "DMLC_* variables and P3_SECRET or P3_SECRET_FILE: runs the scheduler, a server, or COMMAND as a worker.",
    )
    add_options(parser)
    parser.add_argument("--secret-stdin", action="store_true", help="read the secret, a line, from standard input")
    parser.add_argument("--silence", type=timeout, metavar="S", help="end if nothing more comes there for S seconds")
    for name in Launched._fields:  # from `p3 run`
        parser.add_argument(Launched.option(name), type=int, help=argparse.SUPPRESS)
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND ...", help="what a worker runs")
    parser.set_defaults(handler=_exec)


def _exec(options, settings: Settings, command: List[str]) -> int:
    if options.secret_stdin:
        return execute.supervise([sys.executable, *execute.p3_exec("--", *command)], options.silence)
    if settings.role is None:
        adapter = place.find(adapters.ADAPTERS, os.environ, options.launcher)
        if adapter is not None:
            from p3.launch.launchers import supervise  # here: the processes that P3 starts do without it

            return supervise.run(settings, adapter, options.meeting_dir, command)
        if adapters.outside_a_step(os.environ):
            raise ConfigError("p3 exec: this is Slurm's batch script itself; write srun p3 exec ... to start the tasks")
    elif settings.rank is None and "MX_CONFIG" in os.environ:
        os.environ["P3_RANK"] = adapters.rank_of_mxjob(os.environ)
        settings = Settings.from_env(os.environ)
    launched = Launched(*(getattr(options, name) for name in Launched._fields))
    return execute.execute(settings, command, launched)
