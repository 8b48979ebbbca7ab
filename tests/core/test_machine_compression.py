"""Compressed keys where workers share a machine: their leader encodes the sum. Against NumPy, to the bit."""

import time

import numpy as np
import pytest
from compressions import sender
from core_jobs import SKIP, Job, wait_all
from processes import wait_until

from p3 import codecs
from p3.placement import FRAME_BYTES

ELEMENTS, SLICE = 25_001, 10_000
MACHINES = ([0, 1, 0, 1], [7, 7, 7], [1, 0, 0])
KINDS = {"fp16": {}, "bf16": {}, "1bit": {}, "int8": {}, "int4": {}, "2bit": {"threshold": 0.5}, "topk": {}}
KEEPS = ("2bit", "1bit", "int8", "int4", "topk")  # what they leave out


def test_every_codec_that_adds_up_is_here():
    assert set(KINDS) == set(codecs.of_gradients())


def option(kind):
    return dict(KINDS[kind], type=kind)


def ranks_of(machines):
    """By machine, in the order of their lowest ranks."""
    return [[rank for rank, one in enumerate(machines) if one == machine] for machine in dict.fromkeys(machines)]


class Reference:
    """What all workers get of a round."""

    def __init__(self, kind, machines, slice_elements=SLICE):
        self.machines = ranks_of(machines)
        self.senders = [sender(kind, slice_elements, **KINDS[kind]) for _ in self.machines]
        carries_sums = codecs.codecs()[kind].carries_sums
        self.back = sender(kind, slice_elements, **KINDS[kind]) if carries_sums else lambda total: total

    def round(self, gradients):
        """Up to three of anything are added in sequence. None where nobody has a gradient."""
        total = None
        for ranks, encode in zip(self.machines, self.senders):
            given = [gradients[rank] for rank in ranks if gradients[rank] is not SKIP]
            if given:
                sent = encode(sum(given[1:], given[0]))
                total = sent if total is None else total + sent
        return total if total is None else self.back(total)


def random_gradients(random, workers):
    return [random.randn(ELEMENTS).astype("float32") for _ in range(workers)]


