"""Snapshots of running jobs, and jobs that resume from them: to the bit, whatever was killed, with other servers."""

import contextlib
import os
import random
import re
import signal
import sys
import threading
import time

import numpy as np
import forked
import plugin_jobs as jobs
import pytest
from launched_jobs import children_with
from processes import PYTHONPATH, ROOT, Process, clean_environment

from p3.cluster import messages
from p3.cluster.agreement import Agreement
from p3.cluster.node import Node
from p3.errors import ProtocolError
from p3.settings import Settings
from p3.snapshots import files, reading
from p3.worker.session import Session

WORKERS = [Node("worker", rank, "w%d" % rank) for rank in range(2)]
SERVERS = [Node("server", rank, "s%d" % rank) for rank in range(2)]
SHA256 = "0f" * 32


# What the scheduler makes of it


class Book:
    def __init__(self):
        self.agreement = Agreement(WORKERS, SERVERS, 4)

    def say(self, node, kind, **fields):
        """[(receiver, its message)]"""
        return self.agreement.receive(node, messages.check(dict(fields, kind=kind)))

    def written(self, node, round):
        return self.say(node, "snapshot_written", round=round, bytes=node.rank, sha256=SHA256)


def test_a_snapshot_is_complete_when_every_part_is_written_in_whatever_order():
    book = Book()
    assert book.written(WORKERS[1], 5) == []  # it may be ahead of worker 0
    asked = book.say(WORKERS[0], "captured", round=5, changes=0)
    assert asked == [(server, {"kind": "write_snapshot", "round": 5}) for server in SERVERS]
    assert book.written(SERVERS[1], 5) == book.written(SERVERS[0], 5) == []
    ((receiver, complete),) = book.written(WORKERS[0], 5)
    assert receiver == WORKERS[0] and messages.check(complete)["round"] == 5
    assert [(part["role"], part["rank"]) for part in complete["parts"]] == [
        ("server", 0), ("server", 1), ("worker", 0), ("worker", 1),
    ]  # fmt: skip


def test_the_next_snapshot_takes_the_place_of_one_that_is_never_complete():
    book = Book()
    book.say(WORKERS[0], "captured", round=5, changes=0)
    book.written(SERVERS[0], 5)
    book.say(WORKERS[0], "captured", round=6, changes=0)
    assert book.written(SERVERS[1], 5) == []  # too late, and no harm
    for node in (*SERVERS, WORKERS[0]):
        assert book.written(node, 6) == []
    assert len(book.written(WORKERS[1], 6)) == 1


def failed(round, text=""):
    return [(worker, {"kind": "snapshot_failed", "round": round, "text": text}) for worker in WORKERS]


GIVEN_UP = failed(5)


def test_a_snapshot_is_given_up_when_a_worker_has_joined_without_its_part():
    book = Book()
    book.say(WORKERS[0], "captured", round=5, changes=0)
    assert book.say(WORKERS[1], "joined", worker=1, round=0)[2:] == GIVEN_UP
    assert book.written(SERVERS[0], 5) == []  # too late, and no harm
    book.say(WORKERS[0], "joined", worker=0, round=0)  # so join() returns, and steps go on
    book.say(WORKERS[0], "captured", round=6, changes=0)
    assert [bool(book.written(node, 6)) for node in (*SERVERS, *WORKERS)] == [False, False, False, True]


