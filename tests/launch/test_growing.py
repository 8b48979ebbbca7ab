"""Jobs with places for more workers than they begin with (--max-workers): others join them while they run, and leave
again. As in test_joining.py, each round has whole pushes of all who are there, and the weights are those of means."""

import os
import re
import signal
import sys

import pytest
from joined_jobs import join, p3, require_right, start
from launched_jobs import kill_scheduler, node_of
from node_jobs import all_ended, assert_every_process_says
from plugin_jobs import SCRIPTS
from processes import SECRET


def grown(ended, *came):
    """All that was said, of processes that have all ended well."""
    assert ended.code == 0 and all(one.code == 0 for one in came), (ended, came)
    return ended.out + "".join(one.out for one in came)


@pytest.mark.parametrize("first, env", [(1, {}), (2, {"P3_TLS": "1"}), (2, {"P3_SERVER_THREADS": "2"})])
def test_a_job_grows_by_two_that_join_at_once(tmp_path, processes, first, env):
    most = first + 2
    run = start(tmp_path, processes, first, [], [10], "--max-workers", str(most), **env)
    said = run.read_until("waits for go-10")
    joining = [join(tmp_path, processes, run, **env) for _ in range(2)]
    said += run.read_until("waits to join the job", times=2)
    (tmp_path / "go-10").touch()
    ended = run.wait(100)
    said += grown(ended, *(one.wait(30) for one in joining))
    require_right(tmp_path, said, lambda step: range(first if step < 10 else most), most)
    assert "%d workers train on" % most in ended.err + said, ended


def test_places_that_nobody_takes_change_no_bit(tmp_path, processes):
    """Of random gradients, whose sums depend on the order."""
    script, digests = [sys.executable, str(SCRIPTS / "departing.py"), "12", "3"], []
    for more in ([], ["--max-workers", "9"]):
        run = p3(tmp_path, processes, "run", "-n", "3", "-s", "2", "--on-worker-loss", "continue", *more, *script)
        digests.append(set(re.findall(r"worker \d: ([0-9a-f]{64})", grown(run.wait(60)))))
    assert len(digests[0]) == 1 and digests[0] == digests[1], digests


def test_a_job_grows_loses_and_grows_again(tmp_path, processes):
    run = start(tmp_path, processes, 1, [(0, 12)], [5, 10, 15], "--max-workers", "3")
    said = run.read_until("waits for go-5")
    joining = []
    for _ in range(2):  # as ranks 1 and 2
        joining.append(join(tmp_path, processes, run, P3S_GATES="10,15"))
        said += run.read_until("waits to join the job: the others did not call members(round) yet")
    (tmp_path / "go-5").touch()
    came = joining[1].read_until("waits for go-10")
    full = join(tmp_path, processes, run, P3S_GATES="15")
    said += run.read_until("waits to join the job: all 3 places are taken (--max-workers, P3_MAX_WORKERS)")
    os.kill(joining[1].popen.pid, signal.SIGKILL)
    said += run.read_until("The others go on without it")
    (tmp_path / "go-10").touch()  # where the one that had waited takes that place
    said += run.read_until("The others go on without it")  # the first one, in step 12
    again = join(tmp_path, processes, run, P3_RANK="0")
    said += run.read_until("waits to join the job")
    (tmp_path / "go-15").touch()
    rest = [one.wait(60) for one in (joining[0], full, again)]
    said += came + grown(run.wait(60), *rest)
    there = lambda step: [0] if step < 5 else [1, 2] if 12 <= step < 15 else [0, 1, 2]  # noqa: E731
    require_right(tmp_path, said, there, 3)


@pytest.mark.parametrize("when", ["waits", "trial", "trains"])
def test_the_next_scheduler_knows_the_place_that_none_had_had(tmp_path, processes, when):
    run = start(tmp_path, processes, 2, [], [10, 15], "--max-workers", "4")
    said = run.read_until("waits for go-10", times=2)
    joining = join(tmp_path, processes, run, P3_RANK="3", P3S_DIES="late" if when == "trial" else "")
    said, came = said + run.read_until("waits to join the job"), ""
    if when != "waits":
        (tmp_path / "go-10").touch()
        came += joining.read_until("has what it was given") if when == "trial" else ""
        said += run.read_until("worker 0 step 14:") if when == "trains" else ""
    kill_scheduler(run)
    said += run.read_until("waits to join the job" if when == "waits" else "all nodes have come back")
    for step in (10, 15):
        (tmp_path / ("go-%d" % step)).touch()
    said += came + grown(run.wait(60), joining.wait(60))
    require_right(tmp_path, said, lambda step: [0, 1] if step < 10 else [0, 1, 3], 4)


