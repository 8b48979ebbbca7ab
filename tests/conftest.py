"""Shared fixtures: real jobs, on this machine, that cannot outlive their test."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional

import pytest

ROOT = Path(__file__).resolve().parent.parent
# What a shell without job control runs in the background ignores it, and so would every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
SECRET = "a secret that only tests use"


def pytest_configure(config):
    """A shell starts what runs in the background with Ctrl-C ignored, and processes inherit that; tests send it."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class Finished(NamedTuple):
    """How a process ended, and what it said."""

    code: int
    out: str
    err: str
    seconds: float


class Process:
    """A started process, in a group of its own."""

    def __init__(self, arguments: List[str], env: Dict[str, str], cwd: Path, pass_fds=()) -> None:
        self._started = time.monotonic()
        self.popen = subprocess.Popen(
            arguments,
            env=env,
            cwd=str(cwd),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=pass_fds,
            start_new_session=True,
            bufsize=0,  # read_line takes a line and no more: wait() reads what follows past Python's buffer
        )

    def wait(self, timeout_s: float = 60) -> Finished:
        """Fails the test, with what the process has said, if it does not end in time."""
        try:
            out, err = self.popen.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.end()
            out, err = self.popen.communicate()
            pytest.fail("still running after %g s:\n%s\n%s" % (timeout_s, out.decode(), err.decode()))
        return Finished(
            self.popen.returncode, out.decode(), err.decode(), time.monotonic() - self._started
        )

    def read_line(self) -> str:
        """The next line of its standard output; pytest's own time-out is the deadline."""
        return self.popen.stdout.readline().decode().rstrip("\n")

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def end(self) -> None:
        try:
            os.killpg(self.popen.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.popen.wait()


# First in PYTHONPATH: hides what MXNet imports where it finds it, which is a third of the time of its import.
QUICK_IMPORT = str(ROOT / "tests" / "quick_import")


def clean_environment(**settings: str) -> Dict[str, str]:
    """Ours without any DMLC_* and P3_* variable, then `settings`."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("DMLC_", "P3_"))}
    env["PYTHONPATH"] = str(ROOT)
    env["PYTHONUNBUFFERED"] = "1"
    env.update(settings)
    return env


@pytest.fixture
def processes():
    """A list; every Process in it is ended after the test."""
    started: List[Process] = []
    yield started
    for process in started:
        process.end()


def write_script(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


@pytest.fixture
def start_job(tmp_path, processes):
    """start_job(script, workers, servers, ...) -> the Process of `p3 run`."""

    def start(
        script: str, workers: int = 2, servers: int = 1, env: Optional[dict] = None, options=(), arguments=()
    ) -> Process:
        command = [sys.executable, "-m", "p3", "run", "-n", str(workers), "-s", str(servers), *options]
        command += [sys.executable, write_script(tmp_path, script), *arguments]
        processes.append(Process(command, clean_environment(**(env or {})), tmp_path))
        return processes[-1]

    return start


@pytest.fixture
def run_job(start_job):
    """run_job(script, workers, servers, env, options, timeout_s) -> Finished: a whole job through `p3 run`."""

    def run(*arguments, timeout_s: float = 60, **options) -> Finished:
        return start_job(*arguments, **options).wait(timeout_s)

    return run


class Cluster:
    """A job whose nodes the test starts one by one, as another launcher would."""

    def __init__(self, folder: Path, processes: List[Process], workers: int, servers: int) -> None:
        self._folder = folder
        self._processes = processes
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self._common = {
            "DMLC_PS_ROOT_URI": "127.0.0.1",
            "DMLC_PS_ROOT_PORT": str(self.port),
            "DMLC_NUM_WORKER": str(workers),
            "DMLC_NUM_SERVER": str(servers),
            "P3_SECRET": SECRET,
        }

    def env(self, **settings: str) -> Dict[str, str]:
        """The environment of a node; a setting of '' takes a variable away."""
        return {name: value for name, value in clean_environment(**dict(self._common, **settings)).items() if value}

    def start(self, role: str, script: str = "", **settings: str) -> Process:
        """Starts `p3 exec` in that role; a worker runs the script."""
        command = [sys.executable, "-m", "p3", "exec"]
        if role == "worker":
            path = self._folder / ("worker%d.py" % len(self._processes))
            path.write_text(textwrap.dedent(script))
            command += [sys.executable, str(path)]
        pass_fds = ()
        if role == "scheduler" and "P3_LISTEN_FD" not in settings:
            pass_fds = (self.listener.fileno(),)
            settings["P3_LISTEN_FD"] = str(self.listener.fileno())
        env = self.env(**dict({"DMLC_ROLE": role}, **settings))
        self._processes.append(Process(command, env, self._folder, pass_fds))
        if pass_fds:
            self.listener.close()
        return self._processes[-1]


@pytest.fixture
def make_cluster(tmp_path, processes):
    """make_cluster(workers, servers) -> Cluster."""
    made: List[Cluster] = []

    def make(workers: int = 2, servers: int = 1) -> Cluster:
        made.append(Cluster(tmp_path, processes, workers, servers))
        return made[-1]

    yield make
    for cluster in made:
        cluster.listener.close()


@pytest.fixture
def sshd(tmp_path, processes):
    """A private sshd on a free port of 127.0.0.1; the ssh command that reaches it."""
    program = shutil.which("sshd") or "/usr/sbin/sshd"
    if not os.path.exists(program) or shutil.which("ssh-keygen") is None:
        pytest.skip("no sshd here; install it with: apt-get install openssh-server")
    if os.getuid() == 0:
        os.makedirs("/run/sshd", exist_ok=True)  # where it drops privileges
    for name in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)], check=True)
    (tmp_path / "config").write_text(
        "HostKey %s\nAuthorizedKeysFile %s\nStrictModes no\nUsePAM no\nPasswordAuthentication no\nPidFile none\n"
        "PermitRootLogin yes\n" % (tmp_path / "host_key", tmp_path / "user_key.pub")
    )
    # In inetd mode, sshd serves the socket that it is given: no port has to be guessed.
    listener = socket.create_server(("127.0.0.1", 0))
    server = [program, "-i", "-f", str(tmp_path / "config"), "-E", str(tmp_path / "sshd.log")]
    bridge = (
        "import socket, subprocess, sys\n"
        "listener = socket.socket(fileno=%d)\n"
        "while True:\n"
        "    sock, _ = listener.accept()\n"
        "    subprocess.Popen(sys.argv[1:], stdin=sock, stdout=sock)\n"
        "    sock.close()\n" % listener.fileno()
    )
    command = [sys.executable, "-c", bridge] + server
    processes.append(Process(command, clean_environment(), tmp_path, (listener.fileno(),)))
    options = ["BatchMode=yes", "LogLevel=ERROR", "HostName=127.0.0.1", "StrictHostKeyChecking=no"]
    options.append("UserKnownHostsFile=%s" % (tmp_path / "known_hosts"))
    command = ["ssh", "-F", "none", "-i", str(tmp_path / "user_key"), "-p", str(listener.getsockname()[1])]
    yield " ".join(command + ["-o" + option for option in options])
    listener.close()
