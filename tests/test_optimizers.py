"""The servers' optimizers against mx.optimizer, step by step, and the descriptions that select them."""

import importlib.util
import math
import random
import subprocess
import sys

import numpy as np
import pytest

from p3._kernels import NativeOptimizer, use_avx2
from p3.server.optimizers import NotOnServer, describe, round_scalars, validate

if importlib.util.find_spec("mxnet") is None:
    pytest.skip("MXNet is not installed: pip install mxnet==1.9.1", allow_module_level=True)
import mxnet as mx  # noqa: E402

STEPS = 50
FLOAT16_CODE = 2

# Rates stay above 1e-4, where MXNet's own reading of decimal numbers is exact: below, it may be off by one unit in
# the last place of float32.
OPTIMIZERS = {
    "sgd": lambda **more: mx.optimizer.SGD(learning_rate=0.1, **more),
    "sgd-momentum": lambda **more: mx.optimizer.SGD(learning_rate=0.1, momentum=0.9, **more),
    "nag-plain": lambda **more: mx.optimizer.NAG(learning_rate=0.1, **more),
    "nag": lambda **more: mx.optimizer.NAG(learning_rate=0.05, momentum=0.9, **more),
    "adam": lambda **more: mx.optimizer.Adam(learning_rate=0.01, **more),
    "adagrad": lambda **more: mx.optimizer.AdaGrad(learning_rate=0.1, **more),
    "rmsprop": lambda **more: mx.optimizer.RMSProp(learning_rate=0.01, **more),
    "rmsprop-clip-weights": lambda **more: mx.optimizer.RMSProp(learning_rate=0.01, clip_weights=0.5, **more),
    "rmsprop-centered": lambda **more: mx.optimizer.RMSProp(learning_rate=0.001, centered=True, **more),
    "rmsprop-centered-clip-weights": lambda **more: mx.optimizer.RMSProp(
        learning_rate=0.001, centered=True, gamma1=0.95, gamma2=0.8, clip_weights=0.5, **more
    ),
}
VARIANTS = {
    "bare": {},
    "decay": {"wd": 0.01, "rescale_grad": 1 / 3},
    "decay-clip": {"wd": 0.01, "rescale_grad": 1 / 3, "clip_gradient": 0.3},
}


class Native:
    """What a server holds for one weight, and what a worker computes for each of its rounds."""

    def __init__(self, optimizer, weight):
        self.optimizer = optimizer
        self.kernel = NativeOptimizer(describe(optimizer))
        arithmetic = np.float32 if weight.dtype == np.float16 else weight.dtype
        self.weight = weight.copy()
        self.states = [np.zeros(weight.shape, arithmetic) for _ in range(self.kernel.state_count)]
        half_with_master = weight.dtype == np.float16 and self.kernel.needs_master(FLOAT16_CODE)
        self.master = weight.astype(np.float32) if half_with_master else None

    def update(self, index, gradient):
        scalars = round_scalars(self.optimizer, index)
        self.kernel.update(self.weight, self.master, self.states, gradient.astype(self.states_type), *scalars)

    @property
    def states_type(self):
        return np.float32 if self.weight.dtype == np.float16 else self.weight.dtype


class Reference:
    """MXNet's Updater on one weight. Its states are cast to the weight's type: AdaGrad and RMSProp always make
    float32 ones, and so fail on float64 weights by themselves."""

    def __init__(self, optimizer, weight):
        self.updater = mx.optimizer.get_updater(optimizer)
        self.weight = mx.nd.array(weight, dtype=weight.dtype)

    def update(self, index, gradient):
        if index not in self.updater.states and self.weight.dtype == np.float64:
            states = self.updater.optimizer.create_state_multi_precision(index, self.weight)
            self.updater.states[index] = _as_float64(states)
            self.updater.states_synced[index] = True
        self.updater(index, mx.nd.array(gradient, dtype=gradient.dtype), self.weight)


def _as_float64(states):
    if isinstance(states, tuple):
        return tuple(_as_float64(state) for state in states)
    return None if states is None else states.astype(np.float64)


def _assert_same(native, expected, tolerance):
    assert native.dtype == expected.dtype
    difference = np.abs(native.astype(np.float64) - expected.astype(np.float64)).max()
    assert difference <= tolerance * np.abs(expected).max()


def _follow(make, dtype, elements, tolerance, seed=0, between_steps=lambda step, optimizer: None):
    """STEPS updates of the same weight by both, compared after each. Two optimizer objects: both count updates."""
    generator = np.random.RandomState(seed)
    weight = generator.uniform(-1, 1, elements).astype(dtype)
    native, reference = Native(make(), weight), Reference(make(), weight)
    for step in range(STEPS):
        for side in (native.optimizer, reference.updater.optimizer):
            between_steps(step, side)
        gradient = generator.normal(size=elements).astype(dtype)
        native.update(0, gradient)
        reference.update(0, gradient)
        _assert_same(native.weight, reference.weight.asnumpy(), tolerance)
    assert not np.array_equal(native.weight, weight)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_float32_equals_mxnet_to_the_bit(name, variant):
    for elements in (1, 7, 50000):
        _follow(lambda: OPTIMIZERS[name](**VARIANTS[variant]), np.float32, elements, tolerance=0)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_float64_follows_mxnet(name, variant):
    _follow(lambda: OPTIMIZERS[name](**VARIANTS[variant]), np.float64, 1001, tolerance=1e-12)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_float16_with_a_master_copy_equals_mxnet_to_the_bit(name, variant):
    _follow(lambda: OPTIMIZERS[name](multi_precision=True, **VARIANTS[variant]), np.float16, 3001, tolerance=0)


