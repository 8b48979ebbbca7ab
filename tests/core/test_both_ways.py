"""What comes back is encoded: cores in one process, against NumPy and the same job without it, to the bit."""

import itertools

import numpy as np
import pytest
from compressions import sender, slices_of
from core_jobs import ADAM, DEADLINE_S, LR, MOMENTUM, SGD, Job, wait_all

from p3 import codecs
from p3._core import LEFT_OUT, MASTER
from p3.placement import FRAME_BYTES
from p3.plan.optimizers import FIELDS

SLICE = 1000
ROUND = 7  # of a snapshot
OPTIONS = {"2bit": {"threshold": 0.05}}
KINDS = [name for name, codec in codecs.codecs().items() if codec.encodes_values]
WITH_RESIDUAL = [name for name in KINDS if codecs.codecs()[name].residuals]
SIZES = [0, 1, 3, 1001, 2500]  # a slice of one element is shorter as it is


def compression(kind):
    return codecs.codecs()[kind].complete(**OPTIONS.get(kind, {}))


def shortened(kind, elements):
    """The slices that come back encoded: (begin, end)."""
    return [
        (begin, end)
        for begin, end in slices_of(elements, SLICE)
        if codecs.push_bytes(compression(kind), end - begin) < 4 * (end - begin)
    ]


class Back:
    """What comes back of one array after the other, each of the whole key; the senders keep what they leave out."""

    def __init__(self, kind, elements):
        self.senders = {
            place: sender(kind, SLICE, **OPTIONS.get(kind, {})) for place in shortened(kind, elements)
        }

    def __call__(self, array):
        made = array.copy()
        for (begin, end), send in self.senders.items():
            made[begin:end] = send(array[begin:end])
        return made


class BothWays(Job):
    """One key, whose landing arrays stay. With an optimizer a job without the codec beside it, which has the exact
    weights."""

    def __init__(self, kind, elements, optimizer=ADAM, num_workers=2, up=None, reduction="sum", first=None, **more):
        super().__init__(num_workers, 2, SLICE, **more)
        self.kind, self.elements, self.optimizer, self.exact = kind, elements, optimizer, None
        self.handle = self.key(elements, compression=up, reduction=reduction, down=compression(kind))
        self.random = np.random.RandomState(elements)
        if optimizer is not None:
            self.set_optimizer(optimizer)
            self.plain = Job(num_workers, 2, SLICE, **more)
            self.plain.set_optimizer(optimizer)
            self.plain_key = self.plain.key(elements, compression=up, reduction=reduction)
        self.begin(self.random.randn(elements).astype("float32") if first is None else first)

    def begin(self, value):
        self.published = value
        self.landings = self.init(self.handle, value)
        if self.optimizer is not None:
            self.plain.init(self.plain_key, value)
            self.exact = value

    def __exit__(self, *ends):
        super().__exit__(*ends)
        if self.optimizer is not None:
            self.plain.__exit__(*ends)

    def gradients(self):
        return [(self.random.randn(self.elements) / 4).astype("float32") for _ in self.workers]

    def round(self, gradients=None):
        """One round; a gradient of None is a skip. Whether it was an update, on all workers."""
        gradients = self.gradients() if gradients is None else gradients
        operations = [
            worker.skip(self.handle, landing)
            if gradient is None
            else worker.push(self.handle, gradient, landing, 0, LR)
            for worker, gradient, landing in zip(self.workers, gradients, self.landings)
        ]
        wait_all(operations)
        assert len({landing.tobytes() for landing in self.landings}) == 1
        if self.optimizer is not None:
            self.exact = self._plain_round(gradients)
        (updated,) = {operation.updated for operation in operations}
        return updated

    def _plain_round(self, gradients):
        landings = [self.exact.copy() for _ in gradients]
        wait_all([
            worker.skip(self.plain_key, landing)
            if gradient is None
            else worker.push(self.plain_key, gradient, landing, 0, LR)
            for worker, gradient, landing in zip(self.plain.workers, gradients, landings)
        ])
        return landings[0]

    def publish(self):
        """What all workers must have by now, from what they had."""
        self.published = self.published + Back(self.kind, self.elements)(self.exact - self.published)
        for begin, end in set(slices_of(self.elements, SLICE)) - set(shortened(self.kind, self.elements)):
            self.published[begin:end] = self.exact[begin:end]

    def check(self):
        np.testing.assert_array_equal(self.landings[0], self.published)
        np.testing.assert_array_equal(self.part(MASTER), self.exact)

    def part(self, part):
        array = np.empty(self.elements, "float32")
        self.workers[-1].fetch(self.handle, part, array).wait(DEADLINE_S)
        return array


