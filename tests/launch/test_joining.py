"""Processes that join a running job, in the place of workers that have departed: each round has whole pushes of all who
are there, and the weights are, to the bit, those of means over them."""

import os
import re
import signal
import subprocess
import sys

import pytest
from joined_jobs import MANY, command, join, p3, require_right, start, worker
from launched_jobs import kill_scheduler
from processes import SECRET, write_script

@pytest.mark.parametrize("env", [{}, {"P3_TLS": "1"}, {"P3_SERVER_THREADS": "2", "P3_LOCAL": "tcp"}])
def test_two_join_at_once_and_the_weights_are_those_of_means_over_who_is_there(tmp_path, processes, env):
    run = start(tmp_path, processes, 4, [(0, 3), (2, 3)], [10], **env)
    said = run.read_until("The others go on without it", "waits for go-10", times=2)
    joining = [join(tmp_path, processes, run, **env) for _ in range(2)]
    said += run.read_until("waits to join the job", times=2)
    (tmp_path / "go-10").touch()
    ended = run.wait(100)
    came = [one.wait(30) for one in joining]
    assert ended.code == 0 and all(one.code == 0 for one in came), (ended, came)
    said += ended.out + "".join(one.out for one in came)
    require_right(tmp_path, said, lambda step: [1, 3] if 3 <= step < 10 else [0, 1, 2, 3], 4)


@pytest.mark.parametrize("dies", ["trial", "frozen", "ends"])
def test_one_that_dies_while_it_joins_leaves_the_job_as_it_was_and_the_next_one_joins(tmp_path, processes, dies):
    run = start(tmp_path, processes, 2, [(1, 3)], [10, 15], P3_TIMEOUT_S="4")
    said = run.read_until("The others go on without it", "waits for go-10")
    first = join(tmp_path, processes, run, P3S_DIES=dies, P3_TIMEOUT_S="4")
    said += run.read_until("waits to join the job")
    (tmp_path / "go-10").touch()
    said += run.read_until("worker 0 step 14:")
    os.kill(first.popen.pid, signal.SIGKILL) if dies == "frozen" else first.wait(20)
    second = join(tmp_path, processes, run, P3_TIMEOUT_S="4")
    said += run.read_until("waits to join the job")
    (tmp_path / "go-15").touch()
    ended, came = run.wait(60), second.wait(60)
    assert ended.code == 0 and came.code == 0, (ended, came)
    require_right(tmp_path, said + ended.out + came.out, lambda step: [0] if 3 <= step < 15 else [0, 1], 2)


def test_the_first_worker_may_die_while_one_is_on_trial_and_that_one_becomes_first_in_its_turn(tmp_path, processes):
    run = start(tmp_path, processes, 3, [(0, 3)], [10, 15])
    said = run.read_until("The others go on without it", "waits for go-10")
    joining = join(tmp_path, processes, run, P3S_DIES="late")  # as rank 0
    said += run.read_until("waits to join the job")
    (tmp_path / "go-10").touch()
    came = joining.read_until("has what it was given")
    for rank, step in ((1, None), (2, "worker 0 step 14:")):
        if step is not None:
            came += joining.read_until(step)
        os.kill(worker(run, rank), signal.SIGKILL)
        said += run.read_until("The others go on without it")
    (tmp_path / "go-15").touch()
    ended, last = run.wait(60), joining.wait(60)
    assert ended.code == 0 and last.code == 0, (ended, last)
    absent = [(0, range(3, 10)), (1, range(10, 20)), (2, range(15, 20))]
    there = lambda step: [rank for rank in range(3) if not any(r == rank and step in of for r, of in absent)]  # noqa: E731
    require_right(tmp_path, said + ended.out + came + last.out, there, 3)


