"""Workers of one machine add up their gradients before they leave it: the same bits, fewer bytes, no worse an end."""

import os
import re
import signal
import sys

import numpy as np
import plugin_jobs as jobs
import pytest

pytest.importorskip("p3._core", reason="the extension is not built")

from aggregated_results import exact, results
from core_jobs import ADAM, HALF, MOMENTUM, SKIP, RowsJob, random_gradient

DEADLINE_S = 60
SLICES = {"P3_SLICE_ELEMENTS": "20000"}
SUMMED = ("optimizer", "sum", "halves", "average", "compressed", "rows", "row halves", "rows as slices")


def run(workers, *arguments, **variables):
    status, output = jobs.run_p3(workers, 2, jobs.python("aggregated.py", *arguments), **SLICES, **variables)
    assert status == 0, output
    found = results(output)
    assert [result["rank"] for result in found] == list(range(workers)), output
    for result in found:
        assert result["landed"] == found[0]["landed"]
    return found


def test_four_workers_of_one_machine_get_the_same_bits_for_a_fourth_of_the_bytes():
    steps = (2, 4, 1, 3)
    together, apart = (run(4, *steps, P3_LOCAL_AGGREGATION=setting) for setting in "10")
    assert exact(together[0]["landed"]) == exact(apart[0]["landed"])
    assert together[0]["landed"] != apart[0]["landed"]
    assert [result["local"] for result in together] == [[rank, 4] for rank in range(4)]
    for store in SUMMED:
        sent, sent_apart = (sum(result["sent"][store][0] for result in job) for job in (together, apart))
        assert sent_apart / 4 * 0.95 < sent < sent_apart / 4 * 1.05, store
        near = sum(result["sent"][store][1] for result in together)
        assert near > 1.9 * sent_apart * 3 / 4, store  # three go to the leader, and it sends three values back
        assert all(result["sent"][store][1] == 0 for result in apart), store


@pytest.mark.parametrize("machines", [[0, 0, 0, 0], [0, 1, 0, 1], [1, 0, 0]])
@pytest.mark.parametrize(
    "dtype, optimizer, average",
    [("float32", None, False), ("float32", MOMENTUM, True), ("float32", ADAM, False), ("float16", HALF, True)],
)
def test_rows_are_the_same_bits_with_and_without(machines, dtype, optimizer, average):
    """Unsorted and repeated ids, empty gradients, skips of some and of all, both codings."""
    random = np.random.RandomState(len(machines))
    value = random.randn(23, 3).astype(dtype)
    options = {"machines": machines, "optimizer": optimizer, "average": average, "partitions": 3}
    with RowsJob(value, len(machines), 2, local_aggregation=True, **options) as together, RowsJob(
        value, len(machines), 2, local_aggregation=False, **options
    ) as apart:
        for number in range(12):
            gradients = [random_gradient(random, value.shape, dtype) for _ in machines]
            for skipping in ((), (number % len(machines),), (0, 1), range(len(machines)))[number % 4]:
                gradients[skipping] = SKIP
            for worker in together.workers + apart.workers:
                worker.choose_route(0, 0, number % 3 == 2)
            assert together.round(gradients) == apart.round(gradients)
            for landing, other in zip(together.landings, apart.landings):
                np.testing.assert_array_equal(landing, apart.landings[0])
                np.testing.assert_array_equal(other, apart.landings[0])
            counters = [worker.key_counters(0) for worker in together.workers + apart.workers]
            assert len({(one["pushed_rows"], one["touched_rows"]) for one in counters}) == 1


def test_a_local_socket_does_where_there_is_no_ring():
    ring, unix = run(2), run(2, P3_LOCAL="unix")
    assert ring[0]["landed"] == unix[0]["landed"]
    assert unix[1]["sent"]["sum"][1] > 0


# Two workers in an IPC namespace of their own: another machine, to P3.
MACHINE = """
import os, subprocess, sys
children = [subprocess.Popen(sys.argv[2:], env=dict(os.environ, P3_RANK=rank)) for rank in sys.argv[1].split(",")]
sys.exit(max(child.wait() for child in children))
"""
ELSEWHERE = ["unshare", "--map-root-user", "--ipc"]


