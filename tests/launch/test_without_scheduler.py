"""The scheduler is killed while a job runs: training goes on, another scheduler takes its place, and all bits are those
of a job that nobody disturbed."""

import os
import random
import re
import signal
import sys
import time

import pytest
from launched_jobs import kill_scheduler, node_of, scheduler_of, workers
from plugin_jobs import SCRIPTS
from processes import Process, clean_environment, wait_until, write_script

STEPS = 40
JOB = [sys.executable, str(SCRIPTS / "without_scheduler.py"), str(STEPS)]


def p3_run(folder, processes, *options, command=JOB, **env):
    argv = [sys.executable, "-m", "p3", "run", "-n", "2", "-s", "2", *options, *command]
    processes.append(Process(argv, clean_environment(**env), folder))
    return processes[-1]


def until_step(run, step):
    while True:
        line = run.read_line()
        assert line, run.wait(10)
        if line.endswith("step %d" % step):
            return


def digests(ended):
    assert ended.code == 0, ended
    found = re.findall(r"worker (\d): ([0-9a-f]{64})", ended.out)
    assert sorted(rank for rank, _ in found) == ["0", "1"], ended
    assert len({digest for _, digest in found}) == 1
    return found[0][1]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    processes = []
    try:
        return digests(p3_run(tmp_path_factory.mktemp("job"), processes).wait(120))
    finally:
        for process in processes:
            process.end()


@pytest.mark.parametrize("env", [{}, {"P3_TLS": "1"}], ids=["plain", "tls"])
def test_a_job_outlives_its_scheduler_again_and_again(undisturbed, tmp_path, processes, env):
    run = p3_run(tmp_path, processes, **env)
    rng = random.Random(1)
    for step in (2, 9, 17, 24, 31):
        until_step(run, step)
        time.sleep(rng.uniform(0, 0.05))  # wherever that is between two messages
        kill_scheduler(run)
    ended = run.wait(120)
    assert digests(ended) == undisturbed
    assert ended.err.count("the scheduler ended with signal SIGKILL; starting another one, while the job goes on") == 5
    assert ended.out.count("all nodes have come back") <= 5 and "nobody misses" not in ended.out, ended


def test_a_scheduler_that_dies_before_the_job_runs_ends_it(tmp_path, processes):
    waits = [sys.executable, "-c", "import time; time.sleep(600)"]
    run = p3_run(tmp_path, processes, command=waits)
    wait_until(lambda: scheduler_of(run) is not None, "the scheduler")
    os.kill(scheduler_of(run), signal.SIGKILL)
    ended = run.wait(60)
    assert ended.code == 128 + signal.SIGKILL
    assert "starting another one" not in ended.err


def test_who_dies_while_there_is_no_scheduler_is_missed_by_the_next_one(tmp_path, processes):
    run = p3_run(tmp_path, processes, command=[*JOB, "0.05"], P3_TIMEOUT_S="3")
    until_step(run, 2)
    victim = node_of(run.popen.pid, "worker")
    os.kill(scheduler_of(run), signal.SIGKILL)
    os.kill(victim, signal.SIGKILL)
    ended = run.wait(60)
    assert ended.code == 128 + signal.SIGKILL, ended
    assert re.search(r"p3 run: worker \d ended with signal SIGKILL", ended.err), ended


def test_an_exception_that_the_scheduler_has_not_read_ends_the_job_all_the_same(tmp_path, processes):
    script = """
        import os, time
        import p3
        with p3.Session.open() as session:
            print("runs", flush=True)
            while session.rank == 0 or not os.path.exists("now"):
                time.sleep(0.01)
            print("raises", flush=True)
            raise ValueError("as it was told to")
    """
    script = [sys.executable, write_script(tmp_path, script)]
    run = p3_run(tmp_path, processes, "--on-worker-loss", "continue", command=script, P3_TIMEOUT_S="5")
    run.read_until("runs", times=2)
    os.kill(scheduler_of(run), signal.SIGSTOP)
    (tmp_path / "now").touch()
    run.read_until("raises")
    os.kill(scheduler_of(run), signal.SIGKILL)
    ended = run.wait(60)
    assert ended.code == 1 and "ValueError: as it was told to" in ended.err, ended


def test_who_watches_goes_on_with_the_next_scheduler(tmp_path, processes):
    run = p3_run(tmp_path, processes, command=[*JOB, "0.1"])
    until_step(run, 2)
    argv = [sys.executable, "-m", "p3", "top", "--every", "0.5", "--pid", str(run.popen.pid)]
    top = Process(argv, clean_environment(), tmp_path)
    processes.append(top)
    assert "worker" in "".join(top.read_line() for _ in range(4))
    kill_scheduler(run)
    assert run.wait(60).code == 0
    ended = top.wait(20)
    assert (ended.code, ended.err) == (0, "p3 top: the job has ended\n"), ended


def test_a_latecomer_is_refused_by_the_next_scheduler_too(tmp_path, processes):
    run = p3_run(tmp_path, processes, command=[*JOB, "0.1"])
    until_step(run, 2)
    kill_scheduler(run)
    until_step(run, 6)  # which needs it
    with open("/proc/%d/environ" % node_of(run.popen.pid, "worker"), "rb") as file:
        env = dict(entry.decode().partition("=")[::2] for entry in file.read().split(b"\0") if entry)
    late = Process([sys.executable, "-c", "import p3; p3.Session.open()"], env, tmp_path)
    processes.append(late)
    refused = late.wait(30)
    assert refused.code == 1 and "is one too many" in refused.err
    assert run.wait(60).code == 0


@pytest.mark.parametrize("also", [[], ["server"]], ids=["", "and no server"])
def test_a_snapshot_that_is_asked_for_while_there_is_no_scheduler_is_taken(tmp_path, processes, also):
    """Nor a server, which the next scheduler hears from the workers before it gives that up itself."""
    snapshots = tmp_path / "snapshots"
    script = [sys.executable, str(SCRIPTS / "launched.py"), str(tmp_path), "0"]
    options = ["--snapshot-dir", str(snapshots), "--snapshot-every", "100000000", "--on-server-loss", "continue"]
    run = p3_run(tmp_path, processes, *options, command=script)
    workers(tmp_path, 2, run)
    wait_until(lambda: scheduler_of(run) is not None, "the scheduler")
    lost = [scheduler_of(run), *(node_of(run.popen.pid, role) for role in also)]
    for process in lost:
        os.kill(process, signal.SIGKILL)
    run.signal(signal.SIGUSR1)
    wait_until(lambda: list(snapshots.glob("round-*[0-9]/manifest.json")), "a snapshot", 30)
    run.signal(signal.SIGINT)
    assert run.wait(30).code == 128 + signal.SIGINT
