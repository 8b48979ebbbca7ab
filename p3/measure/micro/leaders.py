"""Does a machine with several workers need more processor time per byte for a large model than for a small one?

    sudo p3 bench leaders                      # four workers, VGG-19 beside a tenth of it; 10 GB of memory, a minute
    sudo p3 bench leaders --model bert --size 0.2

All workers are on one host and the servers on another, behind a link of --rate: it is slower than the machine's leader,
with which most of a large model's slices therefore wait at the same time. Both sizes are keys of one job, whose rounds
take turns: a round of the whole, and as many of the tenth as have the same bytes.

CPU s/GB        processor time, user and system, per 10^9 bytes that the workers push and get: of all processes of the
                job, and of its busiest worker, who is the leader. Median of --repeats (min..max)
whole / tenth   by how much it grows with the model; the ratio of each repeat's two turns: median (min..max)
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Dict, List, NamedTuple, Sequence

from p3.measure.arguments import number
from p3.measure.bench import jobs, machine
from p3.measure.lab.hosts import lab
from p3.measure.micro import usage
from p3.measure.micro.cards import hear, wait_readable
from p3.measure.micro.cards_worker import CONTROL_VARIABLE
from p3.measure.replay import models

SMALLER = 10
NAMES = ("tenth", "whole")
_TIMEOUT_S = 300.0  # for the rounds of one turn


class Cost(NamedTuple):
    """CPU seconds per GB."""

    job: float
    leader: float


def main(arguments: Sequence[str]) -> int:
    options = parse_options(arguments)
    print(f"commit {machine.commit()}; {options.model}, {options.size:g} of its parameters, beside a tenth of that")
    print(f"{options.workers} workers on one host, {options.servers} servers on another, {options.rate:g} Mbit/s")
    try:
        found = measure(options)
    except jobs.JobError as error:
        print(f"FAILED {error}", file=sys.stderr)
        return 1
    print(f"\n{'CPU s/GB':16}{'job':24}leader")
    for name, costs in found.items():
        print(f"{name:16}{_spread([cost.job for cost in costs]):24}{_spread([cost.leader for cost in costs])}")
    ratios = [
        _spread([getattr(whole, of) / getattr(tenth, of) for tenth, whole in zip(*found.values())])
        for of in Cost._fields
    ]
    print(f"{'whole / tenth':16}{ratios[0]:24}{ratios[1]}")
    return 0


def measure(options: argparse.Namespace) -> Dict[str, List[Cost]]:
    """One job; of each name of NAMES, what its turns cost. JobError if it fails, or takes too long."""
    sizes = [options.size / SMALLER, options.size]
    command = [sys.executable, "-m", "p3.measure.micro.leaders_worker", "--model", options.model]
    command += ["--sizes", ",".join(map(str, sizes)), "--rounds", f"{SMALLER},1", "--repeats", str(options.repeats)]
    found: Dict[str, List[Cost]] = {name: [] for name in NAMES}
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(lab(2, options.rate))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="p3-leaders-")))
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        listener.bind(str(folder / "control"))
        listener.listen()
        job = stack.enter_context(jobs.Job(
            jobs.STORES["p3_sync"], hosts[:1], command, root=hosts[0], port=9100, folder=folder, omp_threads=1,
            workers=options.workers, servers=options.servers, server_hosts=hosts[1:],
            environment={CONTROL_VARIABLE: str(folder / "control")},
        ))  # fmt: skip
        job.start()
        wait_readable(job, listener, time.monotonic() + _TIMEOUT_S)
        control = stack.enter_context(listener.accept()[0])

        def wait() -> dict:
            return hear(job, control, time.monotonic() + _TIMEOUT_S)

        def used() -> List[float]:
            workers = [usage.session_cpu_s([job.session(f"worker {i}")]) for i in range(options.workers)]
            return [usage.session_cpu_s(job.sessions()), *workers]

        for _ in range(options.repeats):
            for name, rounds in zip(NAMES, (SMALLER, 1)):
                gigabytes = 2 * options.workers * rounds * wait()["bytes"] / 1e9
                before = used()
                control.sendall(b".")
                wait()
                whole_job, *workers = [after - then for after, then in zip(used(), before)]
                control.sendall(b".")
                found[name].append(Cost(whole_job / gigabytes, max(workers) / gigabytes))
        job.wait(_TIMEOUT_S)
    return found


def _spread(values: List[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}..{max(values):.2f})"


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="p3 bench leaders", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=models.NAMES, default="vgg19", help="(default %(default)s)")
    parser.add_argument("--size", type=number(0.001, 10), default=1.0, help="fraction of its parameters (%(default)s)")
    parser.add_argument("--workers", type=number(2, 64, int), default=4, help="(%(default)s)")
    parser.add_argument("--servers", type=number(1, 64, int), default=4, help="(%(default)s)")
    parser.add_argument("--rate", type=number(1, 1e6), default=1000.0, metavar="MBIT", help="(%(default)s)")
    parser.add_argument("--repeats", type=number(1, 1000, int), default=3, help="(%(default)s)")
    return parser.parse_args(arguments)
