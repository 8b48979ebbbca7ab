"""What do a dense gradient and its factors take on the machines' network cards, and does the rule choose the better?

    sudo p3 bench cards                        # some placements, half a minute
    sudo p3 bench cards --jobs 8/2/2,4/4/4     # workers/servers/hosts
    sudo p3 bench cards --all                  # 2 to 8 workers, 1 to 8 servers, 1 to 4 workers on a host: long

Of each job one round of a weight of --outputs x --inputs as it is, and one of its factors, with the largest batch whose
factors the rule takes (so both cost about as much). Workers and servers are on the hosts in turn. The kernel counts
what each card sends and receives, headers of TCP and IP included; the formula is p3/placement.py's, of frames alone.

card MB         of the busiest card, one way: counted, and by formula
over            counted over formula
slower          by how much the card that is busiest with the rule's choice is busier than with the other choice; 0 if
                it is not. By what was counted.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Mapping, NamedTuple, Sequence, Tuple

import numpy as np

from p3.measure.arguments import number, parser
from p3.measure.jobs import machine, nic
from p3.measure.jobs.controlled import ControlledJob
from p3.measure.jobs.job import JobError
from p3.measure.jobs.stores import STORES
from p3.measure.lab.hosts import Host, lab
from p3.measure.workers.control import Control
from p3.placement import Placement
from p3.plan.key_plan import KeyPlan, SliceSize
from p3.frontend.factors import Rule
from p3.plan.factor_shape import FactorShape
from p3.worker.session import Session

WAYS = ("dense", "factors")
_TIMEOUT_S = 120.0
_SOME = "2/1/2,4/2/4,4/4/4,6/2/3,8/2/8,8/2/2,8/8/4,3/4/4"


class Counted(NamedTuple):
    """`cards`: of each way of WAYS, what each host's card has sent and received in the round."""

    placement: Placement
    cards: Dict[str, List[Tuple[int, int]]]
    plans: Dict[str, KeyPlan]  # in that round

    def busiest(self, way: str) -> int:
        return max(map(max, self.cards[way]))


def rule_of(workers: int, servers: int, hosts: int, aggregates: bool = True) -> Rule:
    """Of a job that count() makes, if every host has a worker or server."""
    places = (tuple(number % hosts for number in range(count)) for count in (workers, servers))
    return Rule(Placement(*places, aggregates), SliceSize("auto", servers))


def count(
    hosts: Sequence[Host], workers: int, servers: int, shape: FactorShape, port: int,
    environment: Mapping[str, str] = {},
) -> Counted:  # fmt: skip
    """One job. JobError if it fails, or takes too long."""
    command = [sys.executable, "-m", "p3.measure.micro.cards", *map(str, (shape.rows, shape.outputs, shape.inputs))]
    with tempfile.TemporaryDirectory(prefix="p3-cards-") as folder, ControlledJob(
        STORES["p3_sync"], hosts, command, root=hosts[0], port=port, folder=Path(folder), omp_threads=1,
        workers=workers, servers=servers, controlled=1, start_timeout_s=_TIMEOUT_S, timeout_s=_TIMEOUT_S,
        environment=environment,
    ) as job:  # fmt: skip
        job.start()
        told, totals = [], []
        for way in (*WAYS, "the end"):
            told += job.hear(way)
            totals.append([nic.totals(host) for host in hosts])
            job.tell({}, way)
        job.wait(_TIMEOUT_S)
    of_workers, of_servers, aggregates = told[0]["placement"]
    placement = Placement(tuple(of_workers), tuple(of_servers), aggregates)
    rule = Rule(placement, SliceSize(*told[0]["slice_size"]))
    dense, factors = (rule.plan(shape, as_factors) for as_factors in (False, True))
    plans = dict(zip(WAYS, (dense, factors._replace(first_slice=dense.slices))))
    rounds = [
        [(sent - sent_before, received - received_before) for (sent_before, received_before), (sent, received) in pairs]
        for pairs in (zip(before, after) for before, after in zip(totals, totals[1:]))
    ]
    return Counted(placement, dict(zip(WAYS, rounds)), plans)


