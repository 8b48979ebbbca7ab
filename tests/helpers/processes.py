"""Real processes that cannot outlive their test, and the jobs that they make up."""

from __future__ import annotations

import contextlib
import glob
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Dict, List, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
HELPERS = Path(__file__).resolve().parent
SECRET = "a secret that only tests use"
# In PYTHONPATH: MXNet's import takes a quarter of its time.
QUICK_IMPORT = str(HELPERS / "quick_import")
PYTHONPATH = os.pathsep.join([QUICK_IMPORT, str(ROOT)])


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

    def read_until(self, *texts, times=1):
        """What it has said, to the line by which each of these texts has come `times` times."""
        said = ""
        while any(said.count(text) < times for text in texts):
            line = self.popen.stdout.readline().decode()  # as read_line()
            assert line, (said, self.wait(10))
            said += line
        return said

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


def clean_environment(**settings: str) -> Dict[str, str]:
    """Ours without any DMLC_* and P3_* variable, then `settings`."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("DMLC_", "P3_"))}
    env["PYTHONPATH"] = PYTHONPATH
    env["PYTHONUNBUFFERED"] = "1"
    env["SETUPTOOLS_USE_DISTUTILS"] = "stdlib"  # else MXNet's import of distutils brings all of setuptools
    env.update(settings)
    return env


def write_script(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


def wait_until(condition, what, timeout_s=20):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "%s after %g s" % (what, timeout_s)
        time.sleep(0.02)


def command_lines() -> List[bytes]:
    """Of all processes of the machine, of which some may end meanwhile."""
    lines = []
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            lines.append(file.read())
    return lines


def is_running(pid):
    """Whether the process exists and is no zombie."""
    try:
        return Path("/proc/%d/stat" % pid).read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


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

    def until_called_by(self, nodes: int) -> None:
        """Waits until so many nodes have connected to the listener, before the test starts the scheduler: whose
        deadline is then none for how long they take to start."""

        def connected():
            connections = [line.split()[1:4] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
            return sum(to.endswith(":%04X" % self.port) and state == "01" for _, to, state in connections)

        wait_until(lambda: connected() >= nodes, "not all of %d nodes have connected" % nodes, 60)

    def start(self, role: str, script: str = "", inherits: bool = True, **settings: str) -> Process:
        """Starts `p3 exec` in that role; a worker runs the script. A scheduler `inherits` the listener."""
        command = [sys.executable, "-m", "p3", "exec"]
        if role == "worker":
            path = self._folder / ("worker%d.py" % len(self._processes))
            path.write_text(textwrap.dedent(script))
            command += [sys.executable, str(path)]
        pass_fds = ()
        if role == "scheduler" and inherits:
            pass_fds = (self.listener.fileno(),)
            command.append("--listen-fd=%d" % self.listener.fileno())
        env = self.env(**dict({"DMLC_ROLE": role}, **settings))
        self._processes.append(Process(command, env, self._folder, pass_fds))
        if pass_fds:
            self.listener.close()
        return self._processes[-1]