@pytest.mark.parametrize("when", ["waits", "trains"])
def test_the_next_scheduler_lets_one_join_or_knows_that_it_has(tmp_path, processes, when):
    run = start(tmp_path, processes, 3, [(1, 3)], [10, 15])
    said = run.read_until("The others go on without it", "waits for go-10")
    joining = join(tmp_path, processes, run)
    said += run.read_until("waits to join the job")
    if when == "trains":
        (tmp_path / "go-10").touch()
        said += run.read_until("worker 0 step 14:")
    kill_scheduler(run)
    said += run.read_until("waits to join the job" if when == "waits" else "all nodes have come back")
    for step in (10, 15):
        (tmp_path / ("go-%d" % step)).touch()
    ended, came = run.wait(60), joining.wait(60)
    assert ended.code == 0 and came.code == 0, (ended, came)
    require_right(tmp_path, said + ended.out + came.out, lambda step: [0, 2] if 3 <= step < 10 else [0, 1, 2], 3)


def test_p3_run_starts_others_for_lost_ones_again_and_again(tmp_path, processes):
    run = start(tmp_path, processes, 3, [(0, 3), (1, 8)], [5, 10], "--rejoin")
    said = run.read_until("waits to join the job")
    (tmp_path / "go-5").touch()
    said += run.read_until("waits to join the job")
    (tmp_path / "go-10").touch()
    ended = run.wait(60)
    assert ended.code == 0 and ended.err.count("another one is started now") == 2, ended
    absent = {3: [0], 4: [0], 8: [1], 9: [1]}
    there = lambda step: [rank for rank in range(3) if rank not in absent.get(step, [])]  # noqa: E731
    require_right(tmp_path, said + ended.out, there, 3)


@pytest.mark.parametrize("how", ["frozen", "child"])
def test_p3_run_starts_another_one_also_for_who_has_departed_before_its_end_was_seen(tmp_path, processes, how):
    run = start(tmp_path, processes, 3, [(1, 3)], [5], "--rejoin", P3_TIMEOUT_S="4", P3S_DEATH=how)
    said = run.read_until("waits to join the job")
    (tmp_path / "go-5").touch()
    ended = run.wait(60)
    assert ended.code == 0 and ended.err.count("another one is started now") == 1, ended
    require_right(tmp_path, said + ended.out, lambda step: [0, 2] if 3 <= step < 5 else [0, 1, 2], 3)


def test_one_that_freezes_before_it_has_joined_is_ended_and_another_one_started(tmp_path, processes):
    run = start(tmp_path, processes, 3, [(1, 3)], [5, 10], "--rejoin", P3_TIMEOUT_S="4")
    said = run.read_until("waits to join the job")
    os.kill(worker(run, 1), signal.SIGSTOP)
    (tmp_path / "go-5").touch()
    said += run.read_until("waits to join the job")
    (tmp_path / "go-10").touch()
    ended = run.wait(60)
    assert ended.code == 0 and ended.err.count("another one is started") == 2, ended
    require_right(tmp_path, said + ended.out, lambda step: [0, 2] if 3 <= step < 10 else [0, 1, 2], 3)


def test_starts_are_counted_also_of_those_that_die_before_they_have_joined(tmp_path, processes):
    options = ("--rejoin", "--worker-restarts", "2", "--restart-pause", "0.1")
    run = start(tmp_path, processes, 3, [(1, 3)], [5, 10], *options, P3S_DIES="trial")
    said = run.read_until("waits to join the job")
    (tmp_path / "go-5").touch()
    said += run.read_until("waits to join the job")
    (tmp_path / "go-10").touch()
    ended = run.wait(60)
    assert ended.code == 0 and ended.err.count("another one is started") == 2, ended
    assert ended.err.count("(0 more restarts allowed)") == 1, ended
    require_right(tmp_path, said + ended.out, lambda step: [0, 1, 2] if step < 3 else [0, 2], 3)


def test_who_dies_behind_its_goodbye_ends_the_job_and_no_other_is_started(tmp_path, processes):
    script = """
        import os, signal
        import p3
        session = p3.Session.open()
        session.barrier()
        session.close()
        if session.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    """
    options = ["-n", "2", "-s", "1", "--on-worker-loss", "continue", "--rejoin"]
    ended = p3(tmp_path, processes, "run", *options, sys.executable, write_script(tmp_path, script)).wait(60)
    assert ended.code == 128 + signal.SIGKILL, ended
    assert ended.err.splitlines()[-1] == "p3 run: worker 1 ended with signal SIGKILL", ended


