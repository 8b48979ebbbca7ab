"""`p3 run --min-workers --max-workers`: a job comes back on the hosts that answer, with as many workers as fit."""

import os
import re
import sys

import pytest
from processes import HELPERS, ROOT, Process, clean_environment
from ssh_to_here import lose, processes_of

from p3.launch import elastic
from p3.launch.elastic import Bounds
from p3.launch.placement import Host
from p3.launch.restarts import Cooling
from p3.settings import Settings

ALPHA, BETA, PLAIN = Host("alpha", 2), Host("beta", 3), Host("gamma")


@pytest.mark.parametrize(
    "hosts, silent, bounds, expected",
    [
        ([ALPHA, BETA], (), Bounds(1, 5, 5), 5),
        ([ALPHA, BETA], (), Bounds(1, 2, 4), 4),
        ([ALPHA, BETA], ("alpha",), Bounds(1, 5, 5), 3),
        ([ALPHA, BETA], ("beta",), Bounds(2, 5, 5), 2),
        ([ALPHA, BETA], ("beta",), Bounds(3, 5, 5), 0),
        ([ALPHA, BETA], ("alpha", "beta"), Bounds(1, 5, 5), 0),
        ([PLAIN, ALPHA], ("alpha",), Bounds(1, 3, 8), 2),  # of three workers on two hosts, one has two
        ([Host("localhost")], (), Bounds(1, 4, 8), 4),
    ],
)
def test_there_are_as_many_workers_as_the_hosts_that_answer_have_slots_for(hosts, silent, bounds, expected):
    found = elastic.choose(hosts, dict.fromkeys(silent, "why"), bounds)
    assert found.workers == expected
    assert [host.name for host in found.hosts] == [host.name for host in hosts if host.name not in silent]


class Hosts:
    """Two hosts of two slots each, on this machine."""

    def __init__(self, folder, processes):
        self.folder, self._processes = folder, processes
        for name in ("alpha", "beta"):
            (folder / (name + ".up")).touch()
        (folder / "hosts").write_text("alpha slots=2\nbeta slots=2\n")

    def start(self, command, *options, **variables):
        ssh = "%s %s %s" % (sys.executable, HELPERS / "ssh_to_here.py", self.folder)
        path = os.pathsep.join(map(str, (ROOT, HELPERS, ROOT / "tests" / "jobs")))
        env = {"P3_SSH": ssh, "DMLC_NODE_HOST": "127.0.0.1", "PYTHONPATH": path, "P3_RENDEZVOUS_TIMEOUT_S": "20"}
        launcher = [sys.executable, "-m", "p3", "run", "--hostfile", str(self.folder / "hosts"), *options]
        env = clean_environment(**{**env, "OMP_NUM_THREADS": "1", **variables})
        self._processes.append(Process([*launcher, *map(str, command)], env, self.folder))
        return self._processes[-1]


@pytest.fixture
def hosts(tmp_path, processes):
    made = Hosts(tmp_path, processes)
    yield made
    for name in ("alpha", "beta"):
        (tmp_path / (name + ".up")).touch()
        lose(tmp_path, name)


SNAPSHOTS = ("--snapshot-dir", "snapshots", "--snapshot-every", "1")


def values_of(finished):
    return re.findall(r"\[worker (\d)\] from (\d+) of (\d+), rank \d+: (\w+)", finished.out)


def test_a_host_goes_and_the_job_goes_on_with_fewer_workers_until_it_is_back(hosts):
    def losing_host(*steps):
        return [sys.executable, ROOT / "tests" / "jobs" / "losing_host.py", hosts.folder, *steps]

    whole = hosts.start(losing_host(9, 0, 0), "-n", "4", "-s", "2").wait()
    assert whole.code == 0, whole
    ((_, _, _, values), *_) = values_of(whole)
    options = ("-n", "4", "-s", "2", "--restarts", "3", "--min-workers", "1", *SNAPSHOTS)
    finished = hosts.start(losing_host(9, 3, 6), *options).wait(100)
    assert finished.code == 0, finished
    assert sorted(values_of(finished)) == [(str(rank), "6", "2", values) for rank in range(4)], finished
    assert "leaving out host beta: ssh: connect to host beta port 22: No route to host" in finished.err
    failed = "the job failed with exit code 137"
    assert failed + "; restarting it with 2 instead of 4 workers (restart 1 of 3)" in finished.err
    assert "restarting it with 4 instead of 2 workers (restart 2 of 3)" in finished.err, finished
    assert not processes_of(hosts.folder, "alpha") + processes_of(hosts.folder, "beta")


def test_a_job_with_too_few_hosts_left_ends_and_says_so(hosts):
    (hosts.folder / "hosts").write_text("alpha\nbeta\n")
    command = [sys.executable, ROOT / "tests" / "jobs" / "losing_host.py", hosts.folder, 9, 3, 0]
    options = ("-n", "2", "-s", "1", "--restarts", "3", "--max-workers", "3", *SNAPSHOTS)
    finished = hosts.start(command, *options, P3_RENDEZVOUS_TIMEOUT_S="12").wait(100)
    assert finished.code == 137, finished
    assert "not restarting the job: slots on the hosts that answer: 1; --min-workers: 2" in finished.err


def test_a_host_that_hangs_is_given_up_and_nothing_is_left_of_asking_it(tmp_path):
    (tmp_path / "ssh").write_text("echo $$ >> %s/started; exec sleep 600" % tmp_path)
    settings = Settings(ssh="sh %s" % (tmp_path / "ssh"), timeout_s=5.0, rendezvous_timeout_s=0.5)
    found = elastic.find(settings, lambda: [ALPHA, BETA], Bounds(1, 5, 5), None, Cooling(1))
    assert found == ([], 0, {"alpha": "no answer in 5 s", "beta": "no answer in 5 s"})
    started = [int(line) for line in (tmp_path / "started").read_text().split()]
    assert len(started) == 2 and not any(os.path.exists("/proc/%d" % process) for process in started)


def test_what_cannot_be_asked_for_is_refused(run_job):
    for options, text in (
        (("--min-workers", "3", "--restarts", "1"), "--min-workers 3, -n 2, --max-workers 2: need --min"),
        (("--max-workers", "1", "--restarts", "1"), "--min-workers 2, -n 2, --max-workers 1: need --min"),
        (("--min-workers", "1"), "add --restarts K"),
        (("--min-workers", "1", "--on-worker-loss", "continue"), "add --restarts K"),
        (("--max-workers", "3"), "add --restarts K, or --on-worker-loss continue"),
        (("--max-workers", "1", "--on-worker-loss", "continue"), "--max-workers 1: need --min"),
    ):
        finished = run_job("", 2, 1, options=options)
        assert finished.code == 1 and text in finished.err, finished