def test_one_that_dies_before_it_is_in_a_new_place_leaves_that_free(tmp_path, processes):
    run = start(tmp_path, processes, 1, [], [5, 10], "--max-workers", "2")
    said = run.read_until("waits for go-5")
    dying = join(tmp_path, processes, run, P3S_DIES="trial")
    said += run.read_until("waits to join the job")
    (tmp_path / "go-5").touch()
    assert dying.wait(30).code == -signal.SIGKILL
    said += run.read_until("waits for go-10")
    joining = join(tmp_path, processes, run)
    said += run.read_until("waits to join the job")
    (tmp_path / "go-10").touch()
    said += grown(run.wait(60), joining.wait(60))
    require_right(tmp_path, said, lambda step: [0] if step < 10 else [0, 1], 2)


def test_a_job_that_has_grown_is_resumed_from_its_snapshot_with_fewer(tmp_path, processes):
    options = ["--snapshot-dir", str(tmp_path / "snapshots"), "--snapshot-every", "5"]
    run = start(tmp_path, processes, 1, [], [5], "--max-workers", "3", *options)
    said = run.read_until("waits for go-5")
    snapshots = {"P3_SNAPSHOT_DIR": str(tmp_path / "snapshots"), "P3_SNAPSHOT_EVERY": "5"}
    joining = [join(tmp_path, processes, run, **snapshots) for _ in range(2)]
    said += run.read_until("waits to join the job", times=2)
    (tmp_path / "go-5").touch()
    said += grown(run.wait(60), *(one.wait(60) for one in joining))
    resumed = start(tmp_path, processes, 2, [], [], "--max-workers", "3", *options, steps=25).wait(60)
    said += grown(resumed)
    assert "the snapshot of round 20 is of a job with 3 workers; this one has 2" in resumed.out, resumed
    there = lambda step: [0] if step < 5 else [0, 1, 2] if step < 20 else [0, 1]  # noqa: E731
    require_right(tmp_path, said, there, 3, steps=25)


def test_one_for_whom_there_is_no_place_says_so(tmp_path, processes):
    run = start(tmp_path, processes, 1, [], [10, 15], "--max-workers", "2")
    said = run.read_until("waits for go-10")
    early = join(tmp_path, processes, run, "--wait", "1").wait(30)
    assert early.code == 1 and "to join the job of the scheduler at" in early.err, early
    assert "the others did not call members(round) yet" in early.err, early
    beyond = join(tmp_path, processes, run, P3_RANK="2").wait(30)
    assert beyond.code == 1 and "which has workers 0 to 1: --max-workers, P3_MAX_WORKERS" in beyond.err, beyond
    said += run.read_until("waits to join the job")
    joining = join(tmp_path, processes, run)
    said += run.read_until("waits to join the job")
    (tmp_path / "go-10").touch()
    said += run.read_until("waits for go-15")
    late = join(tmp_path, processes, run, "--wait", "1").wait(30)
    assert late.code == 1, late
    assert re.search("to join the job of the scheduler at .*: all 2 places are taken", late.err), late
    (tmp_path / "go-15").touch()
    said += grown(run.wait(60), joining.wait(60))
    require_right(tmp_path, said, lambda step: [0] if step < 10 else [0, 1], 2)


TRAIN = """
import os
import numpy as np, p3
with p3.Session.open() as session:
    print("has begun", flush=True)
    first, _ = session.resume()
    key, landing = session.declare("w", (3,), "float32"), np.empty(3, np.float32)
    session.init(key, np.zeros(3, np.float32) if session.is_first else None, landing).wait(30)
    step, members = first, ()
    while len(members) < 2:
        members = session.agree_on_members(step)
        step += 1
    session.pushpull(key, np.ones(3, np.float32), landing).wait(30)
    print("worker %d of %s has %g" % (session.rank, list(members), landing[0]), flush=True)
"""
GROWS = {"P3_ON_WORKER_LOSS": "continue", "P3_MAX_WORKERS": "2"}


