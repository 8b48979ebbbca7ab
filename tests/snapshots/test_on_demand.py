"""Snapshots that a signal asks for: SIGUSR1, and the job goes on; SIGTERM, and it ends with its state saved."""

import os
import re
import signal
import sys
import threading
from types import SimpleNamespace

import plugin_jobs as jobs
import pytest
from processes import PYTHONPATH, Process, clean_environment

from p3.cluster import messages
from p3.cluster.agreement import Agreement
from p3.cluster.node import Node
from p3.errors import ProtocolError
from p3.snapshots import files
from p3.worker.snapshots.demand import Demand

WORKERS = [Node("worker", rank, "w%d" % rank) for rank in range(3)]
SERVERS = [Node("server", 0, "s0")]


# What the scheduler makes of it


class Book:
    def __init__(self):
        self.agreement = Agreement(WORKERS, SERVERS)

    def say(self, rank, kind, **fields):
        return self.told(self.agreement.receive(WORKERS[rank], messages.check(dict(fields, kind=kind))))

    def demand(self, ends=False):
        return self.told(self.agreement.demand_snapshot(ends))

    @staticmethod
    def told(sent):
        """What workers are told of demands: all the same."""
        about = [(node, messages.check(one)) for node, one in sent if one["kind"] in ("snapshot_wanted", "snapshot_at")]
        assert [node for node, _ in about] == WORKERS * (len(about) // 3), about
        return [tuple(one.values())[1:] for node, one in about if node == WORKERS[0]]

    def take(self, round):
        self.say(0, "captured", round=round, changes=0)
        for node in WORKERS + SERVERS:
            self.agreement.receive(node, {"kind": "snapshot_written", "round": round, "bytes": 1, "sha256": "0f" * 32})
        return self.say(0, "snapshot_taken", round=round)


def answers(book, number, *rounds):
    """What the last of these answers, of each rank, leads to; the others to nothing."""
    *others, last = [book.say(rank, "mark", number=number, round=round) for rank, round in enumerate(rounds)]
    assert others == [[], []]
    return last


def test_all_take_it_behind_the_step_after_the_furthest_that_any_has_ended():
    book = Book()
    assert book.demand() == [(1,)] and book.demand() == book.say(2, "demand_snapshot", ends=False) == []
    assert answers(book, 1, 56, 57, 56) == [(1, 58, False)]
    assert book.demand() == book.take(57) == book.demand() == []  # one that was due; the other one will do
    assert book.take(60) == []  # the next mark of all
    assert book.demand() == [(2,)]


def test_a_demand_to_end_is_heard_while_another_one_is_under_way_and_only_once():
    book = Book()
    book.demand()
    assert book.demand(ends=True) == []
    assert answers(book, 1, 4, 4, 4) == [(1, 5, True)]
    assert book.demand(ends=True) == book.demand() == []
    book = Book()
    book.demand()
    assert answers(book, 1, 4, 4, 4) == [(1, 5, False)]
    assert book.demand(ends=True) == [(2,)]
    assert answers(book, 2, 4, 5, 5) == [(2, 6, True)]


def test_a_demand_rests_while_a_worker_is_in_join():
    for is_decided in (False, True):
        book = Book()
        book.demand(ends=True)
        if is_decided:
            answers(book, 1, 4, 5, 5)
        assert book.say(1, "joined", worker=1, round=0) == [(1, 0, False)]
        assert book.demand() == book.say(0, "joined", worker=0, round=0) == []
        assert book.say(2, "joined", worker=2, round=0) == [(2,)]
        assert answers(book, 2, 5, 5, 5) == [(2, 6, True)]


def test_a_worker_may_be_heard_in_its_next_join_before_another_is_in_the_first():
    book = Book()
    for worker in (0, 0, 1):
        assert book.say(worker, "joined", worker=worker, round=0) == book.demand() == []
    assert book.say(2, "joined", worker=2, round=0) == []  # the first is over
    assert book.say(1, "joined", worker=1, round=0) == book.demand() == []
    assert book.say(2, "joined", worker=2, round=0) == [(1,)]


def test_nothing_waits_for_a_worker_that_has_left():
    book = Book()
    book.demand()
    book.say(0, "mark", number=1, round=5)
    assert book.say(1, "bye") == [(1, 0, False)]
    assert book.say(2, "mark", number=1, round=5) == book.demand() == []  # too late, and no harm


def test_answers_that_nobody_asked_for_are_refused():
    book = Book()
    book.demand()
    book.say(0, "mark", number=1, round=5)
    for number in (1, 2):
        with pytest.raises(ProtocolError):
            book.say(0, "mark", number=number, round=5)


# Jobs


@pytest.fixture
def run(tmp_path, processes):
    """run(front end, steps) -> the Process of `p3 run`: two workers, with snapshots on demand alone."""

    def start(front_end, steps, *options):
        command = [sys.executable, "-m", "p3", "run", "-n", "2", "-s", "2", "--snapshot-dir", "snapshots"]
        command += ["--snapshot-every", "1000000", *options]
        command += jobs.python("on_demand.py", front_end, steps)
        env = clean_environment(OMP_NUM_THREADS="1", PYTHONPATH=PYTHONPATH)
        processes.append(Process(command, env, tmp_path))
        return processes[-1]

    return start


def digests(finished):
    return set(re.findall(r"from (\d+) to (\d+): (\w+)", finished.out))


@pytest.mark.parametrize("front_end", ["numpy", pytest.param("torch", marks=pytest.mark.torch), "mxnet"])
def test_sigusr1_takes_a_snapshot_and_sigterm_another_one_from_which_the_job_goes_on(run, tmp_path, front_end):
    if front_end == "mxnet":
        pytest.importorskip("mxnet")
    process = run(front_end, 0, "--restarts", "3")
    process.read_until("trains with", times=2)
    process.signal(signal.SIGUSR1)
    process.read_until("taken by step", times=2)
    (first,) = files.rounds(str(tmp_path / "snapshots"))
    process.signal(signal.SIGTERM)
    finished = process.wait()
    second = files.rounds(str(tmp_path / "snapshots"))[0]
    assert (finished.code, second > first) == (128 + signal.SIGTERM, True), finished
    assert "and its last snapshot is of round %d" % second in finished.err and "restarting it" not in finished.err
    resumed = run(front_end, second + 4).wait()
    ((begun, _, digest),) = digests(resumed)
    assert (resumed.code, begun) == (0, str(second)), resumed
    if front_end != "numpy":  # whose bits after a resume other tests compare
        return
    for path in (tmp_path / "snapshots").iterdir():
        path.rename(tmp_path / path.name)
    whole = run(front_end, second + 4).wait()
    assert digests(whole) == {("0", str(second + 4), digest)}, (whole, resumed)


def test_a_job_that_takes_no_snapshots_ends_at_once(start_job):
    process = start_job(
        """
        import time
        from p3.worker.session import Session
        Session.open()
        print("running", flush=True)
        time.sleep(60)
        """,
        1, 1,
    )  # fmt: skip
    assert process.read_line().endswith("running")
    process.signal(signal.SIGUSR1)  # nothing to do
    process.signal(signal.SIGTERM)
    finished = process.wait(20)
    assert finished.code == 143 and "interrupted by SIGTERM; all processes have been stopped\n" in finished.err


def test_a_job_that_comes_to_no_end_of_a_step_is_ended_after_the_grace(start_job, tmp_path):
    process = start_job(
        """
        import time
        from p3.worker.session import Session
        with Session.open() as session:
            session.snapshot(1, [])
            print("running", flush=True)
            time.sleep(60)
        """,
        1, 1, {"P3_SNAPSHOT_DIR": str(tmp_path / "snapshots")}, options=("--grace", "1"),
    )  # fmt: skip
    assert process.read_line().endswith("running")
    process.signal(signal.SIGTERM)
    finished = process.wait(20)
    assert finished.code == 143 and "all processes have been stopped, and no snapshot was taken" in finished.err


def test_the_same_signal_twice_does_not_cut_the_snapshot_short(start_job, tmp_path):
    """As from a launcher that signals a group of processes, and of them also what `p3 run` is below."""
    process = start_job(
        """
        import os, time
        from p3.worker.session import Session
        with Session.open() as session:
            session.snapshot(1, [])
            print("running", flush=True)
            while not os.path.exists("now"):
                time.sleep(0.02)
            for step in range(2, 3000):  # until the scheduler has asked
                session.snapshot(step, [])
                time.sleep(0.01)
        """,
        1, 1, {"P3_SNAPSHOT_DIR": str(tmp_path / "snapshots"), "P3_SNAPSHOT_EVERY": "1000000", "P3_LOG": "info"},
    )  # fmt: skip
    process.read_until("running")
    for heard in (b"the job ends when it has taken a snapshot", b"SIGTERM again"):
        process.signal(signal.SIGTERM)
        while heard not in (line := process.popen.stderr.readline()):
            assert line, process.wait(10)
    (tmp_path / "now").touch()
    finished = process.wait(20)
    assert finished.code == 143 and "its last snapshot is of round " in finished.err, finished


def test_a_job_that_was_asked_to_end_is_not_restarted_when_a_worker_dies_meanwhile(start_job, tmp_path):
    process = start_job(
        """
        import os, time
        from p3.worker.session import Session
        with Session.open() as session:
            session.snapshot(1, [])
            print("running as", os.getpid(), flush=True)
            time.sleep(60)
        """,
        1, 1, {"P3_SNAPSHOT_DIR": str(tmp_path / "snapshots")}, options=("--grace", "30", "--restarts", "1"),
    )  # fmt: skip
    worker = int(process.read_until("running as").split()[-1])
    process.signal(signal.SIGTERM)
    while b"the job ends when it has taken a snapshot" not in (line := process.popen.stderr.readline()):
        assert line, process.wait(10)
    os.kill(worker, signal.SIGKILL)
    finished = process.wait(30)
    assert finished.code == 128 + signal.SIGKILL and "restarting it" not in finished.err, finished


def test_without_a_launcher_the_process_itself_hears_signals(tmp_path, processes):
    env = clean_environment(P3_SNAPSHOT_DIR="snapshots", P3_SNAPSHOT_EVERY="1000000", PYTHONPATH=PYTHONPATH)
    processes.append(Process([sys.executable, str(jobs.SCRIPTS / "on_demand.py"), "numpy", "0"], env, tmp_path))
    process = processes[-1]
    process.read_until("trains with")
    process.signal(signal.SIGUSR1)
    process.read_until("taken by step")
    process.signal(signal.SIGTERM)
    finished = process.wait(20)
    assert finished.code == 143 and "the job ends, as SIGTERM asked; its snapshot of round" in finished.err, finished
    assert len(files.rounds(str(tmp_path / "snapshots"))) == 2


@pytest.mark.parametrize("before", [0, 5])
def test_a_demand_that_is_made_anew_while_its_first_snapshot_is_waited_for_holds(before):
    """As when the first worker departs: the new decision may come before the wait for the old one has ended. `before`:
    the round of one that was taken, before which another one had failed."""
    handlers = {}

    def wait_until(is_over, _what):
        handlers["snapshot_at"]({"number": 2, "round": 8, "ends": True})
        assert is_over()

    session = SimpleNamespace(changed=threading.Lock(), handle=handlers.__setitem__, wait_until=wait_until, label="w")
    snapshots = SimpleNamespace(directory=None, last_round=6, over=before, taken=before, has_failed=before > 0,
                                finish=lambda: None)  # fmt: skip
    demand = Demand(session, SimpleNamespace(send=lambda message: None), snapshots)
    handlers["snapshot_at"]({"number": 1, "round": 7, "ends": True})
    assert demand.pass_mark(7)
    demand.end_with(7)
    assert demand.pass_mark(8)
