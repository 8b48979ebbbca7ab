"""The benchmark itself: it measures, and a store that fails, hangs or adds up wrongly is told and not measured."""

import json
import subprocess
import sys

import pytest
from lab_traces import needs_lab

from p3.measure.jobs.job import JobError
from p3.measure.lab import hosts
from p3.measure.micro.processes import pushpull_job as jobs
from p3.measure.micro.processes import pushpull_worker

SETUP = jobs.Setup(workers=2, servers=2, keys="3x1000", elements=3000, omp_threads=1, timeout_s=20)


@pytest.fixture
def job(tmp_path):
    with hosts.lab(2) as lab, jobs.PushPullJob("raw_tcp", lab, SETUP, port=9100, folder=tmp_path) as job:
        yield job


@needs_lab
def test_raw_tcp_is_measured_from_the_command_line(tmp_path):
    result = tmp_path / "result.json"
    subprocess.run(
        [sys.executable, "-m", "p3", "bench", "pushpull", "--stores", "raw_tcp", "--keys", "2x1000,1x70001",
         "--rounds", "2", "--repeats", "2", "--json", str(result)],
        check=True, timeout=60,
    )
    document = json.loads(result.read_text())
    assert document["failures"] == {}
    assert document["results"]["raw_tcp"]["timed_rounds"] == 4
    assert document["results"]["raw_tcp"]["goodput_gbit_s"] > 0


@needs_lab
def test_turn_counts_rounds_of_every_worker(job):
    job.start()
    turn = job.turn(rounds=3)
    assert [len(seconds) for seconds in turn.round_s] == [3, 3]
    assert turn.moved_bytes == 2 * 2 * 3 * 3000 * 4  # both ways, two workers, three rounds
    assert turn.switches.slept > 0  # each worker waits for each round at least
    assert turn.system_calls is None  # which only a core of P3's counts
    job.check_sums()
    job.leave()


@needs_lab
def test_system_calls_of_the_core_are_counted(tmp_path):
    pytest.importorskip("mxnet")
    with hosts.lab(2) as lab, jobs.PushPullJob("p3_sync", lab, SETUP, port=9100, folder=tmp_path) as job:
        job.start()
        turn = job.turn(rounds=2)
        assert turn.system_calls > 0
        job.leave()


@needs_lab
def test_wrong_values_are_told_with_worker_and_keys(job):
    job.command = lambda role, number: [sys.executable, "-c", LIAR] if role == "worker" else ["sleep", "1000"]
    job.start()
    with pytest.raises(JobError, match=r"raw_tcp: worker \d has wrong sums in 2 keys: 7, 8"):
        job.check_sums()


@needs_lab
def test_failed_process_is_told_with_its_log(job):
    job.command = lambda role, number: [sys.executable, "-c", "import sys; sys.exit('no such store')"]
    with pytest.raises(JobError, match=r"(?s)(server|worker) \d ended with status 1.*no such store"):
        job.start()


@needs_lab
def test_hanging_process_meets_the_deadline_and_is_killed(job, monkeypatch):
    monkeypatch.setattr(job, "start_timeout_s", 0.3)
    job.command = lambda role, number: ["sleep", "1000"]
    with pytest.raises(JobError, match="did not end in time"):
        job.start()
    processes = list(job._processes.values())
    job.kill()
    assert processes and all(process.poll() is not None for process in processes)


def test_sizes_are_parsed_or_refused():
    assert pushpull_worker.parse_sizes("2x10,3") == [10, 10, 3]
    for text in ("", "0", "2x", "ax3", "2x-1"):
        with pytest.raises(ValueError):
            pushpull_worker.parse_sizes(text)


# A worker that is ready at once and answers everything with wrong keys.
LIAR = """
import json, os, socket
control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
control.connect(os.environ["BENCH_CONTROL"])
control.send(b"{}")
while control.recv(4096):
    control.send(json.dumps({"wrong": [7, 8]}).encode())
"""