def test_momentum_at_a_large_rate_follows_mxnet():
    # MXNet's NAG decays its velocity with the weight as it is after the update: a large decay shows the difference.
    _follow(lambda: mx.optimizer.NAG(learning_rate=0.5, momentum=0.5, wd=0.5), np.float32, 1001, tolerance=0)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_rate_that_changes_takes_effect_at_once(name):
    def make():
        optimizer = OPTIMIZERS[name](rescale_grad=0.5, wd=0.01)
        optimizer.lr_scheduler = mx.lr_scheduler.FactorScheduler(step=7, factor=0.8, base_lr=optimizer.lr)
        return optimizer

    def change_batch_size(step, optimizer):
        optimizer.rescale_grad = 0.5 if step < 30 else 0.25

    _follow(make, np.float32, 1001, tolerance=0, between_steps=change_batch_size)


@pytest.mark.parametrize("name", ["sgd-momentum", "adam"])
def test_multipliers_apply_to_their_parameter_alone(name):
    def make():
        optimizer = OPTIMIZERS[name](wd=0.01, param_idx2name={0: "dense0_weight", 1: "dense0_bias"})
        optimizer.set_lr_mult({0: 0.5, "dense0_bias": 2.0})
        optimizer.set_wd_mult({0: 3.0})  # a bias has no decay unless told otherwise
        return optimizer

    generator = np.random.RandomState(1)
    weights = [generator.normal(size=11).astype(np.float32) for _ in range(2)]
    here, there = make(), make()
    pairs = [(Native(here, weight), Reference(there, weight)) for weight in weights]
    updater = mx.optimizer.get_updater(there)
    for _ in range(STEPS):
        for index, (native, reference) in enumerate(pairs):
            gradient = generator.normal(size=11).astype(np.float32)
            native.update(index, gradient)
            updater(index, mx.nd.array(gradient), reference.weight)
            _assert_same(native.weight, reference.weight.asnumpy(), 0)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("offset", [0, 1])
def test_slice_by_slice_equals_the_whole_to_the_bit(name, dtype, offset):
    """Also with the baseline loops for the slices and the AVX2 ones for the whole, and one element off alignment."""
    seed = random.randrange(2**31)
    print(f"seed {seed}")  # shown when the test fails
    generator = np.random.RandomState(seed)
    make = lambda: OPTIMIZERS[name](wd=0.01, clip_gradient=0.5, multi_precision=True)  # noqa: E731
    elements = 5001
    weight = generator.uniform(-1, 1, elements).astype(dtype)
    whole = Native(make(), weight)
    cuts = [0, 1, 8, 1024, 2049, elements]
    storage = [np.empty(end - begin + offset, dtype) for begin, end in zip(cuts, cuts[1:])]
    slices = [Native(make(), weight[begin:end]) for begin, end in zip(cuts, cuts[1:])]
    for one, memory in zip(slices, storage):
        memory[offset:] = one.weight
        one.weight = memory[offset:]
    had_avx2 = use_avx2()
    try:
        for _ in range(5):
            gradient = generator.normal(size=elements).astype(dtype)
            use_avx2(had_avx2)
            whole.update(0, gradient)
            use_avx2(False)
            for one, begin, end in zip(slices, cuts, cuts[1:]):
                one.update(0, gradient[begin:end])
    finally:
        use_avx2(had_avx2)
    assert np.concatenate([one.weight for one in slices]).tobytes() == whole.weight.tobytes()
    for number, state in enumerate(whole.states):
        assert np.concatenate([one.states[number] for one in slices]).tobytes() == state.tobytes()


def test_float16_without_a_master_copy_is_rounded_once():
    weight = np.linspace(-2, 2, 777).astype(np.float16)
    gradient = np.linspace(3, -1, 777).astype(np.float16)
    half, single = (Native(mx.optimizer.Adam(), start) for start in (weight, weight.astype(np.float32)))
    half.update(0, gradient)
    single.update(0, gradient)
    assert half.master is None
    assert np.array_equal(half.weight, single.weight.astype(np.float16))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_nan_is_passed_on_as_nan_and_stays_where_it_is(name):
    native = Native(OPTIMIZERS[name](clip_gradient=0.5), np.ones(20, np.float32))
    gradient = np.ones(20, np.float32)
    gradient[3] = math.nan
    native.update(0, gradient)
    assert np.flatnonzero(np.isnan(native.weight)).tolist() == [3]