@pytest.mark.parametrize("machines", MACHINES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_leader_encodes_the_sum_of_its_machine_and_all_get_the_same_bits(kind, machines):
    random, reference, workers = np.random.RandomState(7), Reference(kind, machines), len(machines)
    with Job(workers, 2, SLICE, machines=machines) as job:
        key = job.key(ELEMENTS, compression=option(kind))
        (value, *_others) = job.init(key, np.zeros(ELEMENTS, "float32"))
        before, began = [worker.counters() for worker in job.workers], time.monotonic()
        skipping = [set(((), (number % workers,), (0, 1), range(workers))[number % 4]) for number in range(8)]
        for number, absent in enumerate(skipping):
            gradients = [
                SKIP if rank in absent else one for rank, one in enumerate(random_gradients(random, workers))
            ]
            wanted = reference.round(gradients)
            for landing, updated in job.push_or_skip(key, gradients, value):
                assert updated == (wanted is not None)
                np.testing.assert_array_equal(landing, value if wanted is None else wanted, "round %d" % number)
            value = value if wanted is None else wanted
        frames = [min(SLICE, ELEMENTS - begin) for begin in range(0, ELEMENTS, SLICE)]
        heartbeats = 1000 + 2 * FRAME_BYTES * (time.monotonic() - began)  # at most: one a second to each of two servers
        for ranks in ranks_of(machines):
            for rank in ranks:
                if rank != ranks[0]:
                    after = job.workers[rank].counters()
                    assert after["bytes_sent"] - before[rank]["bytes_sent"] < heartbeats
                    assert after["local"]["bytes_sent"] - before[rank]["local"]["bytes_sent"] > 3 * 4 * ELEMENTS
                    continue
                pushes = sum(not absent >= set(ranks) for absent in skipping)
                content = pushes * sum(codecs.push_bytes(option(kind), elements) for elements in frames)
                least = before[rank]["bytes_sent"] + content + len(skipping) * len(frames) * FRAME_BYTES
                sent = lambda: job.workers[rank].counters()["bytes_sent"]  # noqa: E731
                wait_until(lambda: sent() >= least, "no more than %d bytes" % sent())  # counted behind the answers
                assert sent() < least + heartbeats


@pytest.mark.parametrize("kind", KEEPS)
def test_a_restored_residual_of_a_leader_goes_on_as_if_nothing_had_happened(kind):
    machines, random = [0, 1, 0, 1], np.random.RandomState(3)
    rounds = [random_gradients(random, 4) for _ in range(6)]
    kept = []
    with Job(4, 2, SLICE, machines=machines) as job:
        key = job.key(ELEMENTS, compression=option(kind))
        job.init(key, np.zeros(ELEMENTS, "float32"))
        for gradients in rounds[:3]:
            job.push(key, gradients)
        assert [worker.residual_floats(key) for worker in job.workers] == [ELEMENTS, ELEMENTS, 0, 0]
        kept = [np.empty(worker.residual_floats(key), "float32") for worker in job.workers]
        wait_all([worker.capture(key, 3, residual) for worker, residual in zip(job.workers, kept)])
        undisturbed = [job.push(key, gradients)[0] for gradients in rounds[3:]]
        assert min(np.abs(residual).max() for residual in kept[:2]) > 0.01
    with Job(4, 2, 7_000 if kind == "2bit" else SLICE, machines=machines) as job:
        key = job.key(ELEMENTS, compression=option(kind))
        job.init(key, np.zeros(ELEMENTS, "float32"))
        for worker, residual in zip(job.workers[:2], kept):
            worker.restore_residual(key, residual)
        for worker in job.workers[2:]:
            with pytest.raises(ValueError, match="is kept by the leader of this machine"):
                worker.restore_residual(key, np.zeros(0, "float32"))
        np.testing.assert_array_equal([job.push(key, gradients)[0] for gradients in rounds[3:]], undisturbed)


@pytest.mark.parametrize("machines", MACHINES, ids=str)
@pytest.mark.parametrize("kind", KEEPS)
def test_a_round_that_a_loss_scaler_takes_back_leaves_no_trace(kind, machines):
    """One worker's gradient overflows in one slice, so all leave the step out; in a second such step the leaders of all
    machines have none."""
    workers, random = len(machines), np.random.RandomState(5)
    rounds = [random_gradients(random, workers) for _ in range(6)]
    reference = Reference(kind, machines)
    with Job(workers, 2, SLICE, machines=machines) as job:
        key = job.key(ELEMENTS, compression=option(kind))
        job.init(key, np.zeros(ELEMENTS, "float32"))
        for worker in job.workers:
            worker.keep_former_residual(key)
        for number, gradients in enumerate(rounds):
            if number in (2, 4):
                overflows = random_gradients(random, workers)
                overflows[-1][SLICE + 3] = np.inf
                for ranks in ranks_of(machines) if number == 4 else ():
                    overflows[ranks[0]] = SKIP if len(ranks) > 1 else overflows[ranks[0]]
                ((landing, _), *_others) = job.push_or_skip(key, overflows, np.zeros(ELEMENTS, "float32"))
                assert not np.isfinite(landing).all() and np.isfinite(landing[:SLICE]).all()
                for worker in job.workers:
                    worker.change_residual(key, True, 1.0)
            wanted = reference.round(gradients)
            for landing in job.push(key, gradients):
                np.testing.assert_array_equal(landing, wanted, "round %d" % number)


def test_an_average_is_over_all_who_had_a_gradient_whoever_pushed_for_them():
    with Job(3, 1, SLICE, machines=[0, 0, 1]) as job:
        key = job.key(4, compression=option("fp16"), reduction="average")
        job.init(key, np.zeros(4, "float32"))
        gradients = [SKIP, np.full(4, 3, "float32"), np.full(4, 6, "float32")]
        for landing, _updated in job.push_or_skip(key, gradients, np.zeros(4, "float32")):
            np.testing.assert_array_equal(landing, np.full(4, 4.5, "float32"))
