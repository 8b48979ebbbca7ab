"""Shared fixtures: real jobs, on this machine, that cannot outlive their test."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
from typing import List, Optional

import forked
import pytest
from processes import Cluster, Finished, Process, clean_environment, write_script

# What a shell without job control runs in the background ignores it, and so would every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    """A shell starts what runs in the background with Ctrl-C ignored, and processes inherit that; tests send it."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.option.loadscopereorder = False  # xdist's own order: files of many tests first, however long they take
    if importlib.util.find_spec("hypothesis"):
        import hypothesis

        # A machine that pauses makes no example wrong.
        settings = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
        hypothesis.settings.register_profile("p3", settings)
        hypothesis.settings.load_profile("p3")


# With --dist loadfile a long file that begins last leaves the other cores idle. Longest first; those that compute take
# turns with those that wait.
BEGIN_FIRST = (
    "mxnet/test_trajectory.py", "cluster/test_replacing.py", "torch/test_learn.py", "launch/test_slurm.py",
    "torch/test_jobs.py", "measure/chaos/", "torch/test_replay.py", "launch/test_mpi.py", "measure/bench/",
    "packaging/test_wheel.py", "examples/test_examples.py", "launch/test_run.py", "mxnet/test_staleness.py",
    "snapshots/test_jobs.py", "worker/test_local_aggregation.py",
)  # fmt: skip


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/torch/" in item.nodeid:
            item.add_marker(pytest.mark.torch)
        if item.get_closest_marker("torch") and importlib.util.find_spec("torch") is None:
            item.add_marker(pytest.mark.skip(reason="no PyTorch here; make test-torch installs it"))

    def turn(item):
        path = item.nodeid.partition("::")[0]
        return next((turn for turn, name in enumerate(BEGIN_FIRST) if "tests/" + name in path), len(BEGIN_FIRST))

    items.sort(key=turn)


@pytest.fixture
def processes():
    """A list; every Process in it is ended after the test."""
    started: List[Process] = []
    yield started
    for process in started:
        process.end()


@pytest.fixture
def quick_imports(monkeypatch):
    """Processes that P3 starts in our environment import in a part of the time, as those in clean_environment()."""
    quick = clean_environment(OMP_NUM_THREADS="1")
    for name in ("OMP_NUM_THREADS", "PYTHONPATH", "SETUPTOOLS_USE_DISTUTILS"):
        monkeypatch.setenv(name, quick[name])


@pytest.fixture
def forked_imports(quick_imports, monkeypatch):
    """And those whose library a fork server has imported are forked there: in sessions of their own, so that nobody
    finds what they use by the sessions of those that were started."""
    monkeypatch.setenv("P3S_FORK_SERVERS", forked.environment()["P3S_FORK_SERVERS"])


@pytest.fixture
def start_job(tmp_path, processes):
    """start_job(script, workers, servers, ...) -> the Process of `p3 run`."""

    def start(
        script: str, workers: int = 2, servers: int = 1, env: Optional[dict] = None, options=(), arguments=()
    ) -> Process:
        command = [sys.executable, "-m", "p3", "run", "-n", str(workers), "-s", str(servers), *options]
        command += forked.command(write_script(tmp_path, script), *arguments)
        processes.append(Process(command, clean_environment(**(env or {})), tmp_path))
        return processes[-1]

    return start


@pytest.fixture
def run_job(start_job):
    """run_job(script, workers, servers, env, options, timeout_s) -> Finished: a whole job through `p3 run`."""

    def run(*arguments, timeout_s: float = 60, **options) -> Finished:
        return start_job(*arguments, **options).wait(timeout_s)

    return run


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