def test_one_that_fails_before_it_has_joined_has_time_to_say_why(tmp_path, processes):
    script = tmp_path / "script.py"
    script.write_text("""
import os, signal, sys, time
import p3

def train(session):
    first, _ = session.resume()
    if "P3_JOIN" in os.environ and not os.path.exists("failed"):
        open("failed", "w").close()
        raise ValueError("no data here")
    for step in range(first, 100_000):
        members = session.agree_on_members(step, {})
        if step == 0:
            session.barrier()
            if session.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        elif len(members) == 2 and os.path.exists("failed"):
            print("worker %d is done" % session.rank)
            return
        time.sleep(0.01)

try:
    with p3.Session.open() as session:
        train(session)
except ValueError as error:
    time.sleep(1)  # it has departed long since
    sys.exit("at last: %s" % error)
""")
    options = ["-n", "2", "--on-worker-loss", "continue", "--rejoin"]
    ended = p3(tmp_path, processes, "run", *options, sys.executable, str(script)).wait(60)
    assert ended.code == 0 and ended.out.count("is done\n") == 2, ended
    assert "worker 1 ended with exit code 1; its last line: at last: no data here" in ended.err, ended


def test_one_that_freezes_on_its_way_costs_the_place_of_none_that_comes_with_it(tmp_path, processes):
    run = start(tmp_path, processes, 4, [(1, 3), (2, 3)], [5], P3_TIMEOUT_S="4")
    said = run.read_until("The others go on without it", "waits for go-5", times=2)
    frozen = join(tmp_path, processes, run, P3_TIMEOUT_S="4", P3_RANK="1")
    said += run.read_until("waits to join the job")
    os.kill(frozen.popen.pid, signal.SIGSTOP)
    joining = join(tmp_path, processes, run, P3_TIMEOUT_S="4", P3_RANK="2")
    said += run.read_until("waits to join the job")
    (tmp_path / "go-5").touch()
    ended, came = run.wait(60), joining.wait(60)
    assert ended.code == 0 and came.code == 0, (ended, came)
    there = lambda step: [0, 1, 2, 3] if step < 3 else [0, 3] if step < 5 else [0, 2, 3]  # noqa: E731
    require_right(tmp_path, said + ended.out + came.out, there, 4)


def test_servers_and_workers_agree_on_who_is_first_of_two_that_join_at_once(tmp_path, processes):
    script = tmp_path / "script.py"
    script.write_text("""
import os, signal, time
import numpy as np, p3

def round_of(name, value):
    key, landing = session.declare(name, (3,), "float32"), np.empty(3, np.float32)
    session.init(key, np.full(3, value, np.float32) if session.is_first else None, landing).wait(30)
    session.pushpull(key, np.ones(3, np.float32), landing).wait(30)
    return landing[0]

with p3.Session.open() as session:
    joins = "P3_JOIN" in os.environ
    session.resume()
    if not joins:
        session.barrier()
        if session.rank < 2:
            os.kill(os.getpid(), signal.SIGKILL)
        while not os.path.exists("go"):
            time.sleep(0.01)
    members = session.agree_on_members(1, {})
    if not joins:
        os.kill(os.getpid(), signal.SIGKILL)
    left = tuple(rank for rank in members if rank < 2)
    while session.agree_on_members() != left:
        pass
    print("worker %d of %s has %g" % (session.rank, list(left), round_of("new", 5)), flush=True)
""")
    script = [sys.executable, str(script)]
    run = p3(tmp_path, processes, "run", "-n", "3", "-s", "2", "--on-worker-loss", "continue", *script)
    run.read_until("The others go on without it", times=2)
    joining = [p3(tmp_path, processes, "join", "--pid", str(run.popen.pid), *script) for _ in range(2)]
    run.read_until("waits to join the job", times=2)
    (tmp_path / "go").touch()
    came = [one.wait(60) for one in joining]
    assert run.wait(60).code == 0 and all(one.code == 0 and "has 2" in one.out for one in came), came


