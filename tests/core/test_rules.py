"""The servers' rules that no framework has, against NumPy: dense, by rows, and from a snapshot on."""

import numpy as np
import pytest

from p3.plan.optimizers import FIELDS
from p3.settings import Settings
from p3.worker.session import Session

LION = {"name": "lion", "beta1": 0.9, "beta2": 0.99, "multi_precision": False}
OUTER = {"name": "outer_sgd", "momentum": 0.9, "nesterov": True, "multi_precision": False}
ADAM = {"name": "adam", "beta1": 0.9, "beta2": 0.99, "epsilon": 1e-8, "clip_gradient": -1.0, "multi_precision": False}
ROWS, WIDTH = 11, 3


class Lion:
    """Chen et al. 2023, Algorithm 2, in the weight's type; by row, as rows that nobody touches stay as they are."""

    def __init__(self, weight):
        self.weight, self.momentum = weight.copy(), np.zeros_like(weight)

    def update(self, rows, gradients, lr, wd, rescale):
        lr, wd, rescale, *betas = (
            self.weight.dtype.type(one) for one in (lr, wd, rescale, 0.9, 1 - 0.9, 0.99, 1 - 0.99)
        )
        m, w, g = self.momentum[rows], self.weight[rows], gradients * rescale
        self.weight[rows] = w - lr * (np.sign(betas[0] * m + betas[1] * g) + wd * w)
        self.momentum[rows] = betas[2] * m + betas[3] * g


def _begin(session, sparse, weight, resumed=False):
    key = session.declare("w", weight.shape, weight.dtype, sparse=sparse)
    landing = np.zeros_like(weight)
    session.init(key, session.resumed_value(key) if resumed else weight, landing).wait(30)
    if resumed:
        session.restore(key)
    return key, landing


def _rounds(numbers, shape, dtype):
    """Of each its rows and their gradients."""
    for number in numbers:
        random = np.random.RandomState(number)
        rows = np.sort(random.choice(ROWS, 4, replace=False))
        yield rows, random.randn(*shape).astype(dtype)


def _train(session, key, landing, sparse, rounds, lr=0.05, wd=0.1, rescale=0.5):
    for rows, gradients in rounds:
        scalars = {"lr": lr, "wd": wd, "rescale": rescale}
        if sparse:
            session.pushpull(key, (rows, gradients[rows]), landing, **scalars).wait(30)
        else:
            session.pushpull(key, gradients, landing, **scalars).wait(30)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("sparse", [False, True])
def test_lion_is_that_of_numpy_to_the_bit(sparse, dtype):
    weight = np.random.RandomState(0).randn(ROWS, WIDTH).astype(dtype)
    numpys = Lion(weight)
    with Session.open(Settings()) as session:
        session.set_option(0, "optimizer", LION)
        key, landing = _begin(session, sparse, weight)
        for rows, gradients in _rounds(range(1, 30), weight.shape, dtype):
            _train(session, key, landing, sparse, [(rows, gradients)])
            touched = rows if sparse else slice(None)
            numpys.update(touched, gradients[touched], 0.05, 0.1, 0.5)
            assert landing.tobytes() == numpys.weight.tobytes()
        state = np.zeros_like(weight)
        if sparse:
            session.fetch(key, state, part=1, ids=np.arange(ROWS)).wait(30)
        else:
            session.fetch(key, state, 1).wait(30)
        assert state.tobytes() == numpys.momentum.tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_outer_sgd_of_rate_1_has_the_weight_that_it_was_sent_to_the_bit(dtype):
    random = np.random.RandomState(0)
    first, sent = (random.randn(50, 20) * 10.0 ** random.randint(-9, 9, (50, 20)) for _ in range(2))
    first, sent = first.astype(dtype), sent.astype(dtype)
    with Session.open(Settings()) as session:
        session.set_option(0, "optimizer", dict(OUTER, momentum=0.0, nesterov=False))
        key, landing = _begin(session, False, first)
        session.pushpull(key, sent, landing, lr=1.0).wait(30)
    assert landing.tobytes() == sent.tobytes()
    assert (first - (first - sent)).tobytes() != sent.tobytes()  # a difference could not have given it back


