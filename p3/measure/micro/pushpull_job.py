"""A store's job that pushpull.py keeps alive and talks to: a job of p3.measure.bench with a socket to each worker.

    with PushPullJob("dist_sync", hosts, setup, port=9100, folder=folder) as job:
        job.start()
        job.turn(rounds=1)               # warm-up
        turn = job.turn(rounds=5)
        job.check_sums()
        job.stop()
"""

from __future__ import annotations

import json
import select
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Sequence

from p3.measure.bench import jobs
from p3.measure.bench.jobs import JobError  # noqa: F401  (for pushpull.py)
from p3.measure.lab.hosts import Host
from p3.measure.micro import usage
from p3.measure.micro.raw_tcp import SERVERS_VARIABLE

FLOAT32_BYTES = 4
START_TIMEOUT_S = 60.0

STORES: Dict[str, jobs.Store] = {
    **{name: jobs.STORES[name] for name in ("dist_sync", "mxnet_p3", "p3_sync")},
    "p3_apart": jobs.Store("p3_apart", "p3_sync", {"P3_LOCAL_AGGREGATION": "0"}),
    "p3_checksum": jobs.Store("p3_checksum", "p3_sync", {"P3_CHECKSUM": "1"}),
    "p3_tls": jobs.Store("p3_tls", "p3_sync", {"P3_TLS": "1"}),
    "raw_tcp": jobs.Store("raw_tcp", "raw_tcp"),
}


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
    worker_added_bytes: int  # peak resident size over what the worker held before it opened the store; the largest


class PushPullJob(jobs.Job):
    def __init__(self, store: str, hosts: Sequence[Host], setup: Setup, port: int, folder: Path):
        """`port` and the ones after it, one per server, must be free on all hosts. `folder` gets logs and a socket."""
        self._setup, self._port, self._controls = setup, port, []
        self._control_path = str(folder / f"{store}.sock")
        raw_servers = [f"{hosts[i % len(hosts)].address}:{port + i}" for i in range(setup.servers)]
        super().__init__(
            STORES[store], hosts,
            [sys.executable, "-m", "p3.measure.micro.pushpull_worker", STORES[store].kvstore, setup.keys],
            root=hosts[0], port=port, folder=folder, omp_threads=setup.omp_threads,
            workers=setup.workers, servers=setup.servers,
            environment={"BENCH_CONTROL": self._control_path, SERVERS_VARIABLE: ",".join(raw_servers)},
        )  # fmt: skip

    def start(self) -> None:
        """Returns when every worker has initialised every key."""
        deadline = time.monotonic() + START_TIMEOUT_S
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(self._control_path)
            listener.listen()
            super().start()
            for _ in range(self._setup.workers):
                self._wait_readable(listener, deadline, "the workers' start")
                self._controls.append(listener.accept()[0])
        self._receive(deadline, "the initial values")

    def turn(self, rounds: int) -> Turn:
        sessions = self.sessions()
        network = self._card_bytes()
        job_s, machine_s = usage.session_cpu_s(sessions), usage.machine_busy_s()
        replies = self._ask({"rounds": rounds}, f"{rounds} rounds")
        return Turn(
            round_s=[reply["seconds"] for reply in replies],
            moved_bytes=2 * self._setup.workers * rounds * self._setup.model_bytes,
            machine_cpu_s=usage.machine_busy_s() - machine_s,
            job_cpu_s=usage.session_cpu_s(sessions) - job_s,
            network_bytes=self._card_bytes() - network,
            worker_added_bytes=max(reply["added_bytes"] for reply in replies),
        )

    def _card_bytes(self) -> int:
        files = [f"/sys/class/net/eth0/statistics/{way}_bytes" for way in ("rx", "tx")]
        counts = [subprocess.check_output(host.command("cat", *files), timeout=START_TIMEOUT_S) for host in self._hosts]
        return sum(sum(map(int, count.split())) for count in counts) // len(counts)

    def check_sums(self) -> None:
        """One untimed round; raises JobError unless every worker gets the right sums."""
        for number, reply in enumerate(self._ask({"check": True}, "the check of the outputs")):
            if reply["wrong"]:
                some = ", ".join(map(str, reply["wrong"][:5]))
                raise self.error(f"worker {number} has wrong sums in {len(reply['wrong'])} keys: {some}...")

    def server_peak_bytes(self) -> int:
        """Resident size of the largest server, the most so far."""
        return max(usage.session_peak_rss(self.session(f"server {i}")) for i in range(self._setup.servers))

    def stop(self) -> None:
        """The orderly end. Raises JobError if a process does not end by itself in time, or fails at the end."""
        self._close_controls()
        self.wait(jobs.STOP_TIMEOUT_S)

    def kill(self) -> None:
        self._close_controls()
        super().kill()

    def command(self, role: str, number: int) -> List[str]:
        if self.store.name != "raw_tcp" or role == "worker":
            return super().command(role, number)
        if role == "scheduler":
            return ["true"]
        command = [sys.executable, "-m", "p3.measure.micro.raw_tcp"]
        return [*command, str(self._port + number), str(self._setup.workers)]

    def _ask(self, request: Dict, what: str) -> List[Dict]:
        try:
            for control in self._controls:
                control.send(json.dumps(request).encode())
        except OSError as error:
            raise self.error(f"a worker was gone before {what}: {error}", *self.names()) from error
        return self._receive(time.monotonic() + self._setup.timeout_s, what)

    def _receive(self, deadline: float, what: str) -> List[Dict]:
        """One reply from every worker."""
        replies = []
        for control in self._controls:
            self._wait_readable(control, deadline, what)
            try:
                packet = control.recv(1 << 20)
            except ConnectionError:
                packet = b""
            if not packet:
                raise self.error(f"a worker closed its control socket during {what}", *self.names())
            replies.append(json.loads(packet))
        return replies

    def _wait_readable(self, waited: socket.socket, deadline: float, what: str) -> None:
        while not select.select([waited], [], [], 0.2)[0]:
            self.check()
            if time.monotonic() > deadline:
                raise self.error(f"{what} did not end in time", *self.names())

    def _close_controls(self) -> None:
        for control in self._controls:
            control.close()
        self._controls.clear()