def run_on_two_machines(make_cluster, processes, setting):
    cluster = make_cluster(4, 2)
    common = dict(SLICES, P3_LOCAL_AGGREGATION=setting, OMP_NUM_THREADS="1")
    others = [cluster.start(role, **common) for role in ("scheduler", "server", "server")]
    worker = [sys.executable, "-m", "p3", "exec", *jobs.python("aggregated.py", 2, 4, 1, 3)]
    env = cluster.env(DMLC_ROLE="worker", **common)
    for ranks, where in (("0,2", []), ("1,3", ELSEWHERE)):
        command = [*where, sys.executable, "-c", MACHINE, ranks, *worker]
        processes.append(jobs.Process(command, env, jobs.SCRIPTS))
    ended = [process.wait(DEADLINE_S) for process in processes[-2:] + others]
    assert [process.code for process in ended] == [0] * 5, [process.err for process in ended]
    return results(ended[0].out + ended[1].out)


def test_two_machines_of_two_workers_get_the_same_bits_with_and_without(make_cluster, processes):
    if os.system(" ".join(ELSEWHERE) + " true 2>/dev/null") != 0:
        pytest.skip("no IPC namespace can be made here; run as root")
    together, apart = (run_on_two_machines(make_cluster, processes, setting) for setting in "10")
    assert [result["local"] for result in together] == [[0, 2], [0, 2], [1, 2], [1, 2]]
    for some in (together, apart):
        for result in some:
            assert result["landed"] == some[0]["landed"]
    assert exact(together[0]["landed"]) == exact(apart[0]["landed"])
    for store in SUMMED:
        sent, sent_apart = (sum(result["sent"][store][0] for result in job) for job in (together, apart))
        assert sent_apart / 2 * 0.95 < sent < sent_apart / 2 * 1.05, store


@pytest.mark.parametrize("kind", ["dense", "rows"])
@pytest.mark.parametrize("victim", [0, 2], ids=["leader", "member"])
def test_a_worker_killed_in_a_round_is_an_error_on_all_others_and_leaves_nothing(make_cluster, victim, kind):
    shared_memory = os.listdir("/dev/shm")
    cluster = make_cluster(3, 1)
    script = (jobs.SCRIPTS / "killed.py").read_text().replace("sys.argv", repr(["", str(victim), kind]))
    others = [cluster.start("scheduler"), cluster.start("server")]
    workers = [cluster.start("worker", script, P3_RANK=str(rank)) for rank in range(3)]
    ended = [worker.wait(DEADLINE_S) for worker in workers]
    assert ended.pop(victim).code == -signal.SIGKILL
    for worker in ended:
        assert re.search(r"worker %d \(127.0.0.1\)" % victim, worker.out), worker
        assert "no error" not in worker.out
    assert all(other.wait(DEADLINE_S).code == 1 for other in others)
    assert os.listdir("/dev/shm") == shared_memory


def test_nodes_that_differ_in_the_setting_are_named(make_cluster):
    cluster = make_cluster(2, 1)
    scheduler = cluster.start("scheduler")
    cluster.start("server")
    for rank, setting in enumerate("10"):
        script = "from p3.worker.session import Session\nSession.open()\n"
        cluster.start("worker", script, P3_RANK=str(rank), P3_LOCAL_AGGREGATION=setting)
    error = scheduler.wait(DEADLINE_S).err
    assert "worker 1 (127.0.0.1) has P3_LOCAL_AGGREGATION=0, but worker 0 (127.0.0.1) has" in error


def test_a_traced_slice_of_a_member_lives_with_its_leader(tmp_path):
    np = pytest.importorskip("numpy")
    from p3.trace import lives
    from p3.trace.reader import local_peer

    run(2, P3_TRACE=str(tmp_path))
    trace = lives.load(str(tmp_path))
    for moment in lives.MOMENTS:
        assert np.isfinite(trace.lives[moment]).all(), moment
    aggregated = trace.lives[trace.lives["key"] < 5]
    member = aggregated[aggregated["worker"] == 1]
    assert len(member) > 0 and (member["server"] == local_peer(0)).all()
    assert (aggregated[aggregated["worker"] == 0]["server"] >= 0).all()
    for earlier, later in (("leaving", "received"), ("received", "summed"), ("complete", "updated"),
                           ("updated", "returning"), ("returning", "landed")):  # fmt: skip
        assert (member[earlier] <= member[later]).all(), (earlier, later)
