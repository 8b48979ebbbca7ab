"""P3_ON_WORKER_LOSS=continue: workers die, and the others train on without them: each round has whole pushes, those of
all who live, and none of who is gone; all have the same bits."""

import os
import random
import re
import signal
import sys

import numpy as np
import pytest
from launched_jobs import kill_scheduler, node_of, scheduler_of
from plugin_jobs import SCRIPTS
from processes import Process, clean_environment, write_script

STEPS = 20


def p3_run(folder, processes, workers, servers, command, *options, **env):
    argv = [sys.executable, "-m", "p3", "run", "-n", str(workers), "-s", str(servers), "--on-worker-loss", "continue"]
    processes.append(Process([*argv, *options, *command], clean_environment(**env), folder))
    return processes[-1]


def departing(folder, processes, workers, servers, deaths=(), options=(), steps=STEPS, seed=1, **env):
    """A job of tests/jobs/departing.py. `deaths`: (rank, step, key) of each."""
    told = ",".join("%d:%d.%d" % death for death in deaths)
    command = [sys.executable, str(SCRIPTS / "departing.py"), str(steps), str(seed)]
    return p3_run(folder, processes, workers, servers, command, *options, P3S_DEATHS=told, P3S_OUT=str(folder), **env)


def digests(ended):
    """By rank."""
    assert ended.code == 0, ended
    return {int(rank): digest for rank, digest in re.findall(r"worker (\d): ([0-9a-f]{64})", ended.out)}


def require_right(ended, workers, deaths, steps=STEPS):
    """That every round has whom it must have."""
    dies = {rank: step for rank, step, _ in deaths}
    survivors = [rank for rank in range(workers) if rank not in dies]
    found = digests(ended)
    assert sorted(found) == survivors and len(set(found.values())) == 1, ended
    for step in range(steps):
        lines = set(re.findall(r"worker (?:%s) step %d: (.*)" % ("|".join(map(str, survivors)), step), ended.out))
        assert len(lines) == 1, (step, lines)
        for took_part in map(int, lines.pop().split()):
            for rank in range(workers):
                if dies.get(rank, steps) != step:
                    assert bool(took_part >> rank & 1) == (dies.get(rank, steps) > step), (step, rank, took_part)
    for step in range(4, steps, 5):
        members = " ".join(str(rank) for rank in range(workers) if dies.get(rank, steps) > step)
        known = re.findall(r"worker (\d) at %d knows (.*)" % step, ended.out)
        assert {told for rank, told in known if int(rank) in survivors} == {members}, (step, known)


def draw(seed):
    """(workers, servers, deaths): some die, at least one lives."""
    rng = random.Random(seed)
    workers = rng.randint(2, 5)
    ranks = rng.sample(range(workers), rng.randint(1, workers - 1))
    steps = rng.sample(range(1, STEPS), len(ranks)) if rng.random() < 0.7 else [rng.randint(1, STEPS - 1)] * len(ranks)
    return workers, rng.randint(1, 3), [(rank, step, rng.randint(0, 2)) for rank, step in zip(ranks, steps)]


@pytest.mark.parametrize("seed", range(6))
def test_rounds_have_whole_pushes_of_all_who_live_and_of_nobody_else(tmp_path, processes, seed):
    workers, servers, deaths = draw(seed)
    env = {"P3_TLS": "1"} if seed == 1 else {"P3_SERVER_THREADS": "2"} if seed == 2 else {}
    ended = departing(tmp_path, processes, workers, servers, deaths, **env).wait(100)
    require_right(ended, workers, deaths)
    assert ended.err.count("ended with signal SIGKILL") == ended.err.count("the job goes on without it") == len(deaths)


