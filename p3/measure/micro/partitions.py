"""Does the search for the number of partitions end near the best? All numbers are tried in one job, after the search.

    sudo p3 bench partitions                            # 2 hosts at 100 Mbit/s

Each host runs one worker and one server. A step is one round of a key whose rows are touched as often as words are
(Zipf's law), with Adam on the servers. After the search ended, the key is cut anew to each number in turn, several
times; median step times, and the number that was found beside the best of all.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Dict, List, Sequence

import numpy as np

from p3.measure import arguments as given
from p3.measure.jobs import machine
from p3.measure.jobs.job import Job, JobError
from p3.measure.jobs.stores import STORES
from p3.measure.lab.hosts import lab
from p3.frontend.partitions import Partitions
from p3.worker.session import Session

TIMEOUT_S = 120
MOVING_STEPS = 6  # until another number of partitions counts; rows have moved by then, or the run is no result
ADAM = {"name": "adam", "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "clip_gradient": -1.0, "multi_precision": False}


def main(arguments: Sequence[str]) -> int:
    parser = given.parser("partitions", __doc__)
    parser.add_argument("--hosts", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--rate", type=float, default=100.0, metavar="MBIT", help="of each link (%(default)s)")
    parser.add_argument("--rows", type=int, default=10000, help="default: %(default)s")
    parser.add_argument("--length", type=int, default=128, help="of a row, in elements (%(default)s)")
    parser.add_argument("--touched", type=int, default=3000, help="words drawn by a worker in a step (%(default)s)")
    parser.add_argument("--steps", type=int, default=250, help="that the search may take (%(default)s)")
    parser.add_argument("--sweeps", type=int, default=5, help="turns of each number (%(default)s)")
    parser.add_argument("--partitions", default="1,2,4,8,16,32,64,128,256", help="to try (%(default)s)")
    parser.add_argument("--repeats", type=int, default=1, help="jobs (%(default)s)")
    options = parser.parse_args(arguments)
    print(f"commit {machine.commit()}; {options.hosts} hosts, {options.rate:g} Mbit/s")
    with lab(options.hosts, options.rate) as hosts:
        for repeat in range(options.repeats):
            try:
                report(run(hosts, 9100 + repeat, options))
            except JobError as error:
                sys.exit(f"partitions: {error}")
    return 0


def run(hosts, port: int, options) -> List[dict]:
    sizes = (options.rows, options.length, options.touched, options.steps, options.sweeps)
    command = [sys.executable, "-m", "p3.measure.micro.partitions", *map(str, sizes), options.partitions]
    with tempfile.TemporaryDirectory(prefix="p3-partitions-") as folder, Job(
        STORES["p3_sync"], hosts, command, root=hosts[0], port=port, folder=Path(folder), omp_threads=1
    ) as job:
        job.start()
        job.wait(600)
        return [line for number in range(job.num_workers) for line in job.lines(f"worker {number}")]


def report(lines: List[dict]) -> None:
    found = lines[0]["found"]
    times: Dict[int, List[float]] = {}
    for line in lines[1:]:
        assert line["partitions"] == line["wanted"], "rows were still on their way"
        times.setdefault(line["partitions"], []).append(statistics.median(line["times"]))
    medians = {number: statistics.median(turns) for number, turns in times.items()}
    print("| partitions | step, ms (min..max) |\n| --- | --- |")
    for number, turns in sorted(times.items()):
        mark = " (found)" if number == found else ""
        print(f"| {number}{mark} | {1e3 * medians[number]:.1f} ({1e3 * min(turns):.1f}..{1e3 * max(turns):.1f}) |")
    best = min(medians, key=lambda number: medians[number])
    print(f"found {found} in {lines[0]['steps']} steps; best {best}", end="")
    print(f"; {100 * (medians[found] / medians[best] - 1):+.1f}%" if found in medians else "; not among those tried")


def work(rows: int, length: int, touched: int, steps: int, sweeps: int, numbers) -> None:
    """One worker: rounds of one key of rows, while partitions are searched, then with each number. Words of a text are
    drawn by Zipf's law, the most frequent first, so a few contiguous rows are most of the load. Rank 0 prints JSON
    lines: what the search has found, and the time of each step of each number."""
    with Session.open() as session:
        random = np.random.RandomState(1 + session.rank)
        key = session.declare("words", (rows, length), "float32", sparse=True)
        landing = np.zeros((rows, length), "float32")
        session.init(key, landing if session.rank == 0 else None, landing).wait(TIMEOUT_S)
        session.set_optimizer(0, ADAM)
        chance = 1 / np.arange(1, rows + 1)
        edges = np.cumsum(chance / chance.sum())
        session.barrier()

        def step() -> float:
            ids = np.unique(np.searchsorted(edges, random.uniform(size=touched))).clip(0, rows - 1)
            values = np.ones((len(ids), length), "float32")
            start = time.monotonic()
            session.pushpull(key, (ids, values), landing, lr=0.001).wait(TIMEOUT_S)
            return time.monotonic() - start

        def say(**fields) -> None:
            if session.rank == 0:
                print(json.dumps(fields), flush=True)

        search = Partitions(session)
        searched = 0
        for _ in range(steps):
            if session.rank == 0 and not search.finished(key):
                search.pushed(key)
                searched += 1
            step()
        if session.rank == 0:
            assert search.finished(key), "more steps are needed"
        say(found=session.partitions(key), steps=searched)
        for sweep in range(sweeps):
            for number in numbers[sweep % len(numbers) :] + numbers[: sweep % len(numbers)]:
                if session.rank == 0 and session.partitions(key) != number:
                    session.repartition(key, number)
                for _ in range(MOVING_STEPS):
                    step()
                    time.sleep(0.02)  # the agreement, which does not wait for steps
                times = [step() for _ in range(12)]
                say(partitions=session.partitions(key), wanted=number, times=times)


if __name__ == "__main__":
    work(*map(int, sys.argv[1:6]), [int(number) for number in sys.argv[6].split(",")])