def test_p3_run_ends_well_if_somebody_else_has_taken_the_place_that_its_own_process_waits_for(tmp_path, processes):
    run = start(tmp_path, processes, 3, [(1, 8)], [5, 15], "--rejoin")
    said = run.read_until("worker 0 step 4:")
    guest = join(tmp_path, processes, run)
    said += run.read_until("waits to join the job")
    (tmp_path / "go-5").touch()  # it is let in at 10, before another process of worker 1 has started
    said += run.read_until("waits to join the job")
    (tmp_path / "go-15").touch()
    ended, came = run.wait(60), guest.wait(60)
    assert ended.code == 0 and came.code == 0, (ended, came)
    require_right(tmp_path, said + ended.out + came.out, lambda step: [0, 2] if 8 <= step < 10 else [0, 1, 2], 3)


def test_p3_run_does_not_end_before_the_last_of_those_who_have_joined(tmp_path, processes):
    run = start(tmp_path, processes, 2, [(1, 3)], [10, 15], P3_TIMEOUT_S="4")
    said = run.read_until("The others go on without it", "waits for go-10")
    guest = join(tmp_path, processes, run, P3_TIMEOUT_S="4", P3S_GATES="15")
    said += run.read_until("waits to join the job")
    (tmp_path / "go-10").touch()
    came = guest.read_until("worker 1 step 14:")
    os.kill(worker(run, 0), signal.SIGKILL)
    said += run.read_until("The others go on without it")
    with pytest.raises(subprocess.TimeoutExpired):
        run.popen.wait(9)  # longer than servers have behind the last worker: P3_TIMEOUT_S and 5 s
    (tmp_path / "go-15").touch()
    ended, last = run.wait(60), guest.wait(60)
    assert ended.code == 0 and last.code == 0, (ended, last)
    absent = [(1, range(3, 10)), (0, range(15, 20))]
    there = lambda step: [rank for rank in range(2) if not any(r == rank and step in of for r, of in absent)]  # noqa: E731
    require_right(tmp_path, said + ended.out + came + last.out, there, 2)


def test_the_next_scheduler_takes_no_loss_for_that_of_who_has_joined_since(tmp_path, processes):
    run = start(tmp_path, processes, 3, [(1, 3)], [5, 15], "--rejoin")
    said = run.read_until("waits to join the job")
    (tmp_path / "go-5").touch()
    said += run.read_until("worker 0 step 14:")
    joined = worker(run, 1)
    kill_scheduler(run)
    said += run.read_until("all nodes have come back")
    assert worker(run, 1) == joined
    (tmp_path / "go-15").touch()
    ended = run.wait(60)
    assert ended.code == 0 and ended.err.count("another one is started now") == 1, ended
    require_right(tmp_path, said + ended.out, lambda step: [0, 2] if 3 <= step < 5 else [0, 1, 2], 3)


def test_one_that_is_never_let_in_says_so_and_so_does_the_end_of_the_job(tmp_path, processes):
    run = start(tmp_path, processes, 2, [(1, 3)], [10])
    said = run.read_until("worker 0 step 9:")
    impatient = join(tmp_path, processes, run, "--wait", "1").wait(30)
    assert impatient.code == 1, impatient
    assert "waited 1 s (P3_JOIN, --wait) to join the job of the scheduler at" in impatient.err
    assert "the others did not call members(round)" in impatient.err
    other = join(tmp_path, processes, run, P3_SLICE_ELEMENTS="1000").wait(30)
    assert other.code == 1 and "has P3_SLICE_ELEMENTS=1000, but worker 0" in other.err, other
    wanted = join(tmp_path, processes, run, P3_RANK="7").wait(30)
    assert wanted.code == 1 and "which has workers 0 to 1" in wanted.err, wanted
    living = join(tmp_path, processes, run, P3_RANK="0")  # which is there
    said += run.read_until("waits to join the job", times=2)
    (tmp_path / "go-10").touch()
    ended, last = run.wait(60), living.wait(60)
    assert ended.code == 0 and last.code == 1, (ended, last)
    assert "has not joined the job: it has ended" in last.err, last
    require_right(tmp_path, said + ended.out, lambda step: [0] if step >= 3 else [0, 1], 2)


