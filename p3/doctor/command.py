"""`p3 doctor`: this machine; or, before a job starts, several hosts and what a model would make of them.

Several are those of a hostfile, nodes of a Ray cluster, or all on which another launcher has started it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from typing import List, Optional, Tuple

from p3.doctor import here, judgement
from p3.doctor.rows import healthy, lines
from p3.errors import ConfigError
from p3.launch.engines import Engine, Hosts
from p3.launch.launchers.adapters import ADAPTERS
from p3.launch.launchers.options import add_options
from p3.launch.launchers.place import find
from p3.launch.placement import read_hostfile
from p3.measure.arguments import number
from p3.measure.replay import models
from p3.settings import Settings


def add_parser(commands) -> None:
    """Adds `doctor` to the subparsers of `p3`."""
    doctor = commands.add_parser(
        "doctor",
        help="check this machine, or all hosts of a job: what is missing, and how to fix it",
        description="Checks this machine. To check several, give it a hostfile, and it starts itself on every host "
        "over ssh; or --on ray, for nodes of a Ray cluster; or start it with srun, mpirun, torchrun or an indexed "
        "Kubernetes Job. It then checks versions, ports, clocks, packet sizes and rates. The exit code is 1 if "
        "something is wrong.",
    )
    where = doctor.add_mutually_exclusive_group()
    where.add_argument("--hostfile", metavar="FILE", help="the hosts to check, as for p3 run")
    where.add_argument("--on", choices=("ray",), help="check nodes of a Ray cluster, chosen as by p3 run --on ray")
    where.add_argument("--here", action="store_true", help="check this machine alone, even under another launcher")
    doctor.add_argument("-n", dest="nodes", type=number(2, 10000, int), metavar="N", help="number of Ray's nodes")
    add_options(doctor)
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.add_argument("--timeout", type=number(1, 3600), default=30.0, metavar="S",
                        help="wait at most S seconds for a host to answer (default %(default)g)")  # fmt: skip
    doctor.add_argument("--seconds", type=number(0.1, 60), default=1.0, metavar="S",
                        help="measure each rate for S seconds (default %(default)g)")  # fmt: skip
    what = doctor.add_mutually_exclusive_group()
    what.add_argument("--model", choices=models.NAMES, help="predict how this model would train on the network")
    what.add_argument("--parameters", type=number(1, 1e13, int), metavar="N", help="or one of N parameters")
    what.add_argument("--trace", metavar="DIR", help="or a run that P3_TRACE=DIR recorded")
    doctor.add_argument("--compute", type=number(1e-6, 1e6), metavar="S",
                        help="computation of an iteration, both passes; with --trace, in place of its own")  # fmt: skip
    doctor.add_argument("--plan-out", metavar="FILE",
                        help="write the strategy, if links differ so much that it pays (p3 plan)")
    doctor.set_defaults(handler=_doctor)


def _doctor(options: argparse.Namespace, settings: Settings, _command: List[str]) -> int:
    if (options.on is None) != (options.nodes is None):
        raise ConfigError("p3 doctor: --on ray and -n N, the number of nodes, belong together")
    named = options.hostfile is not None or options.on is not None
    adapter = None if named or options.here else find(ADAPTERS, os.environ, options.launcher)
    place = adapter.place(os.environ) if adapter is not None else None
    chosen = options.model or options.parameters or options.trace
    if options.plan_out and not chosen:
        raise ConfigError("p3 doctor --plan-out is for a model: --model, --parameters or --trace")
    if not named and (place is None or place.machines == 1):
        if chosen or options.compute:
            raise ConfigError("p3 doctor: --model, --parameters, --trace and --compute are for several hosts: "
                              "--hostfile, --on ray, or another launcher")  # fmt: skip
        return _here(options, settings) if place is None or place.rank == 0 else 0
    if (options.model or options.parameters) and options.compute is None:
        raise ConfigError("p3 doctor: --model and --parameters need --compute SECONDS, what an iteration computes")
    if options.compute is not None and not chosen:
        raise ConfigError("p3 doctor: --compute needs --model, --parameters or --trace")
    tells = place is None or place.rank == 0
    model = _model(options) if chosen and tells else None
    if place is None:
        return _tell(options, _start(options, settings), model)
    from p3.doctor import launched

    found = launched.examine(settings, adapter, place, options.meeting_dir, options.timeout, options.seconds)
    return 0 if found is None else _tell(options, found, model)


def _start(options: argparse.Namespace, settings: Settings) -> dict:
    from p3.doctor import hosts

    if options.on == "ray":
        from p3.launch.ray.engine import RayCluster, Wants

        engine: Engine = RayCluster(settings, Wants(timeout_s=options.timeout, timeout_option="--timeout"))
        count, remedy = options.nodes, "ray status; and P3 must be at the same path on %s"
    else:
        of_file = read_hostfile(options.hostfile)
        engine = Hosts(settings, of_file)
        count, remedy = len(of_file), "ssh %s true; and P3 must be at the same path there"
    return asyncio.run(hosts.examine(settings, engine, count, options.timeout, options.seconds, remedy))


def _here(options: argparse.Namespace, settings: Settings) -> int:
    rows = here.examine(settings)
    if options.json:
        print(json.dumps({"rows": [row._asdict() for row in rows]}))
    else:
        for line in lines(rows):
            print(line)
        print()
        print("Everything that P3 needs is here." if healthy(rows) else "Something needed is missing.")
    return 0 if healthy(rows) else 1


def _tell(options: argparse.Namespace, found: dict, wanted: Optional[Tuple[models.Model, float]]) -> int:
    from p3.doctor import report

    rows = judgement.judge(found)
    told = _forecast(found, *wanted) if wanted is not None else None
    if options.plan_out:
        _write_plan(options.plan_out, told.plan if told is not None else "")
    if options.json:
        more = {} if told is None else {"forecast": told._asdict()}
        print(json.dumps({**found, "rows": [row._asdict() for row in rows], **more}))
    else:
        for line in report.lines(found, rows, told):
            print(line)
    return 0 if healthy(rows) else 1


def _write_plan(path: str, plan: str) -> None:
    """`plan`: "" where there is none."""
    if not plan:
        print("p3 doctor --plan-out: %s is not written, as no other shares of the servers would win 2%%" % path,
              file=sys.stderr)  # fmt: skip
        return
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(plan)
    except OSError as error:
        raise ConfigError("p3 doctor --plan-out %s: %s" % (path, error.strerror)) from None


def _model(options: argparse.Namespace) -> Tuple[models.Model, float]:
    from p3.measure.replay import recorded

    if options.model:
        return models.load(options.model, 1.0), options.compute
    if options.parameters:
        return recorded.even_model(options.parameters), options.compute
    from p3.trace.lives import load

    return recorded.recorded_model(load(options.trace), options.compute)


def _forecast(found: dict, model: models.Model, compute_s: float):
    """None where the rates of fewer than two hosts are known."""
    from p3.doctor.forecast import delay_ms, forecast

    up, down = judgement.rates(found)
    known = sorted(up.keys() & down.keys())
    if len(known) < 2:
        return None
    trips = [path["round_trip_s"] for path in found["paths"] if "round_trip_s" in path]
    return forecast(model, compute_s, [up[host] for host in known], [down[host] for host in known], delay_ms(trips))
