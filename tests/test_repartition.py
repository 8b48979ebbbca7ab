"""Rows move between servers while a job trains, and nobody can tell from the values."""

import numpy as np
import pytest

from p3._core import DTYPES, state_parts
from p3.worker.session import Session
from test_core import DEADLINE_S
from test_rows import ADAM, LR, MOMENTUM, SGD, RowsJob, random_gradient, rows_of

HALF = dict(MOMENTUM, multi_precision=True)


class MovingJob(RowsJob):
    wire_keys = 1

    def move(self, value, partitions, optimizer, before_round):
        """All workers go over to so many partitions behind the round that `before_round` runs."""
        key, slice_elements, code = self.wire_keys, 8, DTYPES[value.dtype.name]
        first_slice = 100 * key + 1  # not the servers' former order
        for server in self.servers:
            server.define_successor(key - 1, key, value.size, code, first_slice, slice_elements, value.shape[1], partitions)
        moves = []
        # Rank 0 last: others may know of the plan before they are told to take it.
        for rank in reversed(range(len(self.workers))):
            first, end = (len(value) * edge // len(self.workers) for edge in (rank, rank + 1))
            plan = (0, key, first_slice, slice_elements, partitions)
            parts = state_parts(optimizer, code)
            moves.append(self.workers[rank].move_rows(*plan, parts, first, end - first))
        before_round()
        for move in moves:
            move.wait(DEADLINE_S)
        for server in self.servers:
            server.drop(key - 1)
        self.wire_keys += 1


@pytest.mark.parametrize("workers, servers", [(1, 1), (1, 3), (2, 2), (4, 3)])
@pytest.mark.parametrize("optimizer, dtype", [(SGD, "float32"), (ADAM, "float32"), (HALF, "float16")])
def test_values_and_state_are_the_same_to_the_bit_as_without_moving(workers, servers, optimizer, dtype):
    random = np.random.RandomState(1)
    value = random.randn(23, 5).astype(dtype)
    rounds = [[random_gradient(random, value.shape, dtype) for _ in range(workers)] for _ in range(12)]
    partitions_after = {2: 7, 4: 1, 7: 23, 9: 2}
    with RowsJob(value, workers, servers, optimizer=optimizer) as still, MovingJob(
        value, workers, servers, optimizer=optimizer
    ) as moving:
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


def test_rounds_asked_for_in_advance_wait_for_the_rows():
    """Operations queue behind a move that is not even known of when they are asked for."""
    value = np.zeros((10, 2), "float32")
    ids, ones = rows_of(range(10)), np.ones((10, 2), "float32")
    with MovingJob(value, 2, 2, optimizer=SGD) as job:
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


def test_a_worker_that_does_not_know_the_plan_yet_waits_for_it():
    value = np.zeros((10, 2), "float32")
    with MovingJob(value, 2, 2, optimizer=SGD) as job:
        for server in job.servers:
            server.define_successor(0, 1, 20, 0, 7, 8, 2, 5)
        plan = (0, 1, 7, 8, 5, [0])
        leads = job.workers[0].move_rows(*plan, 0, 5)
        job.round([(rows_of([1]), value[:1] + 1)] * 2)
        late = [worker.push_rows(0, rows_of([1]), value[:1] + 1, landing, 0, LR)
                for worker, landing in zip(job.workers, job.landings)]
        assert not leads.done
        job.workers[1].move_rows(*plan, 5, 5)
        for operation in late:
            operation.wait(DEADLINE_S)
        assert leads.done
        assert job.landings[1][1].tolist() == [-2.0, -2.0]


def test_a_session_cuts_its_key_anew():
    with Session.open() as session:
        key = session.declare("emb", (9, 2), "float32", sparse=True)
        landing = np.zeros((9, 2), "float32")
        session.init_rows(key, np.zeros((9, 2), "float32"), landing).wait(DEADLINE_S)
        session.set_optimizer(0, MOMENTUM)
        assert session.partitions(key) == 1

        def step():
            ids = rows_of([2, 8])
            session.pushpull_rows(key, ids, np.ones((2, 2), "float32"), landing, lr=0.5).wait(DEADLINE_S)

        step()
        session.repartition(key, 4)
        assert session.is_moving(key)
        with pytest.raises(ValueError, match="on its way"):
            session.repartition(key, 5)
        step()
        session._wait_until(lambda: not session.is_moving(key), DEADLINE_S, "for the rows to move")
        assert session.partitions(key) == 4
        step()
        assert landing[2].tolist() == landing[8].tolist() == pytest.approx([-0.5 * (1 + 1.9 + 2.71)] * 2)
        for wrong in (0, 10):
            with pytest.raises(ValueError, match="rank 0 cuts sparse keys"):
                session.repartition(key, wrong)
