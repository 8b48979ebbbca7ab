"""Optimizer states on their way between the servers' arrays, MXNet's objects and files."""

import importlib.util
import os
import pickle

import numpy as np
import pytest

if importlib.util.find_spec("mxnet") is None:
    pytest.skip("MXNet is not installed: pip install mxnet==1.9.1", allow_module_level=True)
import mxnet as mx
from mxnet.base import MXNetError
from optimizer_cases import OPTIMIZERS, Native, Reference, runnable

from p3.mxnet import store_snapshots
from p3.mxnet.optimizers.states import from_mxnet, read, to_mxnet, write

SHAPE = (3, 5)
KEY = 7
HALF = 6  # updates on each side


def _make(name):
    return OPTIMIZERS[name](wd=0.01, clip_gradient=0.5, multi_precision=True)


def _data(dtype):
    generator = np.random.RandomState(4)
    weight = generator.uniform(-1, 1, SHAPE).astype(dtype)
    return weight, [generator.normal(size=SHAPE).astype(dtype) for _ in range(2 * HALF)]


def _trained(side, gradients):
    for gradient in gradients:
        side.update(KEY, gradient)
    return side


def _assert_alike(one, other, dtype):
    if dtype == np.float64:  # as in test_optimizers.py
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12 * np.abs(other).max())
    else:
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_mxnet_goes_on_where_the_servers_stopped(name, dtype, tmp_path):
    weight, gradients = _data(dtype)
    undisturbed = _trained(Reference(_make(name), weight), gradients)

    native = _trained(Native(_make(name), weight), gradients[:HALF])
    here = mx.nd.array(native.weight, dtype=dtype)
    state = to_mxnet(native.optimizer, KEY, here, native.states, native.master)
    write(tmp_path / "states", {KEY: state}, native.optimizer)
    reference = Reference(_make(name), native.weight)
    reference.updater.set_states((tmp_path / "states").read_bytes())
    reference.updater.states[KEY] = runnable(reference.updater.optimizer, here, reference.updater.states[KEY])
    _trained(reference, gradients[HALF:])
    _assert_alike(reference.weight.asnumpy(), undisturbed.weight.asnumpy(), dtype)


