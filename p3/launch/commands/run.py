"""`p3 run`: the options of a job, and what they come to; p3/launch/run.py runs it."""

from __future__ import annotations

import argparse
import functools
import os
from typing import Callable, List

from p3.errors import ConfigError
from p3.launch.commands.arguments import count, timeout
from p3.launch.elastic import Bounds
from p3.launch.engines import Engine, Hosts
from p3.launch.placement import Host, read_hostfile
from p3.launch.run import run as run_job
from p3.plan import strategy
from p3.settings import Settings

_OF_RAY = ("cpus", "gpus", "timeout_s")  # options, by the fields of Wants


def add_parser(commands) -> None:
    """Adds `run` to the subparsers of `p3`."""
    run = commands.add_parser(
        "run",
        help="start a job on this machine, on several over ssh (--hostfile), or on a Ray cluster",
        description="Starts WORKERS copies of COMMAND, the servers and the scheduler; stops them all if one fails.",
    )
    run.add_argument("-n", "--workers", type=count, required=True, help="number of workers")
    run.add_argument("-s", "--servers", type=count, default=1, help="number of servers (default 1)")
    run.add_argument("--hostfile", metavar="FILE", help="where to run, round robin: lines of `host [slots=N]`")
    run.add_argument(
        "--on",
        choices=("hosts", "ray"),
        default="hosts",
        help="where to run: this machine or those of the hostfile (default), or a Ray cluster",
    )
    run.add_argument("--cpus-per-worker", dest="cpus", type=count, metavar="C", help="on Ray (default 1)")
    run.add_argument("--gpus-per-worker", dest="gpus", type=_gpus, metavar="G", help="on Ray (default 0)")
    run.add_argument(
        "--room-timeout",
        dest="timeout_s",
        type=timeout,
        metavar="S",
        help="on Ray: wait at most S seconds until it has room for the job (default 60)",
    )
    run.add_argument("--tls", action="store_true", help="encrypt what crosses the network, as P3_TLS=1 does")
    run.add_argument("--timeout", type=timeout, metavar="S", help="stop the job after S seconds, with exit code 124")
    run.add_argument(
        "--restarts", type=count, default=0, metavar="K", help="restart a job that failed, at most K times"
    )
    run.add_argument(
        "--min-workers", type=count, metavar="A", help="restart on the hosts that answer, with at least A workers"
    )
    run.add_argument(
        "--max-workers",
        type=count,
        metavar="B",
        help="and with at most B, if there are slots; with --on-worker-loss continue others may also join the running "
        "job until there are B (default P3_MAX_WORKERS or WORKERS)",
    )
    run.add_argument(
        "--snapshot-dir", type=os.path.abspath, metavar="DIR", help="shared directory for snapshots: P3_SNAPSHOT_DIR"
    )
    run.add_argument("--snapshot-every", metavar="N", help="steps between two snapshots: P3_SNAPSHOT_EVERY")
    run.add_argument(
        "--strategy", type=_strategy, metavar="FILE",
        help="which servers hold what, and how it travels, by `p3 plan` or yourself; or `auto`: planned while the job "
        "trains: P3_STRATEGY",
    )
    run.add_argument(
        "--grace",
        type=timeout,
        default=60.0,
        metavar="S",
        help="after SIGTERM, give the job S seconds to take a snapshot and end (default 60)",
    )
    run.add_argument(
        "--on-worker-loss",
        metavar="{fail,continue}",  # which P3_ON_WORKER_LOSS checks
        help="when a worker is lost: stop the job, or train on without it (default P3_ON_WORKER_LOSS)",
    )
    run.add_argument(
        "--on-server-loss",
        choices=("fail", "continue"),
        help="when a server is lost: stop the job, or have another server take over (default P3_ON_SERVER_LOSS)",
    )
    run.add_argument(
        "--worker-restarts",
        type=count,
        metavar="K",
        help="with --rejoin: restart each worker, or server, at most K times (default 3)",
    )
    run.add_argument(
        "--rejoin",
        action="store_true",
        help="with --on-worker-loss continue: start another process for a lost worker, which joins the running job; "
        "with --on-server-loss continue for a lost server",
    )
    run.add_argument(
        "--restart-pause",
        type=timeout,
        default=1.0,
        metavar="S",
        help="first pause between restarts, in seconds (default 1); each further one is twice as long",
    )
    run.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND ...", help="what every worker runs")
    run.set_defaults(handler=_run)


