"""`p3` as the first process of a container: a process namespace of its own, as Docker and Kubernetes make it."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from processes import ROOT, Process, clean_environment, write_script

from p3.snapshots import files

NAMESPACE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]

# An orphan ends; then the script waits, without an end of its own.
ORPHAN = """
    import os, time
    read, write = os.pipe()
    if os.fork() == 0:
        if os.fork() == 0:
            os.write(write, b"%d" % os.getpid())
        os._exit(0)
    os.wait()
    orphan = "/proc/" + os.read(read, 20).decode()
    deadline = time.monotonic() + 20
    while os.path.exists(orphan) and time.monotonic() < deadline:
        time.sleep(0.01)
    print(os.getpid(), "orphan left" if os.path.exists(orphan) else "orphan reaped", flush=True)
    time.sleep(60)
"""


def can_unshare():
    return shutil.which("unshare") and subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode == 0


pytestmark = pytest.mark.skipif(not can_unshare(), reason="needs unshare and root")


class Contained:
    """`p3 ...` as process 1."""

    def __init__(self, processes, folder, *arguments, pass_fds=(), **settings):
        command = [*NAMESPACE, sys.executable, "-m", "p3", *arguments]
        self.process = Process(command, clean_environment(**settings), folder, pass_fds)
        processes.append(self.process)

    def first(self):
        """Its number outside, when it passes signals on: then it has a child."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            found = children(self.process.popen.pid)
            if found and children(found[0]):
                return found[0]
            time.sleep(0.01)
        pytest.fail("it has started nothing")

    def ended_by(self, number):
        """How it ends if that signal comes from outside, as a container's runtime sends it; at once."""
        os.kill(self.first(), number)
        return self.process.wait(20)


def children(pid):
    with open("/proc/%d/task/%d/children" % (pid, pid)) as listed:
        return [int(number) for number in listed.read().split()]


def test_a_job_in_a_container_has_its_orphans_reaped_and_ends_when_told_to(processes, tmp_path):
    command = [sys.executable, write_script(tmp_path, ORPHAN)]
    job = Contained(processes, tmp_path, "run", "-n", "2", "-s", "1", *command)
    said = [job.process.read_line() for _ in range(2)]
    assert all(line.endswith("orphan reaped") for line in said), said
    assert job.ended_by(signal.SIGTERM).code == 128 + signal.SIGTERM


class MXJob:
    """A scheduler, a server and a worker, each the first process of a container."""

    def __init__(self, processes, cluster, folder, *command, **settings):
        fd = cluster.listener.fileno()

        def start(role, *arguments, pass_fds=()):
            env = cluster.env(DMLC_ROLE=role, **settings)
            return Contained(processes, folder, "exec", *arguments, pass_fds=pass_fds, **env)

        self.scheduler = start("scheduler", "--listen-fd=%d" % fd, pass_fds=(fd,))
        cluster.listener.close()
        self.server = start("server")
        self.worker = start("worker", sys.executable, *command)


@pytest.mark.parametrize("role", ["server", "scheduler"])
def test_the_processes_of_an_mxjob_end_when_told_to_and_a_worker_has_its_orphans_reaped(
    processes, make_cluster, tmp_path, role
):
    """Of server and scheduler one: the other may end of its loss before it is told to. The worker never joins them."""
    job = MXJob(processes, make_cluster(1, 1), tmp_path, write_script(tmp_path, ORPHAN))
    number, said = job.worker.process.read_line().split(" ", 1)
    assert int(number) > 1 and said == "orphan reaped"
    for node in (job.worker, getattr(job, role)):
        assert node.ended_by(signal.SIGTERM).code == 128 + signal.SIGTERM


def test_an_mxjob_ends_with_a_snapshot_if_its_worker_is_told_to_end(processes, make_cluster, tmp_path):
    folder = tmp_path / "snapshots"
    job = MXJob(
        processes, make_cluster(1, 1), tmp_path, str(ROOT / "tests" / "jobs" / "on_demand.py"), "numpy", "0",
        P3_SNAPSHOT_DIR=str(folder), P3_SNAPSHOT_EVERY="1000000",
    )  # fmt: skip
    assert "trains with" in job.worker.process.read_line()
    ended = job.worker.ended_by(signal.SIGTERM)
    (saved,) = files.rounds(str(folder))
    assert ended.code == 128 + signal.SIGTERM and "its snapshot of round %d is complete" % saved in ended.err, ended
    assert [node.process.wait(20).code for node in (job.server, job.scheduler)] == [0, 0]


def test_it_ends_as_the_command_does(processes, make_cluster, tmp_path):
    env = make_cluster(1, 1).env(DMLC_ROLE="worker")
    for code in (0, 7):
        exits = [sys.executable, "-c", "raise SystemExit(%d)" % code]
        assert Contained(processes, tmp_path, "exec", *exits, **env).process.wait(30).code == code
