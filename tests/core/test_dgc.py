"""Deep gradient compression, by cores in one process, against a NumPy reference to the bit."""

import itertools
import math

import numpy as np
import pytest
from compressions import Dgc, slices_of, take_steps
from core_jobs import MOMENTUM, Job, wait_all

from p3 import codecs
from p3._core import DTYPES
from p3.placement import FRAME_BYTES
from p3.worker import dgc

SLICE = 1000
OPTIONS = {
    "plain": {"ratio": 0.01},
    "one": {"ratio": 1e-9},
    "unmasked": {"ratio": 0.05, "masking": False},
    "warm-up": {"ratio": 0.001, "warmup_steps": 6},
    "clipped": {"ratio": 0.01, "clip_norm": 0.7},
    "nearly all": {"ratio": 0.6},
    "all": {"ratio": 1.0, "masking": False},
}


class DgcJob(Job):
    """One key with these options, and the reference beside it."""

    def __init__(self, elements, options, num_workers, momentum=0.9, num_servers=2, **more):
        super().__init__(num_workers, num_servers, SLICE, **more)
        self.compression = codecs.complete({"type": "dgc", **options})
        self.set_optimizer(dict(MOMENTUM, momentum=momentum))
        self.elements = elements
        self.handle = self.key(elements, compression=self.compression)
        clip_norm = dgc.local_clip_norm(self.compression, num_workers)
        for worker in self.workers:
            worker.set_momentum(self.handle, momentum, clip_norm)
        self.senders = [
            Dgc(elements, SLICE, momentum, num_workers=num_workers, **options) for _ in range(num_workers)
        ]
        self.weight = np.random.RandomState(elements).randn(elements).astype("float32")
        self.landings = self.init(self.handle, self.weight)
        self.round = 0

    def take(self, gradients, lr=0.1, wd=0.0, rescale=0.5):
        """One round, and what it must lead to; a gradient of None is a skip. (sent by each, expected weight)"""
        self.round += 1
        operations = []
        for worker, gradient, landing in zip(self.workers, gradients, self.landings):
            if gradient is None:
                operations.append(worker.skip(self.handle, landing))
            else:
                scalars = (lr, wd, rescale, 0.0, 1.0)
                operations.append(worker.push(self.handle, gradient, landing, 0, scalars))
        wait_all(operations)
        sent = [
            sender(gradient, self.round, lr, rescale)
            for sender, gradient in zip(self.senders, gradients)
            if gradient is not None
        ]
        if sent:
            self.weight = take_steps(self.weight, sent, lr, wd)
        assert all(operation.updated == bool(sent) for operation in operations)
        return sent

    def check(self):
        for landing in self.landings:
            np.testing.assert_array_equal(landing, self.weight)
        assert len({landing.tobytes() for landing in self.landings}) == 1


def random_gradients(random, job):
    return [random.randn(job.elements).astype("float32") for _ in job.workers]


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("elements", [0, 1, 3, 1003, 12345])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_weights_are_those_of_numpy_to_the_bit(options, elements, num_workers):
    random = np.random.RandomState(7)
    with DgcJob(elements, options, num_workers) as job:
        for step in range(9):
            job.take(random_gradients(random, job), lr=0.1 / (1 + step), wd=0.01 if step % 2 else 0.0)
            job.check()


@pytest.mark.parametrize("more", [{"machines": [0, 1, 0]}, {"threads": 2}, {"ring_bytes": 4096}], ids=str)
def test_weights_are_the_same_however_the_nodes_are_joined(more):
    random = np.random.RandomState(8)
    with DgcJob(5000, {"ratio": 0.02}, 3, **more) as job:
        for _ in range(5):
            gradients = random_gradients(random, job)
            if "machines" in more:  # workers of one machine are added up first
                job.senders = [job.senders[0], job.senders[2], job.senders[1]]
                gradients = [gradients[0], gradients[2], gradients[1]]
                weight = job.weight
                operations = [
                    worker.push(job.handle, gradient, landing, 0, (0.1, 0.0, 1.0, 0.0, 1.0))
                    for worker, gradient, landing in zip(
                        job.workers, [gradients[0], gradients[2], gradients[1]], job.landings
                    )
                ]
                wait_all(operations)
                job.round += 1
                sent = [sender(gradient, job.round, 0.1) for sender, gradient in zip(job.senders, gradients)]
                job.weight = take_steps(weight, sent, 0.1)
                job.senders = [job.senders[0], job.senders[2], job.senders[1]]
            else:
                job.take(gradients)
            job.check()