# The servers update


@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAM], ids=["sgd", "adam"])
@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("elements", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_all_workers_have_what_numpy_publishes_and_the_servers_what_plain_training_has(
    kind, elements, num_workers, optimizer
):
    with BothWays(kind, elements, optimizer, num_workers) as job:
        for _ in range(6):
            assert job.round()
            job.publish()
            job.check()


NUMBERS = {
    "momentum": 0.9, "beta1": 0.9, "beta2": 0.99, "gamma1": 0.9, "gamma2": 0.9, "rho": 0.9, "epsilon": 1e-3,
    "beta": 1.0, "lamda": 0.04, "lamda1": 0.1, "wd_lh": 0.1, "clip_gradient": -1.0, "clip_weights": -1.0,
    "multi_precision": False,
}  # fmt: skip
# Those whose pushes tell more than a learning rate are in tests/mxnet and tests/torch.
RULES = "nag adagrad rmsprop rmsprop_centered signum ftrl adadelta adamax dcasgd lion".split()


@pytest.mark.parametrize("rule", RULES)
def test_with_every_rule_that_servers_have(rule):
    with BothWays("int8", 1001, {"name": rule, **{field: NUMBERS[field] for field in FIELDS[rule]}}) as job:
        for _ in range(6):
            assert job.round()
            job.publish()
            job.check()


# What a codec may be off an element at most, of a change in its block and the largest of that; scales are bfloat16.
OFF = {
    "int8": (128, lambda change: change.max() / 254 * (1 + 2**-8 + 1e-5)),
    "int4": (64, lambda change: change.max() / 14 * (1 + 2**-8 + 1e-5)),
    "bf16": (1, lambda change: change.max() * 2**-8),
    "fp16": (SLICE, lambda change: change * 2**-11 + change.max() * 2**-28),
}


@pytest.mark.parametrize("elements", [2500, 100])
@pytest.mark.parametrize("kind", list(OFF))
def test_the_published_value_is_as_close_as_the_last_change_allows(kind, elements):
    block, off = OFF[kind]
    with BothWays(kind, elements) as job:
        for _ in range(20):
            before = job.landings[0].copy()
            job.round()
            change = np.abs(job.exact - before)
            for first, end in slices_of(elements, SLICE):
                for begin in range(first, end, block):
                    part = slice(begin, min(begin + block, end))
                    error = np.abs(job.exact[part] - job.landings[0][part])
                    rounding = 4 * np.spacing(np.abs(job.exact[part]).max() + change[part].max())
                    assert (error <= off(change[part]) + rounding).all()


@pytest.mark.parametrize("kind", ["int8", "1bit"])
@pytest.mark.parametrize("up", ["int8", "fp16"])
def test_gradients_leave_in_another_codec_or_in_the_same(kind, up):
    with BothWays(kind, 2500, num_workers=2, up=compression(up)) as job:
        for _ in range(5):
            job.round()
            job.publish()
            job.check()


@pytest.mark.parametrize("machines", [[0, 0, 1], [0, 1, 0], [0, 0, 0]])
@pytest.mark.parametrize("kind", ["int8", "bf16"])
def test_workers_of_one_machine_get_the_whole_value_of_their_leader(kind, machines):
    with BothWays(kind, 2500, num_workers=3, machines=machines) as job:
        for present in [(1, 1, 1), (0, 1, 1), (1, 0, 0), (0, 0, 0), (0, 0, 1), (1, 1, 1)]:
            gradients = [one if here else None for one, here in zip(job.gradients(), present)]
            assert job.round(gradients) == any(present)
            if any(present):
                job.publish()
            job.check()


def test_workers_may_skip_rounds_in_every_mixture():
    with BothWays("int8", 1001, num_workers=3) as job:
        job.round()
        job.publish()
        for present in itertools.product([True, False], repeat=3):
            gradients = [one if here else None for one, here in zip(job.gradients(), present)]
            assert job.round(gradients) == any(present)
            if any(present):
                job.publish()
            job.check()


@pytest.mark.parametrize("number", [np.inf, np.nan])
@pytest.mark.parametrize("kind", KINDS)
def test_where_a_weight_is_not_finite_its_slice_comes_whole_and_the_others_encoded(kind, number):
    with BothWays(kind, 2500, MOMENTUM) as job:
        job.round()
        job.publish()
        gradients = job.gradients()
        gradients[1][1500] = number
        for step in range(3):
            job.round(gradients if step == 0 else None)
            others = job.published.copy()
            job.publish()
            job.published[1000:2000] = job.exact[1000:2000]
            assert not np.isfinite(job.exact[1500]) and np.isfinite(np.delete(job.exact, 1500)).all()
            assert not np.array_equal(job.published[:1000], others[:1000])
            job.check()


def test_a_change_beyond_the_range_of_float16_is_scaled():
    with BothWays("fp16", 100, SGD) as job:
        gradients = job.gradients()
        gradients[0][7] = 1e6
        job.round(gradients)
        assert np.abs(job.exact[7]) > 65504
        job.publish()
        job.check()
        assert np.isfinite(job.published).all()
        job.round()
        job.publish()
        job.check()


def test_a_new_value_begins_as_the_published_and_the_exact_one():
    with BothWays("int8", 2500) as job:
        for _ in range(2):
            for _ in range(2):
                job.round()
                job.publish()
            job.begin(job.random.randn(2500).astype("float32"))
            job.check()
            job.round()
            job.publish()
            job.check()


# The workers update


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("elements", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_sums_come_back_as_numpy_encodes_them_and_the_servers_keep_what_is_left(
    kind, elements, num_workers, reduction
):
    back = Back(kind, elements)
    given, got = np.zeros(elements), np.zeros(elements)
    with BothWays(kind, elements, None, num_workers, reduction=reduction) as job:
        for _ in range(6):
            gradients = job.gradients()
            assert job.round(gradients)
            total = sum_by_rank(gradients)
            total = total / np.float32(num_workers) if reduction == "mean" else total
            np.testing.assert_array_equal(job.landings[0], back(total))
            given, got = given + total, got + job.landings[0]
        if kind in WITH_RESIDUAL:
            np.testing.assert_allclose(got + job.part(LEFT_OUT), given, rtol=1e-5, atol=1e-5)


def sum_by_rank(gradients):
    """As a server adds them up."""
    if len(gradients) == 3:
        return gradients[0] + gradients[1] + gradients[2]
    return sum(gradients[1:], gradients[0])


@pytest.mark.parametrize("kind", WITH_RESIDUAL)
def test_a_sum_that_is_not_finite_is_nan_on_all_workers_and_leaves_nothing_behind(kind):
    back = Back(kind, 2500)
    with BothWays(kind, 2500, None) as job:
        for step in range(5):
            gradients = job.gradients()
            if step == 2:
                gradients[0][1500] = np.inf
                kept = job.part(LEFT_OUT)
            job.round(gradients)
            total = gradients[0] + gradients[1]
            if step == 2:
                total[1000:2000] = np.nan
                assert np.isnan(job.landings[0][1000:2000]).all()
                np.testing.assert_array_equal(job.part(LEFT_OUT)[1000:2000], kept[1000:2000])
                for place, send in back.senders.items():
                    if place != (1000, 2000):
                        send(total[slice(*place)])
            else:
                np.testing.assert_array_equal(job.landings[0], back(total))


@pytest.mark.parametrize("machines", [[0, 0, 1], [0, 1, 0]])
def test_sums_go_whole_to_the_other_workers_of_a_machine(machines):
    """Of a machine they are added up first: so the reference has whole numbers."""
    back = Back("int8", 2500)
    with BothWays("int8", 2500, None, 3, machines=machines) as job:
        for _ in range(4):
            gradients = [job.random.randint(-9, 10, 2500).astype("float32") for _ in range(3)]
            job.round(gradients)
            np.testing.assert_array_equal(job.landings[0], back(sum(gradients)))


# Snapshots


def captured(job):
    wait_all([worker.capture(job.handle, ROUND) for worker in job.workers])
    return [server.take_captured(ROUND) for server in job.servers]


@pytest.mark.parametrize("now", [1, 2, 3])
@pytest.mark.parametrize("stored", [False, True], ids=["loaded by servers", "brought by rank 0"])
@pytest.mark.parametrize("optimizer", [ADAM, None], ids=["adam", "sums"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_job_goes_on_from_what_was_captured_as_if_nothing_had_happened(kind, optimizer, stored, now):
    with BothWays(kind, 1001, optimizer) as job:
        for _ in range(4):
            job.round()
        snapshot = captured(job)
        value, random = job.landings[0].copy(), job.random
        first, undisturbed = random.randn(4, 1001).astype("float32"), []
        for one in first:
            job.round([one, np.zeros_like(one)])
            undisturbed.append(job.landings[0].copy())
    with Job(now, 2, SLICE) as job:
        key = job.key(1001, down=compression(kind))
        if optimizer is not None:
            job.set_optimizer(optimizer)
        parts = {}
        for server, arrays in zip(job.servers, snapshot):
            for _, piece, part, dtype, _, memory in arrays:
                parts.setdefault(part, {})[piece] = np.frombuffer(memory, dtype)
                if not stored:
                    server.load(key, piece, part, bytes(memory))
        has_kept = kind in WITH_RESIDUAL if optimizer is None else True
        assert (max(parts) in (MASTER, LEFT_OUT)) == has_kept
        whole = {part: np.concatenate([pieces[n] for n in sorted(pieces)]) for part, pieces in parts.items()}
        np.testing.assert_array_equal(whole[0], value)
        landings = job.init(key, value) if stored else asked_for(job, key, 1001)
        for landing in landings:
            np.testing.assert_array_equal(landing, value)
        if stored:
            wait_all([job.workers[0].store(key, part, array) for part, array in whole.items() if part != 0])
        for one, expected in zip(first, undisturbed):
            gradients = [one] + [np.zeros_like(one)] * (now - 1)
            wait_all([
                worker.push(key, gradient, landing, 0, LR)
                for worker, gradient, landing in zip(job.workers, gradients, landings)
            ])
            for landing in landings:
                np.testing.assert_array_equal(landing, expected)


def asked_for(job, key, elements):
    landings = [np.empty(elements, "float32") for _ in job.workers]
    wait_all([worker.init(key, None, landing) for worker, landing in zip(job.workers, landings)])
    return landings


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("optimizer", [ADAM, None], ids=["change", "sum"])
def test_where_the_first_worker_is_gone_who_asks_gets_what_all_have(kind, optimizer):
    with BothWays(kind, 1001, optimizer, 3, local_aggregation=False, outlives_workers=True) as job:
        job.round()
        for server in job.servers:
            server.dismiss_worker(0)
        job.workers.pop(0).close(0)
        for landing in asked_for(job, job.handle, 1001):
            np.testing.assert_array_equal(landing, job.landings[0])


def test_a_job_without_the_codec_goes_on_from_the_exact_value():
    with BothWays("int8", 1001) as job:
        for _ in range(4):
            job.round()
        snapshot, exact = captured(job), job.exact
        assert not np.array_equal(exact, job.landings[0])
    with Job(2, 2, SLICE) as job:
        key = job.key(1001)
        job.set_optimizer(ADAM)
        for server, arrays in zip(job.servers, snapshot):
            for _, piece, part, _, _, memory in arrays:
                server.load(key, piece, part, bytes(memory))
        for landing in asked_for(job, key, 1001):
            np.testing.assert_array_equal(landing, exact)


# Bytes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("optimizer", [ADAM, None], ids=["change", "sum"])
def test_bytes_are_those_of_the_formula(kind, optimizer):
    elements = 2503
    with BothWays(kind, elements, optimizer) as job:
        job.round()
        before = [worker.counters()["bytes_received"] for worker in job.workers]
        job.round()
        sizes = [end - begin for begin, end in slices_of(elements, SLICE)]
        expected = sum(FRAME_BYTES + codecs.bytes_back(compression(kind), size) for size in sizes)
        for worker, was in zip(job.workers, before):
            got = worker.counters()["bytes_received"] - was
            assert (got - expected) % FRAME_BYTES == 0 and got < expected + 10 * FRAME_BYTES  # heartbeats
