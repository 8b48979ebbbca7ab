"""How fast does a store move gradients, and at what cost? P3 against MXNet's own stores, on hosts made of namespaces.

    sudo p3 bench pushpull                                        # everything, unthrottled
    sudo p3 bench pushpull --stores dist_sync,p3_sync --rate 800 --json result.json
    sudo p3 bench pushpull --stores p3_apart,p3_sync --workers 8 --hosts 2 --rate 800
    sudo p3 bench pushpull --checksum                             # p3_sync against p3_checksum
    sudo p3 bench pushpull --stores p3_sync,p3_tls                # what encryption costs

Every host runs one worker and one server, unless there are fewer --hosts than workers; each round all keys are pushed
and the sums of all workers pulled, on
    dist_sync   MXNet's default store
    mxnet_p3    MXNet's own P3 (DMLC_PS_VAN_TYPE=p3, DMLC_PS_WATER_MARK=10)
    p3_sync     this project
    p3_apart    the same without local aggregation; it differs where a host has several workers (--hosts)
    p3_checksum the same with P3_CHECKSUM=1
    p3_tls      p3_sync with P3_TLS=1
    raw_tcp     no store: the same bytes over bare TCP, the ceiling (processes/raw_tcp.py)

All jobs are started once and stay alive; then they take turns, a warm-up round and some timed ones each, in an order
that rotates. So whatever else slows the machine for a while hits all alike, which separate runs do not give, and no
start of a process is ever timed. A waiting job sleeps in its sockets; that it costs nothing is measured and printed.

goodput         of one worker, each way: bytes of all keys / time from the first call of a round until all outputs can
                be read. Median over all workers and timed rounds.
CPU s/GB        CPU seconds over the timed rounds per 10^9 bytes moved, which are those pushed and those received by
                all workers: of the job's processes (user + system), and of the whole machine (interrupts included,
                and whatever else runs, so leave it alone). Median over turns.
round, network  median time of a round of the slowest worker; and what a round brings in and out of a host's card.
per MB          how often, for 10^6 bytes moved, a thread of the job has slept, and so was woken, and how often one had
                to make room for another; and the system calls of P3's core, in workers and servers, to move bytes, to
                sleep and to wake. Medians over turns.
memory          peak resident size of the largest server; and by how much the largest worker, in the timed rounds,
                exceeded what it held before it opened the store (MXNet, gradients, outputs). Both in sizes of the
                model, of which each server keeps a part.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Callable, Dict, List, Optional, Sequence

from p3.measure import arguments as given
from p3.measure.jobs import machine
from p3.measure.jobs.job import JobError
from p3.measure.jobs.usage import session_cpu_s
from p3.measure.lab.hosts import lab
from p3.measure.micro.processes.pushpull_job import PushPullJob, Setup, Turn
from p3.measure.micro.processes.pushpull_worker import parse_sizes

STORES = ("dist_sync", "mxnet_p3", "p3_sync", "p3_apart", "p3_checksum", "p3_tls", "raw_tcp")
FIRST_PORT = 9100  # in namespaces of our own, where nothing else listens
PORTS_PER_JOB = 100
WARM_UP_ROUNDS = 1


def main(arguments: Sequence[str]) -> int:
    options = parse_options(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("pushpull: ended by SIGTERM"))
    sizes = parse_sizes(options.keys)
    setup = Setup(
        workers=options.workers, servers=options.servers, keys=options.keys, elements=sum(sizes),
        omp_threads=machine.omp_threads(options.workers), timeout_s=options.timeout,
    )
    environment = describe_machine(setup)
    print("\n".join(f"{name:14}{value}" for name, value in environment.items()))

    turns: Dict[str, List[Turn]] = {store: [] for store in options.stores}
    server_peak: Dict[str, int] = {}
    failures: Dict[str, str] = {}
    waiting_cpu: Dict[str, float] = dict.fromkeys(options.stores, 0.0)
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(
            lab(options.hosts or max(setup.workers, setup.servers), options.rate, options.delay)
        )
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pushpull-")))
        jobs = {}
        for number, store in enumerate(options.stores):
            port = FIRST_PORT + number * PORTS_PER_JOB
            jobs[store] = stack.enter_context(PushPullJob(store, hosts, setup, port, folder))
        alive = list(options.stores)

        def attempt(store: str, step) -> None:
            """One store's failure must not cost the others their result."""
            try:
                step(jobs[store])
            except JobError as error:
                failures[store] = str(error)
                alive.remove(store)
                jobs[store].kill()
                print(f"FAILED {error}", file=sys.stderr)

        def take_turn(job: PushPullJob) -> None:
            job.turn(WARM_UP_ROUNDS)
            others = {
                store: session_cpu_s(jobs[store].sessions()) for store in alive if store != job.store.name
            }
            turn = job.turn(options.rounds)
            for store, before_s in others.items():
                waiting_cpu[store] += session_cpu_s(jobs[store].sessions()) - before_s
            job.check_sums()
            turns[job.store.name].append(turn)

        for store in options.stores:
            print(f"starting {store}", file=sys.stderr)
            attempt(store, PushPullJob.start)
        for repeat in range(options.repeats):
            shift = repeat % max(1, len(alive))
            for store in alive[shift:] + alive[:shift]:
                print(f"repeat {repeat + 1} of {options.repeats}: {store}", file=sys.stderr)
                attempt(store, take_turn)
        for store in list(alive):
            server_peak[store] = jobs[store].server_peak_bytes()
            attempt(store, PushPullJob.leave)

    results = {
        store: summary(turns[store], setup, peak, waiting_cpu[store]) for store, peak in server_peak.items()
    }
    print_table(results)
    if options.json:
        document = {
            "environment": environment, "options": vars(options), "results": results, "failures": failures,
        }
        Path(options.json).write_text(json.dumps(document, indent=1) + "\n")
    return 1 if failures else 0


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = given.parser("pushpull", __doc__)
    parser.add_argument("--stores", type=given.names_among(STORES), default="dist_sync,mxnet_p3,p3_sync,raw_tcp",
                        help="comma-separated (%(default)s)")  # fmt: skip
    parser.add_argument(
        "--checksum", action="store_const", dest="stores", const=["p3_sync", "p3_checksum"],
        help="--stores p3_sync,p3_checksum",
    )
    parser.add_argument("--keys", default="20x1000000,400x50000", help="COUNTxELEMENTS,... of float32 (%(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--servers", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--hosts", type=int, help="that they share in turn (default: one for each)")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds in a turn (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each store (%(default)s)")
    parser.add_argument("--rate", type=float, metavar="MBIT", help="rate of every host's link, each way (no limit)")
    parser.add_argument("--delay", type=float, default=0.0, metavar="MS", help="one-way delay between hosts (none)")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="for one turn (%(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write environment and results there as well")
    options = parser.parse_args(arguments)

    try:
        parse_sizes(options.keys)
    except ValueError as error:
        parser.error(str(error))
    if min(options.workers, options.servers, options.rounds, options.repeats) < 1:
        parser.error("--workers, --servers, --rounds and --repeats must be at least 1")
    return options


