"""How the scheduler stands many nodes: rendezvous, agreement on a model's keys, memory, and the loss of a node.

    p3 bench control [--nodes 64,256,1024] [--model resnet50] [--processes 4]

A real scheduler, and as many workers and as many servers as --nodes says, each with its real connections, handshakes,
heartbeats and messages, but without a core: many share a process (processes/control_nodes.py). All are on this machine,
and share its cores as the nodes of a cluster do not. Given are the seconds from the first process's start until all
nodes have started; from then until all know all keys; the scheduler's processor time and its greatest memory; and,
after one process of nodes is killed, until the last one of the others has heard of it.
Close other programs first. It needs some 6 open files for each node.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from typing import IO, Dict, List, NamedTuple, Sequence

from p3.cluster.node import loopback
from p3.measure import arguments as given
from p3.measure.jobs import usage
from p3.measure.replay import models

_WAIT_S = 600.0  # for all nodes to meet, and again for each of what follows
_REST_S = 10.0  # in which nodes hear that the scheduler has gone


class Job(NamedTuple):
    scheduler: subprocess.Popen
    said: IO[str]  # what the scheduler has written to standard error
    workers: List[subprocess.Popen]
    servers: List[subprocess.Popen]


class Measured(NamedTuple):
    nodes: int
    rendezvous_s: float
    agreement_s: float
    cpu_s: float  # of the scheduler, for both
    memory_bytes: int
    loss_s: float


def main(arguments: Sequence[str]) -> int:
    parser = given.parser("control", __doc__)
    parser.add_argument("--nodes", type=given.list_of(given.number(1, 100_000, int)), default="64,256,1024",
                        metavar="N[,N]", help="workers, and as many servers (default %(default)s)")
    parser.add_argument("--model", choices=models.NAMES, default="resnet50", help="whose keys (default %(default)s)")
    parser.add_argument("--processes", type=given.number(2, 64, int), default=4, metavar="P",
                        help="that the nodes share (default %(default)s)")
    options = parser.parse_args(arguments)
    keys = len(list(models.load(options.model, 1.0).tensors))
    print(f"{options.model}: {keys} keys")
    print("workers + servers  rendezvous s  agreement s  scheduler CPU s  scheduler MB  a loss is known after s")
    for count in options.nodes:
        one = measure(count, options.model, options.processes)
        print("%8d + %-6d %13.1f %12.1f %16.1f %13.0f %24.2f" % (
            count, count, one.rendezvous_s, one.agreement_s, one.cpu_s, one.memory_bytes / 1e6, one.loss_s,
        ), flush=True)  # fmt: skip
    return 0


def measure(nodes: int, model: str, processes: int) -> Measured:
    began = time.monotonic()
    job = _start(nodes, model, processes)
    everybody = [*job.workers, *job.servers]
    try:
        started = _last(job, everybody, "started")
        agreed = _last(job, everybody, "agreed")
        cpu_s, peak = usage.process_cpu_s(job.scheduler.pid), usage.process_peak_rss(job.scheduler.pid)
        killed = time.monotonic()
        job.workers[-1].kill()
        heard = _last(job, [process for process in everybody if process is not job.workers[-1]], "failed")
    finally:
        for process in [job.scheduler, *everybody]:
            process.kill()
            process.communicate()
    return Measured(nodes, started - began, agreed - started, cpu_s, peak, heard - killed)


def _start(nodes: int, model: str, processes: int) -> Job:
    host = loopback()
    environment = dict(
        os.environ, DMLC_PS_ROOT_URI=host, DMLC_NUM_WORKER=str(nodes), DMLC_NUM_SERVER=str(nodes),
        DMLC_NODE_HOST=host, P3_SECRET=secrets.token_hex(16), P3_RENDEZVOUS_TIMEOUT_S=str(_WAIT_S),
        P3_LOCAL_AGGREGATION="0", P3_WATCH_S="0",
    )  # fmt: skip
    code = "import socket, os, sys; from p3.cluster import journal, scheduler; from p3.settings import Settings; " \
        "from p3.cluster.node import listen_as_root; listener = listen_as_root(%r, 0); " \
        "print(listener.getsockname()[1], flush=True); kept = journal.Journal.make(); " \
        "sys.exit(scheduler.main(Settings.from_env(os.environ), listener.detach(), journal_fd=kept))" % host
    said = tempfile.TemporaryFile("w+")
    scheduler = subprocess.Popen([sys.executable, "-c", code], env=dict(environment, DMLC_ROLE="scheduler"),
                                 stdout=subprocess.PIPE, stderr=said, text=True)  # fmt: skip
    environment["DMLC_PS_ROOT_PORT"] = scheduler.stdout.readline().strip()
    half = max(1, processes // 2)
    limits = [nodes * number // half for number in range(half + 1)]

    def of_role(role: str) -> List[subprocess.Popen]:
        command = [sys.executable, "-m", "p3.measure.micro.processes.control_nodes", role]
        return [
            subprocess.Popen([*command, str(begin), str(end - begin), model], env=environment, stdout=subprocess.PIPE,
                             text=True)
            for begin, end in zip(limits, limits[1:]) if end > begin
        ]  # fmt: skip

    return Job(scheduler, said, of_role("worker"), of_role("server"))


def _last(job: Job, processes: Sequence[subprocess.Popen], phase: str) -> float:
    """When the last of them has come to it. SystemExit, with the scheduler's last line, if one does not: in _WAIT_S, or
    in _REST_S if there is no scheduler any more."""
    over = threading.Event()

    def watch() -> None:
        try:
            job.scheduler.wait(_WAIT_S)
        except subprocess.TimeoutExpired:
            pass
        else:
            over.wait(_REST_S)
        if not over.is_set():
            for process in processes:
                process.kill()

    threading.Thread(target=watch, daemon=True).start()
    try:
        return max(_read(process, phase) for process in processes)
    except EOFError as error:
        job.said.seek(0)
        last = (job.said.read().splitlines() or ["none"])[-1]
        raise SystemExit("p3 bench control: %s; the scheduler's last line: %s" % (error, last)) from None
    finally:
        over.set()


def _read(process: subprocess.Popen, phase: str) -> float:
    for line in process.stdout:
        told: Dict = json.loads(line)
        if phase in told:
            return told[phase]
    raise EOFError("a process of nodes has ended with %r before %r" % (process.wait(), phase))
