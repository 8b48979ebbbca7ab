"""One store's processes for `pushpull.py`: scheduler, servers and workers on the hosts of a lab.

    with Job("dist_sync", hosts, setup, port=9100, folder=folder) as job:
        job.start()
        job.turn(rounds=1)               # warm-up
        turn = job.turn(rounds=5)
        job.check()

Every wait has a deadline, a process that ends too early is noticed at once, and leaving the block kills every process
of the job by its process group. A killed benchmark takes its processes along (their parent-death signal).
"""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Sequence

import usage
from p3.lab.hosts import Host
from raw_tcp import SERVERS_VARIABLE

HERE = Path(__file__).resolve().parent
FLOAT32_BYTES = 4
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
LOG_TAIL_LINES = 12

# What each store adds to the environment of all its processes.
STORES: Dict[str, Dict[str, str]] = {
    "dist_sync": {},
    "mxnet_p3": {"DMLC_PS_VAN_TYPE": "p3", "DMLC_PS_WATER_MARK": "10"},
    "p3_sync": {},
    "raw_tcp": {},
}


class JobError(RuntimeError):
    """The job failed, hung or gave wrong values. The text names the store and the process, and ends with its log."""


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
    worker_added_bytes: int  # peak resident size over what the worker held before it opened the store; the largest