def summary(turns: List[Turn], setup: Setup, server_peak: int, waiting_cpu_s: float) -> Dict[str, float]:
    goodput = [setup.model_bytes * 8 / 1e9 / s for turn in turns for worker in turn.round_s for s in worker]
    return {
        "goodput_gbit_s": statistics.median(goodput),
        "goodput_min": min(goodput),
        "goodput_max": max(goodput),
        "job_cpu_s_per_gb": statistics.median(turn.job_cpu_s / (turn.moved_bytes / 1e9) for turn in turns),
        "machine_cpu_s_per_gb": statistics.median(turn.machine_cpu_s / (turn.moved_bytes / 1e9) for turn in turns),
        **{f"{name}_per_mb": per_mb(turns, of) for name, of in PER_MB.items()},
        "round_s": statistics.median(max(same) for turn in turns for same in zip(*turn.round_s)),
        "network_models": statistics.median(turn.network_bytes / len(turn.round_s[0]) for turn in turns)
        / setup.model_bytes,
        "server_peak_models": server_peak / setup.model_bytes,
        "worker_added_models": max(turn.worker_added_bytes for turn in turns) / setup.model_bytes,
        "waiting_cpu_s": waiting_cpu_s,
        "timed_rounds": sum(len(turn.round_s[0]) for turn in turns),
    }