def test_a_snapshot_of_which_a_part_cannot_be_written_is_given_up_and_all_hear_the_first_reason():
    book = Book()
    book.say(WORKERS[0], "captured", round=5, changes=0)
    assert book.say(SERVERS[0], "snapshot_failed", round=5, text="full") == failed(5, "full")
    assert book.say(WORKERS[0], "snapshot_failed", round=5, text="full here, too") == book.written(SERVERS[1], 5) == []
    assert book.say(WORKERS[1], "snapshot_failed", round=6, text="early") == []  # it may be ahead of worker 0
    assert book.say(WORKERS[0], "captured", round=6, changes=0)[2:] == failed(6, "early")
    assert book.say(WORKERS[0], "snapshot_failed", round=7, text="no copies") == failed(7, "no copies")
    assert book.say(WORKERS[1], "snapshot_failed", round=8, text="early") == []
    assert book.say(WORKERS[0], "snapshot_failed", round=8, text="no copies") == failed(8, "no copies")
    book.say(WORKERS[0], "captured", round=9, changes=0)
    assert [bool(book.written(node, 9)) for node in (*SERVERS, *WORKERS)] == [False, False, False, True]
    assert book.say(WORKERS[0], "snapshot_failed", round=9, text="no room for the manifest") == failed(
        9, "no room for the manifest"
    )


def test_all_workers_hear_that_worker_0_has_completed_a_snapshot():
    book = Book()
    book.say(WORKERS[0], "captured", round=5, changes=0)
    for node in (*SERVERS, *WORKERS):
        book.written(node, 5)
    taken = {"kind": "snapshot_taken", "round": 5}
    assert book.say(WORKERS[0], "snapshot_taken", round=5) == [(worker, taken) for worker in WORKERS]


def test_every_node_checks_a_snapshot_and_worker_0_hears_what_was_wrong_first():
    book = Book()
    asked = book.say(WORKERS[0], "check_snapshot", round=5)
    assert asked == [(node, {"kind": "check_snapshot", "round": 5}) for node in WORKERS + SERVERS]
    for node, problem in ((SERVERS[1], ""), (WORKERS[1], "cut short"), (SERVERS[0], "altered")):
        assert book.say(node, "snapshot_checked", round=5, problem=problem) == []
    verdict = {"kind": "snapshot_checked", "round": 5, "problem": "cut short"}
    assert book.say(WORKERS[0], "snapshot_checked", round=5, problem="") == [(WORKERS[0], verdict)]
    book.say(WORKERS[0], "check_snapshot", round=4)
    for node in (*SERVERS, WORKERS[0]):
        assert book.say(node, "snapshot_checked", round=4, problem="") == []
    assert book.say(WORKERS[1], "bye") == [(WORKERS[0], dict(verdict, round=4, problem=""))]


def test_worker_0_hears_that_bytes_move_anywhere_and_the_others_hear_it_from_worker_0():
    book, progress = Book(), {"kind": "progress"}
    assert book.say(SERVERS[1], "progress") == book.say(WORKERS[1], "progress") == [(WORKERS[0], progress)]
    assert book.say(WORKERS[0], "progress") == [(WORKERS[1], progress)]


def test_a_worker_that_leaves_or_joins_behind_its_part_does_not_spoil_the_snapshot():
    book = Book()
    assert book.written(WORKERS[1], 5) == book.say(WORKERS[1], "bye") == []
    assert len(book.say(WORKERS[0], "captured", round=5, changes=0)) == 2
    book.written(SERVERS[0], 5), book.written(SERVERS[1], 5)
    assert len(book.written(WORKERS[0], 5)[0][1]["parts"]) == 4


def test_a_worker_that_has_left_makes_later_snapshots_impossible():
    book = Book()
    book.say(WORKERS[1], "bye")
    assert book.say(WORKERS[0], "captured", round=5, changes=0)[2:] == GIVEN_UP


