"""Workers that live and keep others waiting are named: when, how often, and that the job fails of one in the end."""

import re

import pytest

from p3.cluster.node import Node
from p3.cluster.stragglers import Stragglers
from p3.errors import DisagreementError, ProtocolError

WORKERS = [Node("worker", rank, "10.0.0.%d" % rank) for rank in range(3)]
SERVER = Node("server", 0, "10.0.0.9")
LATE = {"worker": 2, "of_machine": False, "key": "x", "round": 57, "waited_s": 12.0, "waiting": 2}


def stragglers(machines=(0, 1, 2), straggler_s=10.0, stuck_s=0.0):
    return Stragglers(WORKERS, machines, straggler_s, stuck_s)


def test_a_late_worker_is_named_with_its_lag_and_what_waits_for_it():
    text = stragglers().note(SERVER, LATE, 100.0)
    assert text.startswith("worker 2 (10.0.0.2) is 12 s behind in round 57, key 'x', for which 2 other workers wait")
    assert "it is alive" in text


def test_it_is_named_at_intervals_that_double_and_not_for_every_round():
    judge = stragglers()
    said = [now for now in range(200) if judge.note(SERVER, dict(LATE, round=now), float(now)) is not None]
    assert said == [0, 10, 30, 70, 150]


def test_one_that_has_caught_up_for_long_starts_anew():
    judge = stragglers()
    assert [judge.note(SERVER, LATE, now) is not None for now in (0.0, 10.0, 100.0, 111.0)] == [True] * 4


def test_the_leader_of_a_machine_knows_better_than_a_server_who_is_late_there():
    judge = stragglers(machines=(0, 1, 1))
    of_machine = dict(LATE, worker=1, of_machine=True)
    told = judge.note(SERVER, of_machine, 0.0)
    assert "worker 1 (10.0.0.1), or another worker of its machine or group, is 12 s" in told
    assert judge.note(WORKERS[1], LATE, 1.0).startswith("worker 2 (10.0.0.2) is")
    assert judge.note(SERVER, of_machine, 2.0) is None


def test_the_job_fails_of_one_that_is_stuck():
    judge = stragglers(stuck_s=60.0)
    judge.note(SERVER, dict(LATE, waited_s=59.0), 0.0)
    with pytest.raises(DisagreementError, match=r"worker 2 \(10.0.0.2\) is 60 s behind.*P3_STUCK_S=60"):
        judge.note(SERVER, dict(LATE, waited_s=60.0), 1.0)


@pytest.mark.parametrize("sender, worker", [(SERVER, 3), (WORKERS[0], 2)])
def test_nobody_accuses_a_worker_that_is_not_there_or_elsewhere(sender, worker):
    with pytest.raises(ProtocolError, match="is late, "):
        stragglers().note(sender, dict(LATE, worker=worker), 0.0)


SOON = {"P3_TIMEOUT_S": "2", "P3_STRAGGLER_S": "0.3", "P3_STUCK_S": "3"}  # looks once in a heartbeat

JOB = """
    import threading
    import numpy as np
    from p3.worker.session import Session
    session = Session.open()
    landing = np.zeros(1000, np.float32)
    keys = [session.declare(name, landing.shape, "float32") for name in ("a", "b")]
    for key in keys:
        session.init(key, landing if session.rank == 0 else None, np.zeros_like(landing)).wait(30)
    def step(key):
        session.pushpull(key, landing.copy(), landing).wait(60)
"""


@pytest.mark.parametrize("aggregated, groups", ["01", "11", "03"])
def test_a_job_fails_of_a_worker_that_lives_and_does_not_step(run_job, aggregated, groups):
    script = JOB + """
    step(keys[0])
    if session.rank == 1:
        while session.core.error is None:  # lives, but takes no step
            threading.Event().wait(0.05)
    step(keys[0])
    """
    finished = run_job(script, workers=3, env=dict(SOON, P3_LOCAL_AGGREGATION=aggregated, P3_GROUPS=groups))
    assert finished.code == 1
    assert re.search(r"\[scheduler\] WARNING .*worker 1 \(127.0.0.1\) is .* behind in round 2, key 'a'", finished.out)
    named = r"worker 1 \(127.0.0.1\) is \d+ s behind in round 2, key 'a', for which 2 other workers wait.*P3_STUCK_S=3"
    for node in ("worker 0", "worker 2", "server 0", "scheduler"):
        assert re.search(r"\[%s\] .*%s" % (node, named), finished.out), finished.out


def test_workers_that_wait_for_each_others_keys_are_both_named(run_job):
    script = JOB + """
    step(keys[session.rank])
    """
    finished = run_job(script, env=dict(SOON, P3_LOCAL_AGGREGATION="0"))
    assert finished.code == 1
    assert re.search(r"WARNING .*worker 1 \(127.0.0.1\) is .* behind in round 1, key 'a'", finished.out), finished.out
    assert re.search(r"WARNING .*worker 0 \(127.0.0.1\) is .* behind in round 1, key 'b'", finished.out)


def test_lateness_is_counted_for_each_worker(run_job):
    script = JOB + """
    for turn in range(10):
        if session.rank == 1:
            threading.Event().wait(0.3)  # longer than a busy machine holds up the other one
        step(keys[0])
    print("late", *session.server_counters()[0]["late_s"])
    """
    finished = run_job(script, env={"P3_LOCAL_AGGREGATION": "0"})
    assert finished.code == 0, finished
    punctual, late = map(float, re.search(r"late (\S+) (\S+)", finished.out).groups())
    assert late > 0.05 and late > 3 * punctual