PER_MB: Dict[str, Callable[[Turn], Optional[int]]] = {
    "slept": lambda turn: turn.switches.slept,
    "preempted": lambda turn: turn.switches.preempted,
    "system_calls": lambda turn: turn.system_calls,
}


def per_mb(turns: List[Turn], of: Callable[[Turn], Optional[int]]) -> Optional[float]:
    counts = [(of(turn), turn.moved_bytes / 1e6) for turn in turns]
    return None if any(count is None for count, _ in counts) else statistics.median(n / mb for n, mb in counts)


def print_table(results: Dict[str, Dict[str, float]]) -> None:
    print(f"\n{'':12}{'goodput, Gbit/s each way':26}{'CPU s/GB':18}{'memory, models':18}{'CPU s while'}")
    print(f"{'':12}{'median':9}{'min..max':17}{'job':9}{'machine':9}{'server':9}{'worker +':9}{'waiting'}")
    for store, r in results.items():
        spread = f"{r['goodput_min']:.2f}..{r['goodput_max']:.2f}"
        print(
            f"{store:12}{r['goodput_gbit_s']:<9.2f}{spread:17}{r['job_cpu_s_per_gb']:<9.2f}"
            f"{r['machine_cpu_s_per_gb']:<9.2f}{r['server_peak_models']:<9.2f}{r['worker_added_models']:<9.2f}"
            f"{r['waiting_cpu_s']:.2f}"
        )
    print(f"\n{'':12}{'round, s':10}{'network, models':17}per MB:")
    print(f"{'':12}{'':10}{'a round and host':17}{'slept':9}{'preempted':11}system calls")
    for store, r in results.items():
        counts = ["-" if r[f"{name}_per_mb"] is None else f"{r[f'{name}_per_mb']:.1f}" for name in PER_MB]
        print(f"{store:12}{r['round_s']:<10.3f}{r['network_models']:<17.2f}{counts[0]:9}{counts[1]:11}{counts[2]}")
    for base in ("dist_sync", "mxnet_p3", "p3_apart", "p3_sync"):
        if base not in results or (base == "p3_sync" and not {"p3_checksum", "p3_tls"} & set(results)):
            continue
        print(f"\nagainst {base}: goodput, job CPU, machine CPU")
        for store, r in results.items():
            ratios = [
                r[field] / results[base][field] if results[base][field] else float("nan")
                for field in ("goodput_gbit_s", "job_cpu_s_per_gb", "machine_cpu_s_per_gb")
            ]
            print(f"{store:12}" + "".join(f"{ratio:.2f}x".ljust(9) for ratio in ratios))


def describe_machine(setup: Setup) -> Dict[str, str]:
    here = machine.machine()
    return {
        "command": " ".join(["p3", *sys.argv[1:]]),
        "commit": machine.commit(),
        "machine": f"{here['cores']} x {here['cpu']}",
        "kernel": f"{here['kernel']}, TCP {here['tcp']}",
        "versions": ", ".join(f"{name} {version}" for name, version in machine.versions().items()),
        "load before": f"{here['load_before']:.2f}",
        "model": f"{setup.keys} float32, {setup.model_bytes / 1e6:.0f} MB",
        "job": f"{setup.workers} workers, {setup.servers} servers, OMP_NUM_THREADS={setup.omp_threads}",
    }