def test_workers_may_skip_rounds_in_every_mixture():
    random = np.random.RandomState(9)
    with DgcJob(2500, {"ratio": 0.02, "warmup_steps": 4}, 3) as job:
        for present in itertools.product([True, False], repeat=3):
            gradients = [gradient if here else None for here, gradient in zip(present, random_gradients(random, job))]
            job.take(gradients, wd=0.01)
            job.check()


def test_nothing_is_lost_of_whole_numbers():
    """All that was sent, and what each worker keeps, are the sum of all that it has accumulated."""
    random = np.random.RandomState(10)
    with DgcJob(3000, {"ratio": 0.01}, 2, momentum=1.0) as job:
        job.weight = np.zeros(3000, "float32")
        job.landings = job.init(job.handle, job.weight)
        accumulated = np.zeros((2, 3000), "float32")
        for _ in range(12):
            gradients = [random.randint(-5, 6, 3000).astype("float32") for _ in range(2)]
            for rank, (sender, gradient) in enumerate(zip(job.senders, gradients)):
                accumulated[rank] += sender.u + gradient
            job.take(gradients, lr=1.0, rescale=1.0)
            job.check()
        kept = [np.empty(worker.residual_floats(job.handle), "float32") for worker in job.workers]
        wait_all([worker.capture(job.handle, 1, array) for worker, array in zip(job.workers, kept)])
        v = [array[3000:6000] for array in kept]
        assert np.count_nonzero(v[0]) > 2000 and not np.array_equal(v[0], v[1])
        np.testing.assert_array_equal(-job.landings[0] + v[0] + v[1], accumulated[0] + accumulated[1])


@pytest.mark.parametrize("num_workers", [1, 2])
def test_all_elements_without_masking_are_plain_momentum(num_workers):
    random = np.random.RandomState(11)
    with DgcJob(2500, {"ratio": 1.0, "masking": False}, num_workers) as job, Job(num_workers) as plain:
        plain.set_optimizer(MOMENTUM)
        key = plain.key(2500)
        plain.init(key, job.weight)
        for step in range(8):
            gradients = random_gradients(random, job)
            scalars = (0.1 / (1 + step), 0.0, 0.5, 0.0, 1.0)
            job.take(gradients, lr=scalars[0])
            expected = plain.push(key, gradients, scalars)[0]
            if num_workers == 1:
                np.testing.assert_array_equal(job.landings[0], expected)
            else:  # a sum of momenta is not rounded as the momentum of a sum
                np.testing.assert_allclose(job.landings[0], expected, rtol=1e-5, atol=1e-6)


def test_rank_zero_may_give_a_new_value_and_the_steps_go_on_from_there():
    random = np.random.RandomState(12)
    with DgcJob(2500, {"ratio": 0.02}, 2) as job:
        for value in (3.0, -4.0):
            job.take(random_gradients(random, job))
            job.weight = np.full(2500, value, "float32")
            for landing, fresh in zip(job.landings, job.init(job.handle, job.weight)):
                landing[:] = fresh
            job.take(random_gradients(random, job))
            job.check()


