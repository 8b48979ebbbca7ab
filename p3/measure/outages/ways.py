"""How a training of `p3 bench outages` runs on the hosts of a lab, and how one of its processes is found.

The first host is for what starts a job and looks after it: `p3 run` and its scheduler, torchft's lighthouse. Each other
one has a worker, and with P3 a server.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence

from p3.measure.chaos import lab_ssh, strike
from p3.measure.lab.hosts import Host
from p3.measure.outages import SAVE_EVERY

_ALWAYS = "1000"  # restarts: more than there are deaths
_RENDEZVOUS_PORT, _LIGHTHOUSE_PORT = 29400, 29510
# With what torchft's documentation gives its command.
_LIGHTHOUSE = f"""
import signal
from torchft.coordination import LighthouseServer
server = LighthouseServer(bind="[::]:{_LIGHTHOUSE_PORT}", min_replicas=1, join_timeout_ms=10000, quorum_tick_ms=100)
signal.pause()
"""
RANK = "OUTAGES_RANK"  # of a worker that P3 has not started; in torchrun's environment, too


class Job(NamedTuple):
    """What is the same for all ways."""

    lab: Sequence[Host]
    folder: Path
    mark: str
    training: Sequence[str]  # steps, seconds, megabytes, folder: the arguments of worker.py behind WAY

    def start(self, host: Host, *argv: str, **environment: str) -> subprocess.Popen:
        env = {**strike.environment(self.mark), "OMP_NUM_THREADS": "1", **environment}
        with open(self.folder / f"output-{host.node}.log", "ab") as log:
            return subprocess.Popen(host.command(*argv), env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                    start_new_session=True)  # fmt: skip

    def worker(self, way: str) -> List[str]:
        return ["p3.measure.outages.worker", way, *self.training]


class Way(NamedTuple):
    name: str
    label: str
    start: Callable[[Job], List[subprocess.Popen]]  # the last ones end when the training does
    is_p3: bool = True
    dies: bool = True  # whether anything is killed in it
    lacks: Callable[[], Optional[str]] = lambda: None  # what it needs and is not there


def _with_p3(*options: str) -> Callable[[Job], List[subprocess.Popen]]:
    def start(job: Job) -> List[subprocess.Popen]:
        hostfile, count = job.folder / "hosts", str(len(job.lab) - 1)
        hostfile.write_text("".join(f"{host.address} slots=1\n" for host in job.lab[1:]))
        python = [sys.executable, "-m"]
        given = [one.replace("FOLDER", str(job.folder)) for one in options]
        return [job.start(
            job.lab[0], *python, "p3", "run", "-n", count, "-s", count, "--hostfile", str(hostfile), *given,
            *python, *job.worker("p3"), **lab_ssh.environment(job.lab[0]), P3_WATCH_S="0",
        )]  # fmt: skip

    return start


def _torchrun(job: Job, host: Host, rank: int, way: str, *options: str, **environment: str) -> subprocess.Popen:
    return job.start(
        host, sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--max-restarts", _ALWAYS,
        "--monitor-interval", "0.1", *options, "-m", *job.worker(way), **environment,
        GLOO_SOCKET_IFNAME="eth0", **{RANK: str(rank)},
    )  # fmt: skip


def _with_torchrun(job: Job) -> List[subprocess.Popen]:
    workers = job.lab[1:]
    meeting = ["--nnodes", str(len(workers)), "--rdzv-backend", "c10d", "--rdzv-id", "outages", "--rdzv-endpoint",
               f"{workers[0].address}:{_RENDEZVOUS_PORT}"]  # fmt: skip
    return [_torchrun(job, host, rank, "ddp", *meeting, "--local-addr", host.address)
            for rank, host in enumerate(workers)]  # fmt: skip


def _with_torchft(job: Job) -> List[subprocess.Popen]:
    root = job.lab[0]
    lighthouse = job.start(root, sys.executable, "-c", _LIGHTHOUSE)
    at = {"TORCHFT_LIGHTHOUSE": f"http://{root.address}:{_LIGHTHOUSE_PORT}"}
    return [lighthouse, *(
        _torchrun(job, host, rank, "torchft", "--nnodes", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint",
                  f"{host.address}:{_RENDEZVOUS_PORT}", "--local-addr", host.address, **at)
        for rank, host in enumerate(job.lab[1:])
    )]  # fmt: skip


def _lacks_torchft() -> Optional[str]:
    return None if importlib.util.find_spec("torchft") else "torchft is not installed (pip install torchft)"


_SAVED = ("--restarts", _ALWAYS, "--snapshot-dir", "FOLDER/snapshots", "--snapshot-every", str(SAVE_EVERY))
_WITHOUT_WORKERS = ("--on-worker-loss", "continue", "--rejoin", "--worker-restarts", _ALWAYS)
_GOES_ON = (*_WITHOUT_WORKERS, "--on-server-loss", "continue")

WAYS: Dict[str, Way] = {
    one.name: one
    for one in (
        Way("undisturbed", "P3, nothing dies", _with_p3(), dies=False),
        Way("continue", "P3 goes on, others join", _with_p3(*_GOES_ON, *_SAVED)),
        Way("workers", "P3 goes on without workers, others join", _with_p3(*_WITHOUT_WORKERS, *_SAVED)),
        Way("restarts", "P3 starts again from snapshots", _with_p3(*_SAVED)),
        Way("torchrun", "DDP, torchrun starts again from checkpoints", _with_torchrun, is_p3=False),
        Way("torchft", "torchft goes on, others join", _with_torchft, is_p3=False, lacks=_lacks_torchft),
    )
}


def alive(role: str, mark: str) -> Dict[int, int]:
    """Process ids of those that run now, by rank. Of ways without P3 there are only workers."""
    found = strike.alive(role, mark)
    if role == "worker":
        for pid, variables in strike.marked(mark).items():
            if RANK in variables and "LOCAL_RANK" in variables:
                found[int(variables[RANK])] = pid
    return found