def main(arguments: Sequence[str]) -> int:
    options = parse_options(arguments)
    print(f"commit {machine.commit()}; a weight of {options.outputs} x {options.inputs}")
    columns = "".join(f"{way + ' MB':>18}{'over':>7}" for way in WAYS)
    print(f"{'workers/servers/hosts':24}{'rows':>6}{columns}  slower")
    environment = {"P3_LOCAL_AGGREGATION": "0"} if options.apart else {}
    failed, worst = False, 0.0
    for workers, servers, count_of_hosts in options.jobs:
        rule = rule_of(workers, servers, count_of_hosts, not options.apart)
        rows = max(1, rule.most_rows(options.outputs, options.inputs))
        shape = FactorShape(rows, options.outputs, options.inputs)
        name = f"{workers}/{servers}/{count_of_hosts}"
        try:
            with lab(count_of_hosts) as hosts:
                found = count(hosts, workers, servers, shape, 9100, environment)
        except JobError as error:
            failed = True
            print(f"FAILED {name}: {error}", file=sys.stderr)
            continue
        text = f"{name:24}{rows:6}"
        for way in WAYS:
            counted, formula = found.busiest(way) / 1e6, found.placement.busiest(found.plans[way]) / 1e6
            text += f"{counted:9.3f}{formula:9.3f}{counted / formula:7.3f}"
        chosen, other = WAYS[rule.pays(shape)], WAYS[not rule.pays(shape)]
        slower = max(0.0, found.busiest(chosen) / found.busiest(other) - 1)
        worst = max(worst, slower)
        print(text + f"{slower:8.1%}", flush=True)
    print(f"the rule's choice was at most {worst:.1%} slower than the better of both")
    return 1 if failed else 0


def _jobs(text: str) -> List[Tuple[int, int, int]]:
    made = []
    for one in text.split(","):
        numbers = one.split("/")
        if len(numbers) != 3 or not all(number.isdigit() and int(number) > 0 for number in numbers):
            raise argparse.ArgumentTypeError(f"{one!r} is not WORKERS/SERVERS/HOSTS, as 8/2/4 is")
        workers, servers, hosts = map(int, numbers)
        if not 2 <= hosts <= max(workers, servers) or workers < 2:
            raise argparse.ArgumentTypeError(f"{one!r}: at least 2 workers, and hosts that have a worker or a server")
        made.append((workers, servers, hosts))
    return made


def _all() -> Iterator[Tuple[int, int, int]]:
    for workers, servers, each in itertools.product(range(2, 9), range(1, 9), range(1, 5)):
        if workers > each:
            yield workers, servers, -(-workers // each)


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    add = (options := parser("cards", __doc__)).add_argument
    add("--jobs", type=_jobs, default=_SOME, metavar="W/S/H,...", help="(default %(default)s)")
    add("--all", action="store_const", dest="jobs", const=list(_all()), help="of what is named above")
    add("--outputs", type=number(1, 1 << 20, int), default=1024, help="of the weight (%(default)s)")
    add("--inputs", type=number(1, 1 << 20, int), default=1024, help="of the weight (%(default)s)")
    add("--apart", action="store_true", help="with P3_LOCAL_AGGREGATION=0")
    return options.parse_args(arguments)


# The worker: rounds of a dense key, and of its factors, each when the benchmark has read the cards.


def work(rows: int, outputs: int, inputs: int) -> None:
    shape = FactorShape(rows, outputs, inputs)
    with Session.open() as session:
        weight = np.zeros((shape.outputs, shape.inputs), "float32")
        dense = session.declare("w", weight.shape, "float32")
        session.init(dense, weight if session.rank == 0 else None, weight).wait(_TIMEOUT_S)
        factored = session.declare_factors("w (factors)", shape)
        session.init(factored, None, weight).wait(_TIMEOUT_S)
        pushed = {"dense": np.ones_like(weight), "factors": np.ones((shape.rows, shape.width), "float32")}
        let_them_read = _reader(session)
        for way, key in zip(WAYS, (dense, factored)):
            let_them_read(placement=session.placement, slice_size=session.slice_size)
            session.barrier()  # for rank 0, which may go on
            session.pushpull(key, pushed[way], weight).wait(_TIMEOUT_S)
        let_them_read()


def _reader(session: Session) -> Callable[..., None]:
    """A function that on rank 0 tells the benchmark that all have come so far, and waits until the cards are read."""
    control = Control() if session.rank == 0 else None

    def let_them_read(**message) -> None:
        session.barrier()
        if control is not None:
            control.say(**message)
            control.hear()

    return let_them_read


if __name__ == "__main__":
    work(*map(int, sys.argv[1:]))