@pytest.mark.parametrize(
    "wrong",
    [
        lambda book: book.say(WORKERS[1], "captured", round=6, changes=0),
        lambda book: book.say(SERVERS[0], "snapshot_failed", round=6, text=""),
        lambda book: book.say(WORKERS[1], "snapshot_taken", round=5),
        lambda book: book.say(WORKERS[0], "snapshot_taken", round=5),
        lambda book: book.say(WORKERS[1], "check_snapshot", round=5),
        lambda book: [book.say(WORKERS[0], "check_snapshot", round=round) for round in (5, 4)],
        lambda book: book.say(WORKERS[1], "snapshot_checked", round=5, problem=""),
        lambda book: book.say(WORKERS[0], "captured", round=5, changes=0),
        lambda book: book.say(SERVERS[0], "captured", round=6, changes=0),
        lambda book: book.written(SERVERS[0], 6),
        lambda book: [book.written(WORKERS[1], 5) for _ in range(2)],
        lambda book: [book.written(WORKERS[1], round) for round in range(6, 20)],
        lambda book: book.say(WORKERS[1], "resume", round=5),
        lambda book: book.say(WORKERS[1], "joined", worker=0, round=0),
    ],
)
def test_who_may_not_say_it_fails_the_job(wrong):
    book = Book()
    book.say(WORKERS[0], "captured", round=5, changes=0)
    with pytest.raises(ProtocolError):
        wrong(book)


# One process, without MXNet


@pytest.fixture
def open_session(tmp_path):
    """open_session(every=1) -> an embedded session that takes snapshots in tmp_path."""
    opened = []

    def make(every=1):
        opened.append(Session.open(Settings(snapshot_dir=str(tmp_path), snapshot_every=every, wait_timeout_s=30)))
        return opened[-1]

    yield make
    for session in opened:
        session.close()


def step(session, key, round, state=None):
    landing = np.empty(key.shape, "float32")
    session.pushpull(key, np.full(key.shape, round, "float32"), landing).wait(30)
    session.snapshot(round, [key], state)
    return landing


def test_only_every_nth_round_is_taken_and_the_newest_are_kept(open_session, tmp_path):
    session = open_session(every=3)
    key = session.declare("w", (5,), "float32")
    session.init(key, np.zeros(5, "float32"), np.empty(5, "float32")).wait(30)
    for round in range(1, 11):
        step(session, key, round)
    session.close()
    assert files.rounds(str(tmp_path)) == [9, 6]
    np.testing.assert_array_equal(reading.newest_valid(str(tmp_path)).array(0, "w"), np.full(5, 9, "float32"))


def test_without_a_directory_nothing_is_taken_and_nothing_resumed():
    with Session.open(Settings(snapshot_every=1)) as session:
        assert session.resume() == (0, {})
        session.snapshot(1, [], "anything")


def test_rounds_must_ascend_and_a_state_must_be_storable(open_session):
    session = open_session()
    session.snapshot(4, [])
    for round in (4, 3, 4.5, True, None, -1):
        with pytest.raises(ValueError, match="round"):
            session.snapshot(round, [])
    with pytest.raises(ValueError, match=r"state\['f'\]"):
        session.snapshot(5, [], {"f": open_session})


def test_a_job_that_has_not_resumed_does_not_touch_another_ones_snapshots(open_session, tmp_path):
    session = open_session()
    session.snapshot(5, [])
    session.close()
    again = open_session()
    with pytest.raises(ValueError, match="round 5.*Call resume"):
        again.snapshot(2, [])
    assert files.rounds(str(tmp_path)) == [5]


def test_a_job_whose_snapshots_are_all_refused_begins_anew_among_them(open_session, tmp_path, caplog):
    session = open_session()
    for round in (4, 5):
        session.snapshot(round, [])
        session.snapshots.finish()
    session.close()
    for folder in tmp_path.iterdir():
        (folder / files.MANIFEST).write_text("altered")
    again = open_session()
    assert again.resume() == (0, {})
    assert "has 2 snapshots, and each is refused: the job begins at step 0" in caplog.text
    again.snapshot(2, [], "of round 2")
    again.close()
    once_more = open_session()
    assert once_more.resume() == (2, "of round 2")
    once_more.snapshot(5, [], "of round 5")
    once_more.close()
    assert open_session().resume() == (5, "of round 5")


