"""Does the search for the number of partitions end near the best? All numbers are tried in one job, after the search.

    sudo p3 bench partitions                            # 2 hosts at 100 Mbit/s

Each host runs one worker and one server. A step is one round of a key whose rows are touched as often as words are
(Zipf's law), with Adam on the servers. After the search ended, the key is cut anew to each number in turn, several
times; median step times, and the number that was found beside the best of all.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Dict, List, Sequence

from p3.measure.bench import jobs, machine
from p3.measure.lab.hosts import lab


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="p3 bench partitions", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
            except jobs.JobError as error:
                sys.exit(f"partitions: {error}")
    return 0


def run(hosts, port: int, options) -> List[dict]:
    sizes = (options.rows, options.length, options.touched, options.steps, options.sweeps)
    command = [sys.executable, "-m", "p3.measure.micro.partitions_worker", *map(str, sizes), options.partitions]
    with tempfile.TemporaryDirectory(prefix="p3-partitions-") as folder, jobs.Job(
        jobs.STORES["p3_sync"], hosts, command, root=hosts[0], port=port, folder=Path(folder), omp_threads=1
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
