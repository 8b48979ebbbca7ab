"""One store's processes on hosts: a scheduler, servers and workers, and what the workers write.

    with Job(STORES["dist_sync"], hosts, worker=["python", "train.py"], root=hosts[0], port=9100, folder=folder) as job:
        job.start()
        job.wait(timeout_s=60)
        lines = job.lines("worker 0")       # the JSON objects that it has written to standard output

A host is whatever has `name`, `address` and `command(*argv)`: one of a lab, this machine, or one behind ssh. Every wait
has a deadline, a process that ends too early is noticed at once, and leaving the block kills every process of the job
by its process group. A killed program takes its jobs along: by the parent-death signal here, over ssh by the end of
standard input.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import time
from pathlib import Path
from typing import Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Type

from p3.launch.placement import module_path
from p3.measure.jobs.ssh_host import SshHost
from p3.measure.jobs.stores import Store

STOP_TIMEOUT_S = 15.0  # for servers and scheduler, after the workers
LAST_WORDS_S = 5.0  # after a failure, for the others to end and say why
LOG_TAIL_LINES = 12
POLL_S = 0.05


class JobError(RuntimeError):
    """The job failed or hung. The text names the store and the process, and ends with what that has printed."""


class JobHung(JobError):
    """Nothing failed, but not all processes ended in time."""


class LocalHost(NamedTuple):
    """This machine itself, as it is."""

    address: str
    name: str = "localhost"
    rate_mbit: Optional[float] = None

    def command(self, *argv: str) -> List[str]:
        return list(argv)


class Job:
    def __init__(
        self, store: Store, hosts: Sequence, worker: Sequence[str], *, root, port: int, folder: Path, omp_threads: int,
        workers: Optional[int] = None, servers: Optional[int] = None, environment: Mapping[str, str] = {},
        server_hosts: Optional[Sequence] = None,
    ) -> None:  # fmt: skip
        """`workers` and `servers` (default: one on each host) run on the hosts in turn, or the servers on hosts of
        their own, the scheduler on `root`, where `port` is free. `folder` gets what they print, in files that must not
        exist."""
        self.store, self._hosts, self._worker, self._root = store, hosts, list(worker), root
        self._server_hosts = server_hosts or hosts
        self.num_workers, self.num_servers = workers or len(hosts), servers or len(hosts)
        self._folder = folder
        self._secret = secrets.token_hex(32)
        self._processes: Dict[str, subprocess.Popen] = {}  # by role and number, "worker 0"
        self._environment = {
            "DMLC_PS_ROOT_URI": root.address,
            "DMLC_PS_ROOT_PORT": str(port),
            "DMLC_NUM_WORKER": str(self.num_workers),
            "DMLC_NUM_SERVER": str(self.num_servers),
            "OMP_NUM_THREADS": str(omp_threads),
            **store.environment,
            **environment,
        }

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_exc) -> None:
        self.kill()

    def start(self) -> None:
        """Starts every process, and does not wait for them."""
        roles = [("worker", self.num_workers, self._hosts)]
        if not self.store.is_workers_alone:
            self._spawn("scheduler", 0, self._root)
            roles.insert(0, ("server", self.num_servers, self._server_hosts))
        for role, count, hosts in roles:
            for number in range(count):
                self._spawn(role, number, hosts[number % len(hosts)])

    def wait(self, timeout_s: float, watch: Callable[[], None] = lambda: None) -> None:
        """Until all have ended by themselves: the workers in `timeout_s`, the others soon after. JobHung if not so,
        and JobError if one fails.

        Calls `watch` every POLL_S while workers run, and before it looks whether they have ended.
        """
        deadline = time.monotonic() + timeout_s
        watch()
        while self._running("worker"):
            self.check()
            if time.monotonic() > deadline:
                what = f"the workers did not end in {timeout_s:.0f} s"
                raise self.error(what, *self._running("worker"), kind=JobHung)
            time.sleep(POLL_S)
            watch()
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while self._running():
            self.check()
            if time.monotonic() > deadline:
                what = f"did not end in {STOP_TIMEOUT_S:.0f} s after the workers"
                raise self.error(what, *self._running(), kind=JobHung)
            time.sleep(POLL_S)
        self.check()

    def check(self) -> None:
        """JobError if a process has failed; then the others have been given time for their last words."""
        if self._failed():
            deadline = time.monotonic() + LAST_WORDS_S
            while self._running() and time.monotonic() < deadline:
                time.sleep(POLL_S)
            failed = self._failed()
            how = ", ".join(f"{name} ended with status {self._processes[name].returncode}" for name in failed)
            raise self.error(how, *failed)

    def kill(self) -> None:
        """Ends what is left of the job, at once. May be called in any state and again."""
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # also what it left behind
            process.wait(STOP_TIMEOUT_S)
            _close(process.stdin)
        self._processes.clear()

    def lines(self, name: str) -> List[dict]:
        """The JSON objects that a process has written so far, one a line. Other lines are left out."""
        found = []
        for line in self.output(name).read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                value = json.loads(line)
                if isinstance(value, dict):
                    found.append(value)
        return found

    def names(self) -> List[str]:
        """Of the processes that were started."""
        return list(self._processes)

    def sessions(self) -> List[int]:
        """The session of each process; everything it may start itself belongs to the same one."""
        return [process.pid for process in self._processes.values()]

    @property
    def is_local(self) -> bool:
        """Whether all its processes are this machine's."""
        return not any(isinstance(host, SshHost) for host in [*self._hosts, self._root])

    def session(self, name: str) -> int:
        return self._processes[name].pid

    def output(self, name: str) -> Path:
        return self._folder / f"{self.store.name}-{name.replace(' ', '-')}.out"

    def error(self, what: str, *names: str, kind: Type[JobError] = JobError) -> JobError:
        """`names`: whose logs to show."""
        text = f"{self.store.name}: {what}"
        for name in names:
            log = self.output(name).with_suffix(".log")
            lines = log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:] if log.exists() else []
            if lines:
                text += f"\n  log of {name}:\n    " + "\n    ".join(lines)
        return kind(text)

    def command(self, role: str, number: int) -> List[str]:
        """What a process runs; `number` counts within the role."""
        return self.store.command(role, self._worker)

    def _spawn(self, role: str, number: int, host) -> None:
        name = f"{role} {number}"
        environment = {**self._environment, "DMLC_ROLE": role, "DMLC_NODE_HOST": host.address}
        if self.store.is_workers_alone:
            environment.update(
                MASTER_ADDR=self._root.address, MASTER_PORT=environment["DMLC_PS_ROOT_PORT"], RANK=str(number),
                WORLD_SIZE=str(self.num_workers),
            )  # fmt: skip
        with open(self.output(name), "xb") as out, open(self.output(name).with_suffix(".log"), "xb") as log:
            self._processes[name] = start(host, self.command(role, number), environment, self._secret, out, log)

    def _running(self, role: str = "") -> List[str]:
        return [
            name for name, process in self._processes.items() if name.startswith(role) and process.poll() is None
        ]

    def _failed(self) -> List[str]:
        return [name for name, process in self._processes.items() if process.poll()]