def test_a_job_that_found_no_snapshot_does_not_touch_those_of_another_that_runs_there(open_session, tmp_path):
    session, other = open_session(), open_session()
    assert session.resume() == other.resume() == (0, {})
    other.snapshot(5, [])
    other.close()
    with pytest.raises(ValueError, match="round 5.*a directory of its own"):
        session.snapshot(2, [])
    assert files.rounds(str(tmp_path)) == [5]


def test_a_snapshot_has_the_count_of_changed_servers_of_its_own_time(open_session, monkeypatch):
    session = open_session()
    snapshots, may_copy, told = session.snapshots, threading.Event(), []
    wait, finish, send = session.wait, snapshots.finish, snapshots._send

    def wait_later(operations):
        if threading.current_thread().name == "p3-snapshot":
            assert may_copy.wait(30)
        wait(operations)

    monkeypatch.setattr(session, "wait", wait_later)
    monkeypatch.setattr(snapshots, "finish", lambda: (snapshots._writer and may_copy.set(), finish()))
    monkeypatch.setattr(snapshots, "_send", lambda message: (told.append(dict(message)), send(message)))
    key = session.declare("w", (5,), "float32")
    session.init(key, np.zeros(5, "float32"), np.empty(5, "float32")).wait(30)
    step(session, key, 1)
    session._link.server_changes = 1  # while the first one's copies are made
    step(session, key, 2)
    snapshots.finish()
    assert [one["changes"] for one in told if one["kind"] == "captured"] == [0, 1]


def test_resume_comes_before_the_first_key(open_session):
    session = open_session()
    session.declare("w", (5,), "float32")
    with pytest.raises(ValueError, match="before the first key"):
        session.resume()


def test_another_model_is_refused(open_session):
    session = open_session()
    key = session.declare("w", (5,), "float32")
    session.init(key, np.zeros(5, "float32"), np.empty(5, "float32")).wait(30)
    step(session, key, 1, {"a": 1})
    session.close()
    again = open_session()
    assert again.resume() == (1, {"a": 1})
    with pytest.raises(ValueError, match=r"shape \(6,\).*in the snapshot of round 1 shape \(5,\)"):
        again.resumed_value(again.declare("w", (6,), "float32"))
    assert again.resumed_value(again.declare("v", (6,), "float32")) is None


def test_a_snapshot_that_cannot_be_written_is_counted_and_the_next_one_is_taken(open_session, tmp_path, caplog):
    (tmp_path / ("round-%012d.part" % 1)).write_text("in the way")
    session = open_session()
    for round in (1, 2):
        session.snapshot(round, [])
        session.snapshots.finish()
    session.close()
    assert (session.snapshots.counts, files.rounds(str(tmp_path))) == ({"taken": 1, "failed": 1}, [2])
    (text,) = [record.getMessage() for record in caplog.records if "The job goes on" in record.getMessage()]
    assert re.search(r"no snapshot of round 1: \w+ 0 \(this process\): writing to .*round-000000000001.part/\w+-0"
                     r".safetensors failed: File exists \(errno 17\)", text)  # fmt: skip