def test_a_job_that_ends_with_a_lost_worker_lets_nobody_join(tmp_path, processes):
    run = p3(tmp_path, processes, "run", "-n", "1", *command(tmp_path, MANY))
    run.read_until("worker 0 step 2:")
    came = join(tmp_path, processes, run).wait(30)
    assert came.code == 1 and "does not go on without lost workers" in came.err, came


def test_weights_of_arrays_are_those_of_all_who_are_there(tmp_path, processes):
    script = tmp_path / "script.py"
    script.write_text("""
import os, signal, sys, time
import numpy as np, p3
from p3.frontend import snapshots
from p3.frontend.weights import Weights
from p3.worker.session import current

session, joins = current(), "P3_JOIN" in os.environ
first, state = snapshots.resume(session)
assert (first, state) == ((6, ["epoch", 2]) if joins else (0, None)), (first, state)
sgd = {"name": "torch_sgd", "momentum": 0.5, "dampening": 0.0, "nesterov": False, "maximize": False,
       "multi_precision": False}
weights = Weights(session, {"w": np.full(5, 7 if joins else 1, np.float32)}, sgd)
if not joins:
    session.barrier()
    if session.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
for step in range(first, 12):
    if step == 6 and not joins:
        print("waits for go")
        while not os.path.exists("go"):
            time.sleep(0.01)
    if step % 3 == 0:
        members = snapshots.members(session, step, ["epoch", step // 3])
    weights.push("w", weights["w"] * 0 + members.index(session.rank) + step, 0.5)
    weights.end_step(0.5)
print("worker %d has %s of %s" % (session.rank, weights["w"].tolist(), list(members)))
""")
    script = [sys.executable, str(script)]
    run = p3(tmp_path, processes, "run", "-n", "2", "--on-worker-loss", "continue", *script)
    said = run.read_until("The others go on without it", "waits for go")
    joining = p3(tmp_path, processes, "join", "--pid", str(run.popen.pid), *script)
    said += run.read_until("waits to join the job")
    (tmp_path / "go").touch()
    ended, came = run.wait(60), joining.wait(60)
    assert ended.code == 0 and came.code == 0, (ended, came)
    weight, velocity = 1.0, 0.0
    for step in range(12):
        velocity = velocity / 2 + (step if step < 6 else step + 0.5)
        weight -= velocity / 2
    told = set(re.findall(r"worker \d has (.*) of \[0, 1\]", said + ended.out + came.out))
    assert told == {str([weight] * 5)}, (told, weight)


def test_snapshots_have_a_part_of_who_has_joined(tmp_path, processes):
    folder = tmp_path / "snapshots"
    run = start(tmp_path, processes, 2, [(0, 3)], [10], "--snapshot-dir", str(folder), "--snapshot-every", "3")
    said = run.read_until("The others go on without it", "waits for go-10")
    joining = join(tmp_path, processes, run, P3_SNAPSHOT_DIR=str(folder), P3_SNAPSHOT_EVERY="3")
    said += run.read_until("waits to join the job")
    (tmp_path / "go-10").touch()
    ended, came = run.wait(60), joining.wait(60)
    assert ended.code == 0 and came.code == 0, (ended, came)
    require_right(tmp_path, said + ended.out + came.out, lambda step: [1] if 3 <= step < 10 else [0, 1], 2)
    newest = sorted(folder.glob("round-*[0-9]"))[-1]
    assert int(newest.name[6:]) == 18
    assert sorted(path.stem for path in newest.glob("worker-*")) == ["worker-0", "worker-1"]