def start(host, argv: Sequence[str], environment: Mapping[str, str], secret: str, out, log) -> subprocess.Popen:
    """A process on a host, in a group of its own, that dies with this one. The secret is on no command line."""
    if isinstance(host, SshHost):
        command, env, stdin = host.supervised(argv, environment), None, subprocess.PIPE
    else:
        command = host.command("setpriv", "--pdeathsig", "KILL", *argv)
        env, stdin = {**_own_environment(), **environment, "P3_SECRET": secret}, subprocess.DEVNULL
    process = subprocess.Popen(command, env=env, stdin=stdin, stdout=out, stderr=log, start_new_session=True)
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):  # ssh has ended already, and its log says why
            process.stdin.write(secret.encode() + b"\n")
            process.stdin.flush()
    return process


def end(process: subprocess.Popen, timeout_s: float) -> None:
    """Asks a process of `start` to end; kills it if it has not after `timeout_s`."""
    if process.stdin is None:
        process.terminate()
    else:
        _close(process.stdin)
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(STOP_TIMEOUT_S)


def _own_environment() -> Dict[str, str]:
    """Ours without what would make a process join another job."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("DMLC_")}
    env.pop("P3_SECRET_FILE", None)
    return {**env, **module_path(env), "PYTHONUNBUFFERED": "1"}


def _close(pipe) -> None:
    if pipe is not None and not pipe.closed:
        with contextlib.suppress(BrokenPipeError):
            pipe.close()