class Job:
    def __init__(self, store: str, hosts: Sequence[Host], setup: Setup, port: int, folder: Path):
        """`port` and the ones after it, one per server, must be free on all hosts. `folder` gets logs and a socket."""
        self.store, self._hosts, self._setup, self._port, self._folder = store, hosts, setup, port, folder
        self._processes: Dict[str, subprocess.Popen] = {}  # by role and number, "worker 0"
        self._controls: List[socket.socket] = []
        self._secret = secrets.token_hex(32)

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_exc) -> None:
        self.kill()

    def start(self) -> None:
        """Returns when every worker has initialised every key."""
        deadline = time.monotonic() + START_TIMEOUT_S
        path = str(self._folder / f"{self.store}.sock")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(path)
            listener.listen()
            if self.store != "raw_tcp":
                self._spawn("scheduler", 0, path)
            for i in range(self._setup.servers):
                self._spawn("server", i, path)
            for i in range(self._setup.workers):
                self._spawn("worker", i, path)
            for _ in range(self._setup.workers):
                self._wait_readable(listener, deadline, "the workers' start")
                self._controls.append(listener.accept()[0])
        self._receive(deadline, "the initial values")

    def turn(self, rounds: int) -> Turn:
        sessions = self.sessions()
        job_s, machine_s = usage.session_cpu_s(sessions), usage.machine_busy_s()
        replies = self._ask({"rounds": rounds}, f"{rounds} rounds")
        return Turn(
            round_s=[reply["seconds"] for reply in replies],
            moved_bytes=2 * self._setup.workers * rounds * self._setup.model_bytes,
            machine_cpu_s=usage.machine_busy_s() - machine_s,
            job_cpu_s=usage.session_cpu_s(sessions) - job_s,
            worker_added_bytes=max(reply["added_bytes"] for reply in replies),
        )

    def check(self) -> None:
        """One untimed round; raises JobError unless every worker gets the right sums."""
        for number, reply in enumerate(self._ask({"check": True}, "the check of the outputs")):
            if reply["wrong"]:
                some = ", ".join(map(str, reply["wrong"][:5]))
                raise JobError(f"{self.store}: worker {number} has wrong sums in {len(reply['wrong'])} keys: {some}...")

    def server_peak_bytes(self) -> int:
        """Resident size of the largest server, the most so far."""
        servers = [process.pid for name, process in self._processes.items() if name.startswith("server")]
        return max(map(usage.session_peak_rss, servers))

    def stop(self) -> None:
        """The orderly end. Raises JobError if a process does not end by itself in time, or fails at the end."""
        for control in self._controls:
            control.close()
        self._controls.clear()
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for name, process in self._processes.items():
            try:
                status = process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise self._error(f"did not end within {STOP_TIMEOUT_S:.0f} s after its last round", name) from None
            if status != 0:
                raise self._error(f"ended with status {status} after its last round", name)

    def kill(self) -> None:
        """Ends what is left of the job, at once. May be called in any state and again."""
        for control in self._controls:
            control.close()
        self._controls.clear()
        for process in self._processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(STOP_TIMEOUT_S)
        self._processes.clear()

    def sessions(self) -> List[int]:
        """The session of each process; everything it may start itself belongs to the same one."""
        return [process.pid for process in self._processes.values()]

    def _spawn(self, role: str, number: int, control: str) -> None:
        host = self._hosts[number % len(self._hosts)]
        name = f"{role} {number}"
        with open(self._log(name), "wb") as log:
            self._processes[name] = subprocess.Popen(
                host.command("setpriv", "--pdeathsig", "KILL", *self._command(role, number)),
                env={**os.environ, **self._environment(role, host, control)},
                cwd=HERE.parent,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _command(self, role: str, number: int) -> List[str]:
        worker = [sys.executable, str(HERE / "pushpull_worker.py"), self._store_name(), self._setup.keys]
        if self.store == "p3_sync":
            return [sys.executable, "-m", "p3", "exec", *worker]
        if role == "worker":
            return worker
        if self.store == "raw_tcp":
            return [sys.executable, str(HERE / "raw_tcp.py"), str(self._port + number), str(self._setup.workers)]
        # Importing MXNet in these roles runs the role, and exits when the job ends.
        return [sys.executable, "-c", "import mxnet"]

    def _store_name(self) -> str:
        return "dist_sync" if self.store == "mxnet_p3" else self.store

    def _environment(self, role: str, host: Host, control: str) -> Dict[str, str]:
        raw_servers = [
            f"{self._hosts[i % len(self._hosts)].address}:{self._port + i}" for i in range(self._setup.servers)
        ]
        return {
            "DMLC_ROLE": role,
            "DMLC_PS_ROOT_URI": self._hosts[0].address,
            "DMLC_PS_ROOT_PORT": str(self._port),
            "DMLC_NUM_WORKER": str(self._setup.workers),
            "DMLC_NUM_SERVER": str(self._setup.servers),
            "DMLC_NODE_HOST": host.address,
            "OMP_NUM_THREADS": str(self._setup.omp_threads),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")])),
            "P3_SECRET": self._secret,
            "BENCH_CONTROL": control,
            SERVERS_VARIABLE: ",".join(raw_servers),
            **STORES[self.store],
        }

    def _ask(self, request: Dict, what: str) -> List[Dict]:
        try:
            for control in self._controls:
                control.send(json.dumps(request).encode())
        except OSError as error:
            raise self._error(f"a worker was gone before {what}: {error}", *self._processes) from error
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
                raise self._error(f"a worker closed its control socket during {what}", *self._processes)
            replies.append(json.loads(packet))
        return replies

    def _wait_readable(self, waited: socket.socket, deadline: float, what: str) -> None:
        while not select.select([waited], [], [], 0.2)[0]:
            for name, process in self._processes.items():
                if process.poll() is not None:
                    raise self._error(f"ended with status {process.returncode} during {what}", name)
            if time.monotonic() > deadline:
                raise self._error(f"{what} did not end in time", *self._processes)

    def _error(self, what: str, *names: str) -> JobError:
        """`names`: whose logs to show; what happened to a single one is said of it."""
        text = f"{self.store}: {names[0] + ' ' if len(names) == 1 else ''}{what}"
        for name in names:
            lines = self._log(name).read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
            if lines:
                text += f"\n  log of {name}:\n    " + "\n    ".join(lines)
        return JobError(text)

    def _log(self, name: str) -> Path:
        return self._folder / f"{self.store}-{name.replace(' ', '-')}.log"