@pytest.mark.parametrize(
    "options, why",
    [
        ([], "p3 join needs the command"),
        (["--at", "10.0.0.9", "true"], "--at 10.0.0.9: it must be HOST:PORT"),
        (["--at", "10.0.0.9:1", "--pid", "1", "true"], "both name a job"),
        (["--at", "127.0.0.1:1", sys.executable, "-c", "import p3; p3.Session.open()"], "no scheduler at"),
        (["--at", "127.0.0.1:1", "no-such-command"], "no-such-command"),
        (["--server", "--at", "127.0.0.1:1", "true"], "p3 join --server runs a server of P3's: leave the command out"),
        (["--rank", "1", "--at", "127.0.0.1:1", "true"], "--rank is for --server"),
        (["--server", "--rank", "1", "--at", "127.0.0.1:1"], "no scheduler at"),
        (["--server", "--at", "127.0.0.1:1", "--pid", "1"], "both name a job"),
    ],
)
def test_what_is_wrong_with_a_call_of_p3_join_it_says(tmp_path, processes, options, why):
    env = {"P3_SECRET": "0123456789abcdef", "P3_RENDEZVOUS_TIMEOUT_S": "1"}
    ended = p3(tmp_path, processes, "join", *options, **env).wait(20)
    assert ended.code == 1 and why in ended.err, ended


def test_p3_join_waits_for_a_scheduler_no_longer_than_it_is_told_to(tmp_path, processes):
    options = ["--at", "127.0.0.1:1", "--server", "--wait", "1"]
    ended = p3(tmp_path, processes, "join", *options, P3_SECRET=SECRET).wait(30)
    assert ended.code == 1 and "no scheduler at 127.0.0.1:1 for 1 s" in ended.err, ended


def test_one_joins_by_address_with_the_secret_that_p3_run_was_given(tmp_path, processes):
    secret = tmp_path / "secret"
    secret.write_text(SECRET + "\n")
    secret.chmod(0o600)
    run = start(tmp_path, processes, 2, [(1, 3)], [10], P3_SECRET_FILE=str(secret))
    said = run.read_until("The others go on without it", "waits for go-10")
    with open("/proc/%d/environ" % worker(run, 0), "rb") as file:
        env = dict(entry.decode().partition("=")[::2] for entry in file.read().split(b"\0") if entry)
    assert env["P3_SECRET"] == SECRET and "P3_SECRET_FILE" not in env
    at = "%(DMLC_PS_ROOT_URI)s:%(DMLC_PS_ROOT_PORT)s" % env
    joining = p3(tmp_path, processes, "join", "--at", at, *command(tmp_path), P3_SECRET_FILE=str(secret))
    said += run.read_until("waits to join the job")
    (tmp_path / "go-10").touch()
    ended, came = run.wait(100), joining.wait(30)
    assert (ended.code, came.code) == (0, 0), (ended, came)
    require_right(tmp_path, said + ended.out + came.out, lambda step: [0] if 3 <= step < 10 else [0, 1], 2)


def test_p3_run_starts_others_only_where_the_job_goes_on(tmp_path, processes):
    for options, why in (
        (["--rejoin"], "add --on-worker-loss continue or --on-server-loss continue"),
        (["--worker-restarts", "2"], "is for lost workers and servers that start again: add --rejoin"),
    ):
        ended = p3(tmp_path, processes, "run", "-n", "1", *options, "true").wait(20)
        assert ended.code == 1 and why in ended.err, ended


def test_whoever_has_lost_workers_replaced_while_others_wait_is_told_what_to_use(tmp_path, processes):
    for options, env in ((["--on-worker-loss", "wait"], {}), ([], {"P3_ON_WORKER_LOSS": "wait"})):
        ended = p3(tmp_path, processes, "run", "-n", "1", *options, "true", **env).wait(20)
        assert ended.code == 1 and "P3_ON_WORKER_LOSS='wait': it must be fail or continue" in ended.err, ended
        assert '"wait" was taken out. Use --on-worker-loss continue --rejoin' in ended.err, ended
