"""Rows move between servers while a job trains, and nobody can tell from the values."""

import ctypes
import resource

import numpy as np
import plugin_jobs as jobs
import pytest
from core_jobs import ADAM, DEADLINE_S, HALF, LR, MOMENTUM, SGD, MovingJob, RowsJob, random_gradient, rows_of

from p3._core import DTYPES, state_parts
from p3.worker.session import Session


@pytest.mark.parametrize(
    "machines, servers", [([0], 1), ([0], 3), ([0, 1], 2), ([0, 1, 2, 3], 3), ([0, 0, 0], 2), ([0, 1, 0, 1], 3)]
)
@pytest.mark.parametrize("optimizer, dtype", [(SGD, "float32"), (ADAM, "float32"), (HALF, "float16")])
def test_values_and_state_are_the_same_to_the_bit_as_without_moving(machines, servers, optimizer, dtype):
    """And without local aggregation."""
    workers = len(machines)
    random = np.random.RandomState(1)
    value = random.randn(23, 5).astype(dtype)
    rounds = [[random_gradient(random, value.shape, dtype) for _ in range(workers)] for _ in range(12)]
    partitions_after = {2: 7, 4: 1, 7: 23, 9: 2}
    with RowsJob(
        value, workers, servers, optimizer=optimizer, machines=machines, local_aggregation=False
    ) as still, MovingJob(value, workers, servers, optimizer=optimizer, machines=machines) as moving:
        for number, gradients in enumerate(rounds):
            still.round(gradients)
            if number in partitions_after:
                moving.move(value, partitions_after[number], optimizer, lambda: moving.round(gradients))
            else:
                moving.round(gradients)
            for landing in moving.landings:
                np.testing.assert_array_equal(landing, still.landings[0])
        everything = range(len(value))
        for part in state_parts(optimizer, DTYPES[dtype]):
            np.testing.assert_array_equal(
                moving.fetch(everything, value, part=part), still.fetch(everything, value, part=part)
            )


@pytest.mark.parametrize("machines", [[0, 1], [0, 0]])
def test_rounds_asked_for_in_advance_wait_for_the_rows(machines):
    """Operations queue behind a move that is not even known of when they are asked for."""
    value = np.zeros((10, 2), "float32")
    ids, ones = rows_of(range(10)), np.ones((10, 2), "float32")
    with MovingJob(value, 2, 2, optimizer=SGD, machines=machines) as job:
        operations = []

        def rounds():
            for _ in range(5):
                for worker, landing in zip(job.workers, job.landings):
                    operations.append(worker.push_rows(0, ids, ones, landing, 0, LR))

        job.move(value, 3, SGD, rounds)
        for operation in operations:
            operation.wait(DEADLINE_S)
        for landing in job.landings:
            np.testing.assert_array_equal(landing, value - 5 * 2 * 0.5)


@pytest.mark.parametrize("machines", [[0, 1], [0, 0], [0, 1, 1]])
def test_a_worker_that_does_not_know_the_plan_yet_waits_for_it(machines):
    """Worker 1, which leads worker 2 in the last case. There the others wait, too."""
    value = np.zeros((10, 2), "float32")
    workers = len(machines)
    with MovingJob(value, workers, 2, optimizer=SGD, machines=machines) as job:
        plan = job.plan._replace(wire_key=1, first_slice=7, partitions=5)
        for server in job.servers:
            server.define_successor(plan, 0)
        leads = job.workers[0].move_rows(0, plan, [0], 0, 5)
        for member in job.workers[2:]:
            member.move_rows(0, plan, [0], 10, 0)
        job.round([(rows_of([1]), value[:1] + 1)] * workers)
        late = [worker.push_rows(0, rows_of([1]), value[:1] + 1, landing, 0, LR)
                for worker, landing in zip(job.workers, job.landings)]
        assert not leads.done
        job.workers[1].move_rows(0, plan, [0], 5, 5)
        for operation in late:
            operation.wait(DEADLINE_S)
        assert leads.done
        assert job.landings[1][1].tolist() == [-workers, -workers]


def test_a_session_cuts_its_key_anew():
    with Session.open() as session:
        key = session.declare("emb", (9, 2), "float32", sparse=True)
        landing = np.zeros((9, 2), "float32")
        session.init(key, np.zeros((9, 2), "float32"), landing).wait(DEADLINE_S)
        session.set_optimizer(0, MOMENTUM)
        assert session.partitions(key) == 1

        def step():
            ids = rows_of([2, 8])
            session.pushpull(key, (ids, np.ones((2, 2), "float32")), landing, lr=0.5).wait(DEADLINE_S)

        step()
        session.repartition(key, 4)
        assert session.is_moving(key)
        with pytest.raises(ValueError, match="already moving"):
            session.repartition(key, 5)
        step()
        session.wait_until(lambda: not session.is_moving(key), "for the rows to move")
        assert session.partitions(key) == 4
        step()
        assert landing[2].tolist() == landing[8].tolist() == pytest.approx([-0.5 * (1 + 1.9 + 2.71)] * 2)
        for wrong in (0, 10):
            with pytest.raises(ValueError, match="rank 0 cuts sparse keys"):
                session.repartition(key, wrong)


def test_a_key_with_staleness_keeps_its_partitions():
    with Session.open() as session:
        key = session.declare("emb", (9, 2), "float32", sparse=True, staleness=1)
        landing = np.zeros((9, 2), "float32")
        session.init(key, landing, landing).wait(DEADLINE_S)
        with pytest.raises(ValueError, match="key 'emb': staleness and other partitions .* no round in common"):
            session.repartition(key, 4)


def test_an_optimizer_that_comes_while_rows_move_is_refused():
    with Session.open() as session:
        key = session.declare("emb", (9, 2), "float32", sparse=True)
        landing = np.zeros((9, 2), "float32")
        with pytest.raises(ValueError, match="key 'new' is not agreed yet"):
            session.repartition(key._replace(name="new"), 4)
        session.init(key, landing, landing).wait(DEADLINE_S)
        session.repartition(key, 4)
        with pytest.raises(ValueError, match="rows of key 'emb' of store 0 are moving to other"):
            session.set_optimizer(0, SGD)
        session.set_optimizer(1, SGD)


def test_moves_in_the_midst_of_all_else_change_nothing():
    """First values set anew, states fetched and stored, skips, forks, late keys, and the end of the job."""
    workers, outputs = 3, []
    for how in ("move", "stay"):
        status, output = jobs.run_p3(workers, 2, jobs.python("moving.py", how))
        assert status == 0, output
        outputs.append(sorted(output.splitlines()))
    assert len(outputs[0]) == 6 * workers
    assert outputs[0] == outputs[1]


def test_the_memory_of_former_plans_is_given_back():
    value = np.zeros((20000, 100), "float32")
    of_a_plan = 2 * value.nbytes  # with the momentum
    ids = rows_of(range(0, len(value), 50))
    gradient = ids, np.ones((len(ids), 100), "float32")
    with MovingJob(value, 1, 2, optimizer=MOMENTUM, slice_elements=50000) as job:
        used = []
        for partitions in (3, 7, 11, 5, 9, 6, 10, 4):
            job.move(value, partitions, MOMENTUM, lambda: job.round([gradient]))
            used.append(resident_bytes())
        assert max(used[2:]) - used[1] < 3 * of_a_plan  # six further plans


def resident_bytes():
    ctypes.CDLL(None).malloc_trim(0)  # what the allocator keeps of what it was given back is not the core's
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()