@pytest.mark.parametrize("momentum, nesterov", [(0.0, False), (0.9, False), (0.9, True)])
@pytest.mark.parametrize("lr", [0.3, 0.7, 1.5])
def test_outer_sgd_is_sgd_on_the_difference_from_the_mean(momentum, nesterov, lr):
    """Sutskever et al. as PyTorch has it, of the sum of four workers' weights."""
    random = np.random.RandomState(1)
    weight = random.randn(ROWS, WIDTH)
    velocity = np.zeros_like(weight)
    with Session.open(Settings()) as session:
        session.set_option(0, "optimizer", dict(OUTER, momentum=momentum, nesterov=nesterov))
        key, landing = _begin(session, False, weight)
        for _ in range(20):
            total = 4 * weight + random.randn(*weight.shape)
            session.pushpull(key, total, landing, lr=lr, rescale=0.25).wait(30)
            gradient = weight - total / 4
            velocity = momentum * velocity + gradient
            weight = weight - lr * (gradient + momentum * velocity if nesterov else velocity)
            np.testing.assert_allclose(landing, weight, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("workers", [2, 3, 5, 7, 49, 100])
def test_weights_that_nobody_trains_stay_as_they_are_to_the_bit(workers, momentum, dtype):
    """However their sum, one after the other or in a tree, was rounded."""
    random = np.random.RandomState(2)
    first = (random.randn(40, 25) * 10.0 ** random.randint(-9, 9, (40, 25))).astype(dtype)

    def tree(weight, count):
        return weight if count == 1 else tree(weight, count // 2) + tree(weight, count - count // 2)

    with Session.open(Settings()) as session:
        session.set_option(0, "optimizer", dict(OUTER, momentum=momentum, nesterov=momentum > 0))
        key, landing = _begin(session, False, first)
        for number in range(300):
            total = tree(landing, workers)
            if number % 2 and workers < 10:
                total = sum([landing] * (workers - 1), landing)
            session.pushpull(key, total, landing, lr=0.7, rescale=1 / workers).wait(30)
            assert landing.tobytes() == first.tobytes(), number


def test_a_nan_does_not_go_unnoticed():
    with Session.open(Settings()) as session:
        session.set_option(0, "optimizer", LION)
        key, landing = _begin(session, False, np.ones((1, 2), np.float32))
        session.pushpull(key, np.float32([[np.nan, 0]]), landing, lr=0.5).wait(30)
        assert np.isnan(landing[0, 0]) and landing[0, 1] == 1


def test_lion_is_described_by_its_registry():
    assert list(FIELDS["lion"]) == ["beta1", "beta2", "multi_precision"]
    with Session.open(Settings()) as session, pytest.raises(ValueError, match="optimizer lion: beta2 is 1.0; it must"):
        session.set_option(0, "optimizer", dict(LION, beta2=1.0))


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("optimizer", [ADAM, LION, OUTER], ids=["adam", "lion", "outer"])
def test_from_a_snapshot_on_all_bits_are_as_if_undisturbed(tmp_path, optimizer, sparse):
    weight = np.random.RandomState(0).randn(ROWS, WIDTH).astype(np.float32)
    settings = Settings(snapshot_dir=str(tmp_path), snapshot_every=1)
    for steps in (range(1, 6), range(6, 10)):
        with Session.open(settings) as session:
            done = session.resume().round
            assert done == steps[0] - 1
            session.set_option(0, "optimizer", optimizer)
            key, landing = _begin(session, sparse, weight, resumed=done > 0)
            _train(session, key, landing, sparse, _rounds(steps, weight.shape, np.float32))
            if done == 0:
                session.snapshot(5, [key])
    with Session.open(Settings()) as session:
        session.set_option(0, "optimizer", optimizer)
        key, undisturbed = _begin(session, sparse, weight)
        _train(session, key, undisturbed, sparse, _rounds(range(1, 10), weight.shape, np.float32))
    assert landing.tobytes() == undisturbed.tobytes()
