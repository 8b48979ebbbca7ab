"""`p3 join`: the options; p3/launch/joining.py joins."""

from __future__ import annotations

import argparse
from typing import List

from p3.launch.commands.arguments import timeout
from p3.launch.joining import join as join_job
from p3.settings import Settings
from p3.top import find


def add_parser(commands) -> None:
    """Adds `join` to the subparsers of `p3`."""
    join = commands.add_parser(
        "join",
        help="join a running job, in the place of a worker or server that it has lost or as a further worker",
        description="Runs COMMAND as a worker of a job that goes on without lost workers (--on-worker-loss continue). "
        "It takes the place of one, or a place that --max-workers has left for it, at the others' next members(round). "
        "With --server: runs a server of a job that goes on without lost servers (--on-server-loss continue), in the "
        "place of one, from the workers' next members(round) on. The job is the one that DMLC_PS_ROOT_URI, "
        "DMLC_PS_ROOT_PORT and P3_SECRET or P3_SECRET_FILE name, or this user's job on this host.",
    )
    join.add_argument("--at", metavar="HOST:PORT", help="the job's scheduler; default: as above")
    of_pid = "the job of this process, or of this p3 run, on this host"
    join.add_argument("--pid", type=find.process_number, metavar="PID", help=of_pid)
    join.add_argument(
        "--wait", type=timeout, default=3600.0, metavar="S", help="wait at most S seconds to be let in (default 3600)"
    )
    join.add_argument("--server", action="store_true", help="join as a server, without a COMMAND")
    join.add_argument(
        "--rank", type=_rank, metavar="R", help="with --server: in the place of server R (default: of any lost one)"
    )
    join.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND ...", help="what every worker runs")
    join.set_defaults(handler=_join)


def _join(options, _settings: Settings, command: List[str]) -> int:
    return join_job(options.at, options.pid, options.wait, command, options.server, options.rank)


def _rank(text: str) -> int:
    if not text.isdigit() or int(text) > 9999:
        raise argparse.ArgumentTypeError("%r is not a rank: they start at 0" % text)
    return int(text)