def test_weights_are_those_of_means_over_who_is_there(tmp_path, processes):
    """Who dies before it pushes anything in a step has no part in it, whenever the others hear of that."""
    deaths, workers = [(0, 6, 0), (2, 13, 0)], 4
    ended = departing(tmp_path, processes, workers, 2, deaths).wait(100)
    require_right(ended, workers, deaths)
    dies = {rank: step for rank, step, _ in deaths}
    weight, rows = np.zeros(120_000), np.zeros((40, 3))
    momenta = np.zeros_like(weight), np.zeros_like(rows)
    randoms = [np.random.RandomState(1000 + rank) for rank in range(workers)]
    for step in range(STEPS):
        gradient, of_rows, touched = np.zeros_like(weight), np.zeros_like(rows), set()
        here = [rank for rank in range(workers) if dies.get(rank, STEPS) > step]
        for rank in here:
            gradient += randoms[rank].uniform(-1, 1, weight.size).astype(np.float32)
            ids = np.unique(randoms[rank].randint(0, 40, 5))
            of_rows[ids] += randoms[rank].uniform(-1, 1, (len(ids), 3)).astype(np.float32)
            touched.update(ids)
        momenta[0][:] = 0.9 * momenta[0] - 0.1 * gradient / len(here)
        weight += momenta[0]
        touched = sorted(touched)
        momenta[1][touched] = 0.9 * momenta[1][touched] - 0.1 * of_rows[touched] / len(here)
        rows[touched] += momenta[1][touched]
    with np.load(tmp_path / "1.npz") as survivor:
        np.testing.assert_allclose(survivor["weight"], weight, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(survivor["rows"], rows, rtol=1e-4, atol=1e-5)


def test_snapshots_go_on_without_who_is_gone_and_a_job_resumes_from_them(tmp_path, processes):
    options = ["--snapshot-dir", str(tmp_path / "snapshots"), "--snapshot-every", "3"]
    deaths = [(0, 7, 0), (2, 7, 1)]
    ended = departing(tmp_path, processes, 4, 2, deaths, options).wait(100)
    require_right(ended, 4, deaths)
    newest = sorted((tmp_path / "snapshots").glob("round-*[0-9]"))[-1]
    assert int(newest.name.partition("-")[2]) == 18
    assert sorted(path.stem for path in newest.glob("worker-*")) == ["worker-1", "worker-3"]
    again = departing(tmp_path, processes, 3, 2, (), options, steps=25).wait(100)
    assert len(set(digests(again).values())) == 1 and len(digests(again)) == 3
    assert "step 17:" not in again.out and "worker 2 step 18: 7\n" in again.out


def test_a_worker_that_freezes_departs_and_is_ended(tmp_path, processes):
    script = """
        import os, signal
        import numpy as np, p3
        with p3.Session.open() as session:
            key, total = session.declare("w", (10,), "float32"), np.zeros(10, np.float32)
            session.init(key, total.copy() if session.is_first else None, total).wait(30)
            for step in range(4):
                if (session.rank, step) == (1, 2):
                    os.kill(os.getpid(), signal.SIGSTOP)
                session.pushpull(key, np.ones(10, np.float32), total).wait(30)
            print("worker %d has %g" % (session.rank, total[0]))
    """
    script = [sys.executable, write_script(tmp_path, script)]
    ended = p3_run(tmp_path, processes, 3, 1, script, P3_TIMEOUT_S="2").wait(60)
    assert ended.code == 0, ended
    assert sorted(re.findall("worker . has .*", ended.out)) == ["worker 0 has 2", "worker 2 has 2"]
    assert "worker 1 ended with signal SIGKILL" in ended.err and "sent no heartbeat" in ended.out


def test_who_is_first_now_gives_a_value_at_once(tmp_path, processes):
    """All workers but the last are first, and die; the next one gives a value as soon as it knows that it is first."""
    script = """
        import os, signal, time
        import numpy as np, p3
        with p3.Session.open() as session:
            key, value = session.declare("w", (10_000,), "float32"), np.zeros(10_000, np.float32)
            for first in range(session.num_workers):
                deadline = time.monotonic() + 30
                while session.first != first and time.monotonic() < deadline:
                    time.sleep(0.0005)
                given = np.full(10_000, first, np.float32) if session.is_first else None
                session.init(key, given, value).wait(30)
                assert (value == first).all(), (value, first)
                session.barrier()
                if session.is_first and first < session.num_workers - 1:
                    os.kill(os.getpid(), signal.SIGKILL)
            print("worker %d has %g" % (session.rank, value[0]))
    """
    script = [sys.executable, write_script(tmp_path, script)]
    ended = p3_run(tmp_path, processes, 7, 3, script, P3_SLICE_ELEMENTS="1000").wait(100)
    assert ended.code == 0 and "worker 6 has 6" in ended.out, ended


def test_no_rows_are_cut_anew_as_what_moves_would_be_lost_with_a_worker(tmp_path, processes):
    script = """
        import p3
        with p3.Session.open() as session:
            print("searches" if session.searches_partitions else "leaves them")
    """
    ended = p3_run(tmp_path, processes, 2, 1, [sys.executable, write_script(tmp_path, script)]).wait(60)
    assert ended.code == 0 and ended.out.count("leaves them") == 2, ended


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_dies_or_freezes_ends_the_job_by_its_name(tmp_path, processes, number):
    run = departing(tmp_path, processes, 3, 2, steps=100_000, P3_TIMEOUT_S="2")
    while "step 3:" not in run.read_line():
        pass
    os.kill(node_of(run.popen.pid, "server"), number)
    ended = run.wait(60)
    if number == signal.SIGKILL:
        assert ended.code == 128 + signal.SIGKILL, ended
        assert re.search(r"p3 run: server \d ended with signal SIGKILL", ended.err), ended
        assert "goes on without" not in ended.err
    else:
        assert ended.code != 0 and re.search(r"the job failed: .*server \d", ended.err), ended


def test_an_exception_of_a_worker_ends_the_job_as_it_would_recur(tmp_path, processes):
    script = """
        import p3
        with p3.Session.open() as session:
            if session.rank == 1:
                raise ValueError("no such file")
            session.barrier()
    """
    ended = p3_run(tmp_path, processes, 2, 1, [sys.executable, write_script(tmp_path, script)]).wait(60)
    assert ended.code == 1 and "ValueError: no such file" in ended.err, ended


def test_if_no_worker_is_left_the_job_has_failed(tmp_path, processes):
    ended = departing(tmp_path, processes, 2, 1, [(0, 3, 0), (1, 6, 0)]).wait(60)
    assert ended.code == 128 + signal.SIGKILL, ended
    assert "The job cannot go on without it: no other worker is left" in ended.err


def test_the_next_scheduler_knows_who_has_departed(tmp_path, processes):
    run = departing(tmp_path, processes, 3, 2, [(1, 5, 0)], steps=400)
    said = ""
    while "worker 0 step 9:" not in said:
        line = run.read_line()
        assert line, run.wait(10)
        said += line + "\n"
    argv = [sys.executable, "-m", "p3", "top", "--once", "--pid", str(run.popen.pid)]
    processes.append(Process(argv, clean_environment(), tmp_path))
    assert "1 (lost)" in processes[-1].wait(30).out
    kill_scheduler(run)
    ended = run.wait(100)
    require_right(ended._replace(out=said + ended.out), 3, [(1, 5, 0)], steps=400)
    assert "all nodes have come back" in said + ended.out


def test_a_snapshot_can_be_asked_for_behind_the_loss_of_scheduler_and_worker_at_once(tmp_path, processes):
    options = ["--snapshot-dir", str(tmp_path / "snapshots"), "--snapshot-every", "1000000"]
    run = departing(tmp_path, processes, 3, 1, options=options, steps=1_000_000, P3_TIMEOUT_S="3")
    while "step 3:" not in run.read_line():
        pass
    worker = node_of(run.popen.pid, "worker")
    os.kill(scheduler_of(run), signal.SIGKILL)
    os.kill(worker, signal.SIGKILL)
    while "has departed" not in run.read_line():
        pass
    run.signal(signal.SIGTERM)
    ended = run.wait(50)
    assert ended.code == 128 + signal.SIGTERM and "its last snapshot is of round" in ended.err, ended
