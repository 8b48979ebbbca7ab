"""A store's job that pushpull.py keeps alive and talks to.

    with PushPullJob("dist_sync", hosts, setup, port=9100, folder=folder) as job:
        job.start()
        job.turn(rounds=1)               # warm-up
        turn = job.turn(rounds=5)
        job.check_sums()
        job.leave()
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import List, Optional, Sequence

from p3.measure.jobs import nic, usage
from p3.measure.jobs.controlled import ControlledJob
from p3.measure.jobs.stores import STORES
from p3.measure.lab.hosts import Host
from p3.measure.micro.processes.raw_tcp import SERVERS_VARIABLE
from p3.measure.replay.models import FLOAT32_BYTES

START_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Setup:
    workers: int
    servers: int
    keys: str  # as pushpull_worker.parse_sizes reads it
    elements: int  # of all keys together
    omp_threads: int
    timeout_s: float  # for one turn

    @property
    def model_bytes(self) -> int:
        return self.elements * FLOAT32_BYTES


@dataclass(frozen=True)
class Turn:
    """Some rounds of one job, measured from outside and inside."""

    round_s: List[List[float]]  # by worker, by round
    moved_bytes: int  # pushed and received, all workers and rounds
    job_cpu_s: float
    machine_cpu_s: float
    network_bytes: int  # in and out of each host's card, on average
    switches: usage.Switches  # of the job's threads
    system_calls: Optional[int]  # of the core's threads, in workers and servers; None: it is another store
    worker_added_bytes: int  # peak resident size over what the worker held before it opened the store; the largest


class PushPullJob(ControlledJob):
    def __init__(self, store: str, hosts: Sequence[Host], setup: Setup, port: int, folder: Path):
        """`port` and the ones after it, one per server, must be free on all hosts. `folder` gets logs and a socket."""
        self._setup, self._port = setup, port
        raw_servers = [f"{hosts[i % len(hosts)].address}:{port + i}" for i in range(setup.servers)]
        super().__init__(
            STORES[store], hosts,
            [sys.executable, "-m", "p3.measure.micro.processes.pushpull_worker", STORES[store].kvstore, setup.keys],
            root=hosts[0], port=port, folder=folder, omp_threads=setup.omp_threads,
            workers=setup.workers, servers=setup.servers, controlled=setup.workers,
            start_timeout_s=START_TIMEOUT_S, timeout_s=setup.timeout_s,
            environment={SERVERS_VARIABLE: ",".join(raw_servers)},
        )  # fmt: skip

    def start(self) -> None:
        """Returns when every worker has initialised every key."""
        super().start()
        self.hear("the initial values")

    def turn(self, rounds: int) -> Turn:
        sessions = self.sessions()
        network, calls = self._card_bytes(), self._system_calls()
        switches = usage.session_switches(sessions)
        job_s, machine_s = usage.session_cpu_s(sessions), usage.machine_busy_s()
        replies = self.ask({"rounds": rounds}, f"{rounds} rounds")
        machine_s, job_s = usage.machine_busy_s() - machine_s, usage.session_cpu_s(sessions) - job_s
        switches = usage.session_switches(sessions).since(switches)
        return Turn(
            round_s=[reply["seconds"] for reply in replies],
            moved_bytes=2 * self._setup.workers * rounds * self._setup.model_bytes,
            machine_cpu_s=machine_s,
            job_cpu_s=job_s,
            network_bytes=self._card_bytes() - network,
            switches=switches,
            system_calls=None if calls is None else self._system_calls() - calls,
            worker_added_bytes=max(reply["added_bytes"] for reply in replies),
        )

    def _system_calls(self) -> Optional[int]:
        counts = [reply["system_calls"] for reply in self.ask({"count": True}, "the count of system calls")]
        return None if None in counts else sum(counts)

    def _card_bytes(self) -> int:
        return sum(sum(nic.totals(host)) for host in self._hosts) // len(self._hosts)

    def check_sums(self) -> None:
        """One untimed round; raises JobError unless every worker gets the right sums."""
        for number, reply in enumerate(self.ask({"check": True}, "the check of the outputs")):
            if reply["wrong"]:
                some = ", ".join(map(str, reply["wrong"][:5]))
                raise self.error(f"worker {number} has wrong sums in {len(reply['wrong'])} keys: {some}...")

    def server_peak_bytes(self) -> int:
        """Resident size of the largest server, the most so far."""
        return max(usage.session_peak_rss(self.session(f"server {i}")) for i in range(self._setup.servers))

    def command(self, role: str, number: int) -> List[str]:
        if self.store.name != "raw_tcp" or role == "worker":
            return super().command(role, number)
        if role == "scheduler":
            return ["true"]
        command = [sys.executable, "-m", "p3.measure.micro.processes.raw_tcp"]
        return [*command, str(self._port + number), str(self._setup.workers)]