@pytest.mark.parametrize("with_optimizer", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_servers_go_on_where_mxnet_stopped(name, dtype, with_optimizer, tmp_path):
    weight, gradients = _data(dtype)
    undisturbed = _trained(Native(_make(name), weight), gradients)

    reference = _trained(Reference(_make(name), weight), gradients[:HALF])
    (tmp_path / "states").write_bytes(reference.updater.get_states(dump_optimizer=with_optimizer))
    states, optimizer = read(tmp_path / "states")
    assert (optimizer is not None) == with_optimizer
    native = Native(optimizer or reference.updater.optimizer, reference.weight.asnumpy())
    native.states, master = from_mxnet(native.optimizer, KEY, reference.weight, states[KEY])
    assert (master is None) == (native.master is None)
    native.master = master
    _trained(native, gradients[HALF:])
    _assert_alike(native.weight, undisturbed.weight, dtype)
    for one, other in zip(native.states, undisturbed.states):
        _assert_alike(one, other, dtype)


@pytest.mark.parametrize("shape", [(0, 3), (), (1,)])
def test_weights_of_no_element_and_of_one_keep_their_shape(shape, tmp_path):
    with mx.util.np_shape(True):
        weight = mx.nd.zeros(shape)
    arrays = [np.full(shape, 2, np.float32), np.full(shape, 3, np.float32)]
    optimizer = mx.optimizer.Adam()
    with mx.util.np_shape(shape == ()):  # without it MXNet knows no scalars
        write(tmp_path / "states", {KEY: to_mxnet(optimizer, KEY, weight, arrays, None)})
        back, master = from_mxnet(optimizer, KEY, weight, read(tmp_path / "states")[0][KEY])
    assert master is None
    assert [array.tolist() for array in back] == [array.tolist() for array in arrays]
    assert [array.shape for array in back] == [shape, shape]


def test_halves_without_a_master_copy_have_half_states_in_mxnet():
    weight, adam = mx.nd.ones((2,), dtype=np.float16), mx.optimizer.Adam()
    arrays = [np.array([1, 1 + 2**-12], np.float32)] * 2
    state = to_mxnet(adam, KEY, weight, arrays, None)
    assert [part.dtype for part in state] == [np.float16, np.float16]
    back, _ = from_mxnet(adam, KEY, weight, state)
    assert back[0].dtype == np.float32 and back[0].tolist() == [1, 1]


def test_no_state_is_right_where_the_algorithm_has_none():
    assert from_mxnet(mx.optimizer.SGD(), KEY, mx.nd.ones(3), None) == ([], None)


def test_too_few_or_too_many_arrays_are_refused():
    with pytest.raises(ValueError, match="key 7: 1 arrays given, but Adam has 2"):
        to_mxnet(mx.optimizer.Adam(), KEY, mx.nd.ones(3), [np.ones(3, np.float32)], None)


HALVES = mx.nd.ones(3, dtype=np.float16)
PRECISE = {"multi_precision": True, "momentum": 0.9}


@pytest.mark.parametrize(
    "optimizer, weight, state, text",
    [
        (mx.optimizer.Adam(), mx.nd.ones(3), None, "Adam has 2 parts here, and the file nothing"),
        (mx.optimizer.Adam(), mx.nd.ones(3), mx.nd.ones(3), "2 parts here, and the file an array"),
        (mx.optimizer.Adam(), mx.nd.ones(3), (mx.nd.ones(3),), "2 parts here, and the file 1 parts"),
        (mx.optimizer.Adam(), mx.nd.ones(3), (mx.nd.ones(3), None), "an array of shape .* and the file nothing"),
        (mx.optimizer.Adam(), mx.nd.ones(3), (mx.nd.ones(3), "x"), "and the file a str"),
        (mx.optimizer.SGD(), mx.nd.ones(3), mx.nd.ones(3), "SGD has nothing here, and the file an array"),
        (mx.optimizer.SGD(momentum=0.9), mx.nd.ones(3), mx.nd.ones((3, 1)), r"shape \(3,\) .* shape \(3, 1\)"),
        (mx.optimizer.SGD(momentum=0.9), mx.nd.ones(3), HALVES, "type float32 here, and .* type float16"),
        (mx.optimizer.SGD(**PRECISE), HALVES, (HALVES, mx.nd.ones(3)), "type float32 here, and .* type float16"),
    ],
)
def test_a_state_of_something_else_is_refused_and_the_key_named(optimizer, weight, state, text):
    with pytest.raises(MXNetError, match=f"key 'dense0_weight': .*{text}"):
        from_mxnet(optimizer, "dense0_weight", weight, state)


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "states"
    write(path, {KEY: None})
    before = path.read_bytes()

    with pytest.raises(MXNetError, match=str(path)):
        write(path, {KEY: lambda: None})  # no pickle holds a lambda

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MXNetError, match="No space left"):
        write(path, {KEY: "new"})
    monkeypatch.undo()
    with pytest.raises(MXNetError, match="No such file"):
        write(tmp_path / "missing" / "states", {})
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["states"]


def test_a_new_file_has_the_usual_permissions_and_a_link_stays_one(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "states")
    before = os.umask(0o027)
    try:
        write(tmp_path / "link", {})
    finally:
        os.umask(before)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "states").stat().st_mode & 0o777 == 0o640
    assert read(tmp_path / "states") == ({}, None)


@pytest.mark.parametrize("cut", [0, 1, 20, -1])
def test_a_file_cut_short_is_refused_and_named(cut, tmp_path):
    path = tmp_path / "states"
    write(path, {KEY: mx.nd.ones(3)}, mx.optimizer.SGD())
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(MXNetError, match=f"{path} is truncated or holds no optimizer states"):
        read(path)


@pytest.mark.parametrize("content", [[1, 2], ({}, "sgd"), ([], mx.optimizer.SGD())])
def test_a_file_of_something_else_is_refused_and_named(content, tmp_path):
    path = tmp_path / "states"
    path.write_bytes(pickle.dumps(content))
    with pytest.raises(MXNetError, match=f"{path} holds no optimizer states"):
        read(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(MXNetError, match=f"{tmp_path / 'states'}: No such file"):
        read(tmp_path / "states")


def test_a_snapshot_has_a_learning_rate_that_is_a_number_of_numpys():
    trained, resumed = mx.optimizer.SGD(learning_rate=1.0), mx.optimizer.SGD(learning_rate=1.0)
    trained.set_learning_rate(np.float64(0.25))
    store_snapshots._restore_numbers(resumed, store_snapshots._numbers(trained))
    assert resumed.lr == 0.25