def _run(options, settings: Settings, command: List[str]) -> int:
    if not command:
        raise ConfigError("p3 run needs the command to run, for example: p3 run -n 2 -s 2 python train.py")
    chosen = {
        "P3_SNAPSHOT_DIR": options.snapshot_dir,
        "P3_SNAPSHOT_EVERY": options.snapshot_every,
        "P3_TLS": "1" if options.tls else None,
        "P3_ON_WORKER_LOSS": options.on_worker_loss,
        "P3_ON_SERVER_LOSS": options.on_server_loss,
        "P3_STRATEGY": options.strategy,
    }
    # All processes of the job get them.
    os.environ.update({variable: value for variable, value in chosen.items() if value is not None})
    settings = Settings.from_env(os.environ)
    bounds = _bounds(options, settings)
    if bounds is not None and settings.outlives_workers:
        os.environ["P3_MAX_WORKERS"] = str(bounds.most)
    else:
        os.environ.pop("P3_MAX_WORKERS", None)  # if anything, it is about restarts alone
    settings = Settings.from_env(os.environ)
    strategy.of_job(settings.strategy, options.servers)  # what is wrong with it is said before anything starts
    settings.require_heir(options.servers)
    if options.rejoin and not (settings.outlives_workers or settings.outlives_servers):
        raise ConfigError(
            "--rejoin is for jobs that go on without a lost worker or server: add --on-worker-loss continue or "
            "--on-server-loss continue"
        )
    if options.worker_restarts is not None and not options.rejoin:
        raise ConfigError("--worker-restarts is for lost workers and servers that start again: add --rejoin")
    return run_job(
        settings,
        _engine_of(options, settings),
        options.workers,
        options.servers,
        command,
        options.timeout,
        options.restarts,
        (3 if options.worker_restarts is None else options.worker_restarts) if options.rejoin else 0,
        bounds if options.restarts else None,
        lambda: _hosts_of(options),
        options.grace,
        options.restart_pause,
        options.rejoin,
    )


def _strategy(text: str) -> str:
    return text if text == strategy.AUTO else os.path.abspath(text)


def _bounds(options, settings: Settings):
    """Of the number of workers, if it is not always the same."""
    asked_most = options.max_workers or settings.max_workers
    least, most = options.min_workers or options.workers, asked_most or options.workers
    if options.min_workers is None and asked_most is None:
        return None
    if not least <= options.workers <= most:
        raise ConfigError(
            "--min-workers %d, -n %d, --max-workers %d: need --min-workers <= -n <= --max-workers"
            % (least, options.workers, most)
        )
    if options.restarts and options.on == "ray":
        raise ConfigError("--on ray: Ray knows its nodes itself; leave out --min-workers and --max-workers")
    if not options.restarts and options.min_workers is not None:
        raise ConfigError("--min-workers is for jobs that start again: add --restarts K")
    if not options.restarts and most > options.workers and not settings.outlives_workers:
        raise ConfigError(
            "--max-workers is for jobs that start again, or that others join while they run: add --restarts K, or "
            "--on-worker-loss continue"
        )
    return Bounds(least, options.workers, most)


def _engine_of(options, settings: Settings) -> Callable[[], Engine]:
    """What makes the engine of one start. ConfigError for options that another engine has."""
    on_ray = {name: value for name, value in vars(options).items() if name in _OF_RAY and value is not None}
    if options.on == "ray":
        if options.hostfile:
            raise ConfigError("--on ray: Ray knows its nodes itself; leave out --hostfile")
        from p3.launch.ray.engine import RayCluster, Wants

        return functools.partial(RayCluster, settings, Wants(**on_ray))
    if on_ray:
        raise ConfigError("p3 run: --cpus-per-worker, --gpus-per-worker and --room-timeout are for --on ray alone")
    return functools.partial(Hosts, settings, _hosts_of(options))


def _hosts_of(options):
    """As the hostfile has them now."""
    return read_hostfile(options.hostfile) if options.hostfile else [Host("localhost")]


def _gpus(text: str) -> float:
    """As Ray takes them: a whole number, or a part of one."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (0 <= value < 1 or value in range(1, 1001)):
        raise argparse.ArgumentTypeError("%r is not a whole number of GPUs, nor a part of one" % text)
    return value
