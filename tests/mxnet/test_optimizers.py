"""The servers' optimizers against mx.optimizer, step by step, and the descriptions that select them."""

import importlib.util
import math
import random
import subprocess
import sys

import numpy as np
import pytest
from p3.measure._kernels import NativeOptimizer, use_avx2
from p3.plan.optimizers import validate

if importlib.util.find_spec("mxnet") is None:
    pytest.skip("MXNet is not installed: pip install mxnet==1.9.1", allow_module_level=True)
import mxnet as mx
from optimizer_cases import OPTIMIZERS, Native, Reference
from p3.mxnet.optimizers.descriptions import NotOnServer, describe

STEPS = 50
VARIANTS = {
    "bare": {},
    "decay": {"wd": 0.01, "rescale_grad": 1 / 3},
    "decay-clip": {"wd": 0.01, "rescale_grad": 1 / 3, "clip_gradient": 0.3},
}


def _leaves(state):
    if isinstance(state, tuple):
        return [leaf for part in state for leaf in _leaves(part)]
    return [] if state is None else [state.asnumpy()]


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
    if native.master is None:
        expected = _leaves(reference.updater.states[0])
        assert len(native.states) == len(expected)
        for one, other in zip(native.states, expected):
            _assert_same(one, other, tolerance)


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


# Nadam's schedule moves on with every update of any parameter.
@pytest.mark.parametrize("name", ["sgd-momentum", "adam", "adamax", "ftml", "nadam"])
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


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if not name.startswith("signum")])
def test_nan_is_passed_on_as_nan_and_stays_where_it_is(name):
    native = Native(OPTIMIZERS[name](clip_gradient=0.5), np.ones(20, np.float32))
    gradient = np.ones(20, np.float32)
    gradient[3] = math.nan
    native.update(0, gradient)
    assert np.flatnonzero(np.isnan(native.weight)).tolist() == [3]


@pytest.mark.parametrize("name", ["signum-plain", "signum"])
def test_signum_takes_nan_for_no_direction_as_mxnet_does(name):
    native, reference = (side(OPTIMIZERS[name](), np.ones(20, np.float32)) for side in (Native, Reference))
    gradient = np.ones(20, np.float32)
    gradient[3] = math.nan
    for side in (native, reference):
        side.update(0, gradient)
    assert native.weight[2] < native.weight[3] <= 1
    _assert_same(native.weight, reference.weight.asnumpy(), 0)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_clip_of_zero_means_what_it_means_to_mxnet(name):
    # MXNet asks AdaGrad's and some others' clip_gradient "is not None", and the rest's whether it is true.
    make = lambda: OPTIMIZERS[name](wd=0.1, clip_gradient=0.0)  # noqa: E731
    clips = name.partition("-")[0] in ("adagrad", "adadelta", "adamax", "nadam", "dcasgd")
    assert (describe(make())["clip_gradient"] == 0) == clips
    if name not in ("adamax", "nadam"):  # which clip the decay too: weights are 0 / 0, or stay
        _follow(make, np.float32, 7, tolerance=0)


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
        (mx.optimizer.LBSGD(), "LBSGD needs whole tensors"),
        (mx.optimizer.contrib.GroupAdaGrad(), "GroupAdaGrad needs whole rows"),
        (mx.optimizer.SGLD(), "SGLD draws random numbers"),
        (mx.optimizer.Signum(momentum=0.0, wd_lh=0.1), "Signum without momentum has no wd_lh"),
        (mx.optimizer.Signum(wd_lh=-0.1), "wd_lh is -0.1"),
        (mx.optimizer.AdaDelta(rho=1.0), "rho is 1.0"),
        (mx.optimizer.Ftrl(beta=-1), "beta is -1.0"),
        (mx.optimizer.Ftrl(lamda1=-1), "lamda1 is -1.0"),
        (mx.optimizer.DCASGD(lamda=math.inf), "lamda is inf"),
        (mx.optimizer.Nadam(schedule_decay=-1), "schedule_decay is -1.0"),
        (mx.optimizer.Nadam(clip_gradient=-1.0), "Nadam with clip_gradient -1.0 has no sensible meaning"),
        (mx.optimizer.SGD(momentum=-0.5), "momentum is -0.5"),
        (mx.optimizer.Adam(beta1=1.0), "beta1 is 1.0"),
        (mx.optimizer.Adam(epsilon=math.nan), "epsilon is nan"),
        (mx.optimizer.AdaGrad(clip_gradient=-1.0), "no sensible meaning"),
    ],
)
def test_other_optimizers_stay_on_the_workers_with_a_reason(optimizer, reason):
    with pytest.raises(NotOnServer, match=reason):
        describe(optimizer)


def test_every_optimizer_of_mxnet_is_native_or_has_its_reason():
    native, reasons = set(), {}
    for name, kind in mx.optimizer.Optimizer.opt_registry.items():
        if not kind.__module__.startswith("mxnet.optimizer"):
            continue  # registered by another test
        try:
            describe(kind())
            native.add(name)
        except NotOnServer as reason:
            reasons[name] = str(reason)
    assert native == {name.partition("-")[0] for name in OPTIMIZERS}
    assert reasons and not any("the servers have no" in reason for reason in reasons.values())


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
        (_without("beta2"), "beta2 is missing"),
        (_without("multi_precision"), "multi_precision is missing"),
        ({**ADAM, "momentum": 0.9}, "'momentum' .* is no field"),
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
        "from p3.plan.optimizers import validate\n"
        f"validate({ADAM!r})\n"
        "assert not {'mxnet', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