def test_what_is_kept_goes_on_in_another_job_as_if_nothing_had_happened():
    random = np.random.RandomState(13)
    options = {"ratio": 0.01, "warmup_steps": 8}
    with DgcJob(2500, options, 2) as job:
        for _ in range(4):
            job.take(random_gradients(random, job))
        kept = [np.empty(worker.residual_floats(job.handle), "float32") for worker in job.workers]
        wait_all([worker.capture(job.handle, 1, array) for worker, array in zip(job.workers, kept)])
        senders, weight = job.senders, job.weight
    with DgcJob(2500, options, 2) as job:
        for worker, array in zip(job.workers, kept):
            worker.restore_residual(job.handle, array)
        job.senders, job.weight, job.round = senders, weight, 4
        job.landings = job.init(job.handle, weight)
        for _ in range(6):
            job.take(random_gradients(random, job))
            job.check()
        with pytest.raises(ValueError, match="only be restored before the key's first push"):
            job.workers[0].restore_residual(job.handle, kept[0])


# Bytes


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("elements", [3, 1003, 12345])
@pytest.mark.parametrize("ratio", [0.001, 0.03, 0.6])
def test_bytes_are_those_of_the_formula(ratio, elements, is_shared):
    """Workers that send the same elements, and workers that send others, as far as there are as many."""
    num_workers = 3
    slices = [end - begin for begin, end in slices_of(elements, SLICE)]
    with DgcJob(elements, {"ratio": ratio, "warmup_steps": 4}, num_workers, momentum=0.0, num_servers=1) as job:
        for round in range(1, 7):
            gradients = [np.zeros(elements, "float32") for _ in range(num_workers)]
            counts = [codecs.sent(job.compression, size, round) for size in slices]
            touched = []
            for begin, count, size in zip(itertools.accumulate([0, *slices]), counts, slices):
                places = set()
                for rank in range(num_workers):
                    first = 0 if is_shared else rank * count
                    own = [(first + i) % size for i in range(count)]
                    gradients[rank][[begin + place for place in own]] = 100.0 + np.arange(count) + rank
                    places.update(own)
                touched.append(len(places))
            pushed = sum(FRAME_BYTES + codecs.push_bytes(job.compression, size, round) for size in slices)
            back = sum(FRAME_BYTES + codecs.payload_bytes(job.compression, *one) for one in zip(touched, slices))
            before = [worker.traffic_with(0) for worker in job.workers]
            job.take(gradients, lr=1.0, rescale=1.0)
            job.check()
            for worker, then in zip(job.workers, before):
                now = worker.traffic_with(0)
                pings = 80  # a heartbeat, should the machine be slow
                up, down = (now[name] - then[name] for name in ("bytes_sent", "bytes_received"))
                assert (up - pushed) % pings == 0 and up < pushed + 800
                assert (down - back) % pings == 0 and down < back + 800


def test_the_formula_is_that_of_the_paper_for_large_tensors():
    """0.1% of the elements, each of 6 bytes instead of 4."""
    pushed = 20 * (FRAME_BYTES + codecs.push_bytes({"type": "dgc", "ratio": 0.001}, 50000))
    assert pushed == 20 * (80 + 4 + 6 * 50)
    plain = 20 * (80 + 4 * 50000)
    assert 500 < plain / pushed < 600


def test_more_leave_in_the_warm_up():
    compression = {"type": "dgc", "ratio": 0.01, "warmup_steps": 8}
    shares = [1 / 4, 1 / 4, 1 / 16, 1 / 16, 1 / 64, 1 / 64, 0.01, 0.01, 0.01]
    assert [codecs.sent(compression, 6400, round) for round in range(1, 10)] == [6400 * share for share in shares]
    assert codecs.sent(compression, 6400) == 64


# What it is for


def test_it_needs_options_that_make_sense():
    with Job() as job:
        for ratio in (0.0, -0.1, 1.5, float("nan")):
            with pytest.raises(ValueError, match="ratio"):
                job.workers[0].declare("x", 10, DTYPES["float32"], {"type": "dgc", "ratio": ratio})
        with pytest.raises(ValueError, match="keeps no|leaves nothing out"):
            job.workers[0].residual_floats(job.key(3))


def test_the_norm_of_many_workers_is_that_of_the_option():
    assert dgc.local_clip_norm({"clip_norm": 6.0}, 4) == 3.0
    assert math.isclose(dgc.local_clip_norm({"clip_norm": 1.0}, 3), 3**-0.5)