def test_a_path_that_can_be_no_directory_is_refused_before_training(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with Session.open(Settings(snapshot_dir=str(tmp_path / "file" / "snapshots"), snapshot_every=1)) as session:
        with pytest.raises(ValueError, match="P3_SNAPSHOT_DIR=.*file/snapshots cannot be used: Not a directory"):
            session.resume()


# Jobs


def counted(finished):
    """{(round it began at, values)} of the workers' last lines."""
    return re.findall(r"from (\d+): (\w+), rank (\w+)", finished.out)


def start(processes, tmp_path, workers, servers, script, *arguments, options=(), **env):
    command = [sys.executable, "-m", "p3", "run", "-n", str(workers), "-s", str(servers), *options]
    command += forked.command(str(script), *map(str, arguments))
    env = dict({"OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHONPATH}, **env)
    processes.append(Process(command, clean_environment(**env), tmp_path))
    return processes[-1]


def snapshots_in(directory, every):
    return "--snapshot-dir", str(directory), "--snapshot-every", str(every)


COUNTING = jobs.SCRIPTS / "counting.py"


def test_a_job_that_fails_twice_ends_with_the_bits_of_an_undisturbed_one(processes, tmp_path):
    undisturbed = start(processes, tmp_path, 2, 2, COUNTING, 9)
    options = ("--restarts", "2", *snapshots_in("snapshots", 2))
    restarted = start(processes, tmp_path, 2, 2, COUNTING, 9, 4, 6, options=options).wait()
    undisturbed = undisturbed.wait()
    assert (undisturbed.code, restarted.code) == (0, 0), restarted
    assert "restart 1 of 2" in restarted.err and "restart 2 of 2" in restarted.err
    assert "failed with exit code 3" in restarted.err
    ((_, values, _), other) = counted(undisturbed)
    assert sorted(counted(restarted)) == [("6", values, "0"), ("6", values, "1")]
    assert other[1] == values

    # Another number of servers and of partitions, from a snapshot that is not the newest, as that is damaged.
    newest = tmp_path / "snapshots" / ("round-%012d" % 8)
    (newest / "server-1.safetensors").write_bytes(b"")
    env = {"P3_PARTITIONS": "5", "P3_LOCAL_AGGREGATION": "0"}
    resumed = start(processes, tmp_path, 2, 3, COUNTING, 9, options=snapshots_in("snapshots", 2), **env).wait()
    assert sorted(counted(resumed)) == [("6", values, "0"), ("6", values, "1")], resumed
    assert "server-1 has 0 bytes" in resumed.out + resumed.err


def test_a_job_is_restarted_only_so_often_and_ends_with_the_last_code(run_job):
    script = """
        import sys
        from p3.worker.session import Session
        Session.open()
        sys.exit(5)
    """
    finished = run_job(script, 1, 1, options=("--restarts", "2"))
    assert finished.code == 5
    assert finished.err.count("restarting it") == 2


@pytest.mark.parametrize(
    "script", ["import nowhere", "from p3.worker.session import Session; Session.open().new_store()"]
)
def test_what_never_ran_and_what_succeeds_is_not_restarted(run_job, script):
    finished = run_job(script, 1, 1, options=("--restarts", "2"))
    assert finished.code == ("nowhere" in script)
    assert "restarting it" not in finished.err


def test_an_interrupted_job_is_not_restarted(start_job):
    script = """
        import time
        from p3.worker.session import Session
        Session.open()
        print("running", flush=True)
        time.sleep(60)
    """
    process = start_job(script, 1, 1, options=("--restarts", "2"))
    assert process.read_line().endswith("running")
    process.signal(signal.SIGINT)
    finished = process.wait()
    assert finished.code == 130 and "restarting it" not in finished.err


def test_a_time_out_is_for_all_starts_together(run_job):
    script = """
        import sys, time
        from p3.worker.session import Session
        session = Session.open()
        time.sleep(600)
    """
    finished = run_job(script, 1, 1, options=("--restarts", "2", "--timeout", "3"))
    assert finished.code == 124 and "restarting it" not in finished.err


# Real trainings, with MXNet


def test_who_joins_early_holds_up_no_snapshots_and_who_joins_behind_a_step_takes_part_in_its_own(run_job, tmp_path):
    pytest.importorskip("mxnet")
    script = """
        import p3, mxnet as mx
        kv = mx.kv.create("p3_sync")
        value = mx.nd.ones(3)
        kv.init("w", value)
        for step in range(6 if kv.rank == 0 else 3):
            kv.pushpull("w", mx.nd.ones(3), out=value)
            kv.snapshot(step + 1)
        kv.join(update=lambda store: None)
        for step in range(6, 8):
            kv.pushpull("w", mx.nd.ones(3), out=value)
            if (kv.rank, step) == (0, 7):  # which comes to the end of its step when worker 1 is in join() already
                kv.store.session.wait_until(lambda: kv.store.session.joins._joined[1] == 2, "for worker 1")
            kv.snapshot(step + 1)
        kv.join(update=lambda store: None)
        print("sum", value.asnumpy())
    """
    env = {"PYTHONPATH": PYTHONPATH, "P3_WAIT_TIMEOUT_S": "30"}
    finished = run_job(script, 2, 1, env=env, options=snapshots_in(tmp_path, 1))
    assert finished.code == 0, finished
    assert reading.newest_valid(str(tmp_path)).round == 8  # of the step behind which all joined
    assert finished.out.count("sum [2. 2. 2.]") == 2
    assert "given up" not in finished.out + finished.err  # by time


KINDS = (
    "momentum adam nadam scheduler 2bit 1bit int8 down both_ways both_ways_on_trainer dgc updates_on_trainer "
    "updates_on_store lbsgd lbsgd_on_trainer float16 sparse two_stores forgotten"
)


def test_every_kind_of_training_resumes_to_the_bit(tmp_path):
    pytest.importorskip("mxnet")
    status, output = jobs.run(jobs.python("resumed_runs.py", tmp_path, *KINDS.split()))
    assert status == 0, output
    for kind in KINDS.split():
        assert "%s same\n" % kind in output, output


def kill_when(process, directory, round, role, rank, deadline_s=60):
    """SIGKILLs a process of the job when the snapshot of that round has been begun; or once it is there, after that. A
    job that has ended meanwhile is left alone."""
    deadline = time.monotonic() + deadline_s
    rounds = lambda: [int(re.sub(r"\D", "", name)) for name in os.listdir(directory) if "round-" in name]  # noqa: E731
    found = []
    while max(rounds(), default=-1) < round or len(found) <= rank:
        if process.popen.poll() is not None:
            return
        assert time.monotonic() < deadline, process.wait(1)
        time.sleep(0.005)
        found = sorted(children_with(process.popen.pid, DMLC_ROLE=role))
    with contextlib.suppress(ProcessLookupError):
        os.kill(found[rank], signal.SIGKILL)


@pytest.mark.timeout(400)
def test_the_example_survives_the_death_of_a_worker_and_of_a_server(processes, tmp_path):
    for module in ("mxnet", "sklearn", "tqdm"):
        pytest.importorskip(module)
    seed = random.randrange(1 << 30)
    print("seed", seed)
    choice = random.Random(seed)
    steps, every = 60, 5
    example = ROOT / "examples" / "resume.py"
    undisturbed = start(processes, tmp_path, 2, 2, example, "--steps", steps).wait()
    for attempt in range(5):
        directory = tmp_path / ("snapshots%d" % attempt)
        directory.mkdir()
        options = ("--restarts", "2", *snapshots_in(directory, every))
        process = start(processes, tmp_path, 2, 2, example, "--steps", steps, options=options)
        first, second = sorted(choice.sample(range(2, steps // every - 1), 2))
        kill_when(process, str(directory), first * every, "worker", choice.randrange(2))
        while process.popen.poll() is None and children_with(process.popen.pid, DMLC_ROLE="scheduler"):
            time.sleep(0.005)  # until all of that start have ended
        kill_when(process, str(directory), second * every, "server", choice.randrange(2))
        finished = process.wait(100)
        assert (undisturbed.code, finished.code) == (0, 0), finished
        if finished.err.count("restarting it") == 2:
            break  # else it had ended before it was struck, as this process was slow
    assert finished.err.count("restarting it") == 2
    pattern = r"worker (\d): %d steps, weights and statistics (\w+)" % steps
    digests = sorted(re.findall(pattern, undisturbed.out))
    assert len(digests) == 2 and sorted(re.findall(pattern, finished.out)) == digests
