"""Captures for snapshots: what the servers copy is the job between two rounds, whatever is under way meanwhile."""

import numpy as np
import pytest
from core_jobs import ADAM, DEADLINE_S, HALF, LR, SGD, Job, MovingJob, random_gradient, wait_all

from p3._core import MASTER

TWO_BIT = {"type": "2bit", "threshold": 0.5}
ROUND = 7  # of the snapshot


def assembled(job):
    """{wire key: {part: the whole array}} of what all servers have captured, in one dimension."""
    pieces = {}
    for server in job.servers:
        for wire_key, piece, part, dtype, elements, memory in server.take_captured(ROUND):
            array = np.frombuffer(memory, dtype)
            assert array.shape == (elements,) and np.asarray(memory).dtype == dtype
            pieces.setdefault(wire_key, {}).setdefault(part, {})[piece] = array
    return {
        key: {part: np.concatenate([by_piece[piece] for piece in sorted(by_piece)]) for part, by_piece in parts.items()}
        for key, parts in pieces.items()
    }


@pytest.mark.parametrize("machines", [[0, 1, 2], [0, 0, 1], [0, 1, 1]])
@pytest.mark.parametrize("optimizer, dtype, parts", [(ADAM, "float32", [0, 1, 2]), (HALF, "float16", [0, 1, MASTER])])
def test_all_keys_are_captured_at_one_round_while_others_push_the_next(machines, optimizer, dtype, parts):
    random = np.random.RandomState(7)
    with Job(num_workers=3, num_servers=2, slice_elements=100, machines=machines) as job:
        job.set_optimizer(optimizer)
        keys = [job.key(elements, dtype) for elements in (1050, 1, 0)]
        for key, elements in zip(keys, (1050, 1, 0)):
            job.init(key, random.randn(elements).astype(dtype))
        for _ in range(3):
            landed = [job.push(key, random_pushes(random, 3, n, dtype), LR)[0] for key, n in zip(keys, (1050, 1, 0))]
        states = {
            (key, part): fetched(job.workers[0], key, part, landed[key].size) for key in keys for part in parts[1:]
        }

        pushes = [random_pushes(random, 3, n, dtype) for n in (1050, 1, 0)]
        landings = [[np.empty_like(push) for push in each] for each in pushes]
        early = [  # the next round of the others is under way, and worker 0's is queued behind its capture
            job.workers[rank].push(key, pushes[key][rank], landings[key][rank], 0, LR)
            for rank in (2, 1)
            for key in keys
        ]
        captures = [worker.capture(key, ROUND) for worker in job.workers for key in keys]
        early += [job.workers[0].push(key, pushes[key][0], landings[key][0], 0, LR) for key in keys]
        wait_all(captures + early)
        captured = assembled(job)
        for key in keys:
            assert sorted(captured[key]) == parts
            np.testing.assert_array_equal(captured[key][0], landed[key])
            for part in parts[1:]:
                np.testing.assert_array_equal(captured[key][part], states[key, part])
            for landing in landings[key][1:]:
                np.testing.assert_array_equal(landing, landings[key][0])
        assert assembled(job) == {}


def random_pushes(random, workers, elements, dtype):
    return [random.randn(elements).astype(dtype) for _ in range(workers)]


def fetched(worker, key, part, elements):
    state = np.empty(elements, "float32")
    worker.fetch(key, part, state).wait(DEADLINE_S)
    return state


def test_a_restored_residual_goes_on_as_if_nothing_had_happened():
    random = np.random.RandomState(3)
    gradients = [[(random.randn(250) / 4).astype("float32") for _ in range(2)] for _ in range(8)]
    with Job(num_workers=2, slice_elements=100) as job:
        key = job.key(250, compression=TWO_BIT)
        job.init(key, np.zeros(250, "float32"))
        for pushed in gradients[:4]:
            job.push(key, pushed)
        residuals = [np.empty(250, "float32") for _ in job.workers]
        wait_all([worker.capture(key, ROUND, residual) for worker, residual in zip(job.workers, residuals)])
        undisturbed = [job.push(key, pushed)[0] for pushed in gradients[4:]]
        assert np.abs(residuals).max() > 0.01
    with Job(num_workers=2, slice_elements=70) as job:
        key = job.key(250, compression=TWO_BIT)
        job.init(key, np.zeros(250, "float32"))
        for worker, residual in zip(job.workers, residuals):
            assert worker.keeps_residual(key)
            worker.restore_residual(key, residual)
        np.testing.assert_array_equal([job.push(key, pushed)[0] for pushed in gradients[4:]], undisturbed)
        with pytest.raises(ValueError, match="key 'key0' can only be restored before the key's first push"):
            job.workers[0].restore_residual(key, residuals[0])
        with pytest.raises(ValueError, match="the landing array has 8 bytes; the key has 1000"):
            job.workers[0].capture(key, ROUND, residuals[0][:2])


def test_wrong_use_is_an_error():
    with Job(num_workers=1) as job:
        key, array = job.key(3), np.zeros(3, "float32")
        worker = job.workers[0]
        assert worker.captured_plan(key) is None and not worker.keeps_residual(key)
        for wrong in (lambda: worker.capture(key, ROUND, array), lambda: worker.restore_residual(key, array)):
            with pytest.raises(ValueError, match="so the key has no residual"):
                wrong()
        for method in (lambda key: worker.capture(key, ROUND), worker.keeps_residual, worker.captured_plan):
            with pytest.raises(ValueError, match="no key with handle 5"):
                method(5)


def test_what_was_captured_outlives_its_server():
    with Job(num_workers=1, num_servers=1) as job:
        key = job.key(5)
        job.init(key, np.arange(5, dtype="float32"))
        job.workers[0].capture(key, ROUND).wait(DEADLINE_S)
        (array,) = job.servers[0].take_captured(ROUND)
    del job
    assert memoryview(array[5]).tolist() == [0, 1, 2, 3, 4]
    assert memoryview(array[5]).readonly


@pytest.mark.parametrize("machines", [[0, 1], [0, 0]])
def test_a_key_that_moves_to_other_partitions_is_captured_with_the_new_ones(machines):
    random = np.random.RandomState(5)
    value = random.randn(23, 5).astype("float32")
    with MovingJob(value, 2, 2, optimizer=SGD, machines=machines) as job:
        gradients = [random_gradient(random, value.shape, "float32") for _ in job.workers]
        captures = []

        def last_round_of_the_old_plan():
            pushes = [
                worker.push_rows(0, *gradient, landing, 0, LR)
                for worker, gradient, landing in zip(job.workers, gradients, job.landings)
            ]
            captures.extend(worker.capture(0, ROUND) for worker in job.workers)
            wait_all(pushes)

        job.move(value, 7, SGD, last_round_of_the_old_plan)
        wait_all(captures)
        captured = assembled(job)
        assert list(captured) == [1]
        np.testing.assert_array_equal(captured[1][0].reshape(value.shape), job.landings[0])
        for worker in job.workers:
            plan = worker.captured_plan(0)
            assert (plan.wire_key, plan.partitions, plan.row_elements) == (1, 7, 5)