def test_adagrad_alone_clips_to_zero():
    # MXNet asks AdaGrad's clip_gradient "is not None", and the others' whether it is true.
    make = lambda: mx.optimizer.AdaGrad(learning_rate=0.1, wd=0.1, clip_gradient=0.0)  # noqa: E731
    _follow(make, np.float32, 7, tolerance=0)
    assert describe(make())["clip_gradient"] == 0
    assert describe(mx.optimizer.SGD(clip_gradient=0.0))["clip_gradient"] < 0


def test_describe_gives_the_numbers_of_the_optimizer():
    assert describe(mx.optimizer.RMSProp(centered=True, gamma1=0.5, clip_weights=2, clip_gradient=3)) == {
        "name": "rmsprop_centered",
        "gamma1": 0.5,
        "gamma2": 0.9,
        "epsilon": 1e-8,
        "clip_gradient": 3.0,
        "clip_weights": 2.0,
        "multi_precision": False,
    }


class MyAdam(mx.optimizer.Adam):
    pass


@pytest.mark.parametrize(
    "optimizer, reason",
    [
        (MyAdam(), "MyAdam is user-defined"),
        (mx.optimizer.LAMB(), "LAMB needs whole tensors"),
        (mx.optimizer.LARS(), "LARS needs whole tensors"),
        (mx.optimizer.Signum(), "no Signum"),
        (mx.optimizer.ccSGD(), "no ccSGD"),
        (mx.optimizer.SGD(momentum=-0.5), "momentum is -0.5"),
        (mx.optimizer.Adam(beta1=1.0), "beta1 is 1.0"),
        (mx.optimizer.Adam(epsilon=math.nan), "epsilon is nan"),
        (mx.optimizer.AdaGrad(clip_gradient=-1.0), "no sensible meaning"),
    ],
)
def test_other_optimizers_stay_on_the_workers_with_a_reason(optimizer, reason):
    with pytest.raises(NotOnServer, match=reason):
        describe(optimizer)


ADAM = {"name": "adam", "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "clip_gradient": -1.0, "multi_precision": False}


def _without(field):
    return {name: value for name, value in ADAM.items() if name != field}


@pytest.mark.parametrize(
    "description, text",
    [
        (None, "must be a dict"),
        ({}, "name is None"),
        ({**ADAM, "name": "lamb"}, "name is 'lamb'"),
        ({**ADAM, "name": ["adam"]}, "name is"),
        (_without("beta2"), "missing beta2"),
        (_without("multi_precision"), "missing multi_precision"),
        ({**ADAM, "momentum": 0.9}, "'momentum' is no field"),
        ({**ADAM, "beta1": "0.9"}, "beta1 is '0.9'"),
        ({**ADAM, "beta1": True}, "beta1 is True"),
        ({**ADAM, "beta1": None}, "beta1 is None"),
        ({**ADAM, "beta2": 1.0}, "beta2 is 1.0"),
        ({**ADAM, "epsilon": math.nan}, "epsilon is nan"),
        ({**ADAM, "epsilon": math.inf}, "epsilon is inf"),
        ({**ADAM, "clip_gradient": math.nan}, "clip_gradient is nan"),
        ({**ADAM, "epsilon": 10**400}, "epsilon is 1000"),
        ({**ADAM, "multi_precision": 1}, "multi_precision is 1"),
    ],
)
def test_nonsense_is_refused_and_the_field_named(description, text):
    for refuse in (validate, NativeOptimizer):
        with pytest.raises(ValueError, match=text):
            refuse(description)


def test_arrays_that_do_not_fit_are_refused():
    kernel = NativeOptimizer({**ADAM, "multi_precision": True})
    weight, half = np.ones(4, np.float32), np.ones(4, np.float16)
    states = [np.zeros(4, np.float32), np.zeros(4, np.float32)]
    with pytest.raises(ValueError, match="gradient has 3 elements; it must have 4"):
        kernel.update(weight, None, states, np.ones(3, np.float32), 0.1, 0, 1)
    with pytest.raises(TypeError, match="gradient has type float64; it must be float32"):
        kernel.update(weight, None, states, np.ones(4), 0.1, 0, 1)
    with pytest.raises(ValueError, match="1 states given; this optimizer has 2"):
        kernel.update(weight, None, states[:1], weight, 0.1, 0, 1)
    with pytest.raises(ValueError, match="master"):
        kernel.update(half, None, states, weight, 0.1, 0, 1)
    with pytest.raises(ValueError, match="master"):
        kernel.update(weight, weight.copy(), states, weight, 0.1, 0, 1)
    with pytest.raises(TypeError, match="weight has type int32"):
        kernel.update(np.ones(4, np.int32), None, states, weight, 0.1, 0, 1)
    assert weight.tolist() == [1, 1, 1, 1]


def test_servers_and_scheduler_validate_without_mxnet_or_numpy():
    code = (
        "import sys\n"
        "from p3.server.optimizers import validate\n"
        f"validate({ADAM!r})\n"
        "assert not {'mxnet', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