def test_under_other_launchers_all_nodes_have_the_setting(make_cluster, tmp_path, processes):
    cluster = make_cluster(1, 1)
    nodes = [cluster.start(role, TRAIN, **GROWS) for role in ("scheduler", "server", "worker")]
    script = tmp_path / "joining.py"
    script.write_text(TRAIN)
    at = "127.0.0.1:%d" % cluster.port
    nodes[2].read_until("has begun")  # who comes before that is refused
    joining = p3(tmp_path, processes, "join", "--at", at, sys.executable, str(script), P3_SECRET=SECRET)
    worker, came = nodes[2].wait(60), joining.wait(60)
    assert "worker 0 of [0, 1] has 2" in worker.out and "worker 1 of [0, 1] has 2" in came.out, (worker, came)
    assert [node.wait(60).code for node in nodes[:2]] == [0, 0]


def test_a_node_without_the_setting_is_an_error_by_name(make_cluster):
    cluster = make_cluster(1, 1)
    nodes = [cluster.start(role, TRAIN, **GROWS) for role in ("scheduler", "server")]
    nodes.append(cluster.start("worker", TRAIN, P3_ON_WORKER_LOSS="continue"))
    text = "has P3_MAX_WORKERS=unset, but scheduler (127.0.0.1) has P3_MAX_WORKERS=2: they must be the same"
    assert_every_process_says(all_ended(nodes), text)


LARGE = """
import os, signal, sys, threading, time
import numpy as np, p3

def kill_behind(core, victim, count):
    sent = lambda: sum(one["bytes_sent"] for one in (core.counters(), core.counters()["local"]))
    before = sent()
    while sent() < before + count:
        time.sleep(0.001)
    os.kill(victim, signal.SIGKILL)

large = np.random.RandomState(1).randint(0, 256, 70 << 20, np.uint8)  # more pieces than are under way at once
with p3.Session.open() as session:
    first, state = session.resume()
    key, landing = session.declare("w", (3,), "float32"), np.zeros(3, np.float32)
    session.init(key, landing.copy() if session.is_first else None, landing).wait(30)
    assert first == 0 or np.array_equal(state["large"], large)
    for mark in range(first, 3):
        if "P3_JOIN" not in os.environ:
            sys.stdout.write("worker %d waits for go-%d\\n" % (session.rank, mark))
            sys.stdout.flush()
            while not os.path.exists("go-%d" % mark):
                time.sleep(0.01)
            role, _, count = os.environ["P3S_DIES"].partition(" ")
            if mark == 1 and session.rank == 0 and role:
                victim = os.getpid() if role == "worker" else int(open("server").read())
                threading.Thread(target=kill_behind, args=(session.core, victim, int(count)), daemon=True).start()
        members = session.agree_on_members(mark, {"large": large})
    session.wait([session.pushpull(key, np.ones(3, np.float32), landing)])
    print("worker %d of %s has %g" % (session.rank, list(members), landing[0]), flush=True)
"""


DEATHS = ["", "worker 1000000", "worker 20000000", "worker 69000000", "server 1000000", "server 50000000"]


@pytest.mark.parametrize("dies", DEATHS)
def test_what_is_given_may_be_large_and_who_gives_or_brings_it_may_die_over_that(tmp_path, processes, dies):
    (tmp_path / "large.py").write_text(LARGE)
    command = [sys.executable, "large.py"]
    options = ["--on-worker-loss", "continue", "--on-server-loss", "continue", "--max-workers", "3"]
    run = p3(tmp_path, processes, "run", "-n", "2", "-s", "2", *options, *command, P3S_DIES=dies)
    (tmp_path / "go-0").touch()

    def come():
        joining = p3(tmp_path, processes, "join", "--pid", str(run.popen.pid), *command)
        run.read_until("waits to join the job")
        return joining

    run.read_until("waits for go-1", times=2)
    (tmp_path / "server").write_text(str(node_of(run.popen.pid, "server")))
    joining = come()
    (tmp_path / "go-1").touch()
    if dies:
        ended = joining.wait(60)
        of_server = "a server was lost before its first|lost its connection to server"
        said = "worker 0 was lost while it gave this process" if "worker" in dies else of_server
        assert ended.code == 1 and re.search(said, ended.err), ended
        joining = come()
    (tmp_path / "go-2").touch()
    ended, came = run.wait(60), joining.wait(60)
    assert (ended.code, came.code) == (0, 0), (ended, came)
    (said,) = set(re.findall(r"worker \d of (\[.*?\]) has (\d)", ended.out + came.out))
    # Who comes behind the death of worker 0 takes its place.
    assert said == (("[0, 1]", "2") if "worker" in dies else ("[0, 1, 2]", "3")), (ended, came)
