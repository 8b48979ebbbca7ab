"""Gradients on a device come to CPU memory piece by piece. Here CPU memory is in the device's place."""

import sys
import time

import numpy as np
import plugin_jobs as jobs
import pytest

mx = pytest.importorskip("mxnet")
sys.path.insert(0, str(jobs.SCRIPTS))
from p3._core import NO_SCALARS  # noqa: E402
from p3.mxnet.keys import dense as keys  # noqa: E402

CASES = ("imperative", "hybrid-evaluated", "two-devices", "two-devices-summed", "adam", "on-workers")
DEADLINE_S = 30


def weights_of(directory, store, cases=CASES, **settings):
    directory.mkdir()
    status, output = jobs.run_p3(2, 2, jobs.python("trajectory.py", directory, store, *cases), **settings)
    assert status == 0, output
    return {name: [dict(np.load(directory / f"{name}-{rank}.npz")) for rank in (0, 1)] for name in cases}


def test_training_has_the_bits_of_gradients_in_cpu_memory(tmp_path):
    staged = weights_of(tmp_path / "staged", "p3_sync-staged", P3_SLICE_ELEMENTS="40")
    plain = weights_of(tmp_path / "plain", "p3_sync")
    for name in CASES:
        for rank in (0, 1):
            assert plain[name][rank].keys() == staged[name][rank].keys()
            for parameter, value in plain[name][rank].items():
                assert np.array_equal(value, staged[name][rank][parameter]), (name, parameter)


def test_so_has_deep_gradient_compression_though_a_clipped_gradient_leaves_as_a_whole(tmp_path):
    cases = ("dgc", "dgc-clipped")
    staged = weights_of(tmp_path / "staged", "p3_sync-staged", cases, P3_SLICE_ELEMENTS="40")
    plain = weights_of(tmp_path / "plain", "p3_sync", cases, P3_SLICE_ELEMENTS="40")
    for name in cases:
        for rank in (0, 1):
            for parameter, value in plain[name][rank].items():
                assert np.array_equal(value, plain[name][0][parameter]), (name, parameter)
                assert np.array_equal(value, staged[name][rank][parameter]), (name, parameter)
    assert any(not np.array_equal(value, plain["dgc"][0][name]) for name, value in plain["dgc-clipped"][0].items())


def test_naive_engine_copies_the_gradient_as_a_whole(tmp_path):
    """It would wait for the round before the pieces that the round waits for."""
    command = jobs.python("trajectory.py", tmp_path, "p3_sync-staged", "imperative")
    status, output = jobs.run_p3(1, 1, command, P3_SLICE_ELEMENTS="7", MXNET_ENGINE_TYPE="NaiveEngine")
    assert status == 0, output


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr(keys, "is_on_device", lambda _engine, _array: True)
    return mx.kv.create("p3_sync")


def test_the_first_slice_leaves_before_the_last_piece_is_copied(store):
    elements = 3 * 50000
    store.init(0, mx.nd.zeros(elements))
    entry, session = store.store.keys[0], store.store.session
    entry.wait()
    before = session.counters()["slices_sent"]
    gradient, buffer = mx.nd.full(elements, 2), mx.nd.empty(elements, mx.cpu())
    arrival = entry.operations.push_arriving(buffer.handle.value, NO_SCALARS, entry.priority)

    def copy(begin, end):
        piece, place = gradient[begin:end], buffer[begin:end]
        entry.engine.copy(piece.handle.value, place.handle.value)
        entry.operations.arrived(arrival, buffer.handle.value, end, entry.priority)

    copy(0, 50000)
    deadline = time.monotonic() + DEADLINE_S
    while session.counters()["slices_sent"] == before:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert session.counters()["slices_sent"] == before + 1
    copy(50000, elements)
    assert (entry.landing.asnumpy() == 2).all()


def test_rounds_follow_each_other_without_a_wait(store):
    elements = 3 * 50000 + 1
    store.init("w", mx.nd.zeros(elements))
    outs = []
    for number in range(5):
        outs.append(mx.nd.empty(elements))
        store.pushpull("w", mx.nd.full(elements, number), out=outs[-1])
    for number, out in enumerate(outs):
        assert (out.asnumpy() == number).all()


def test_a_gradient_that_fails_is_named():
    status, output = jobs.run([sys.executable, "-c", FAILING], timeout_s=60)
    assert status == 0, output


FAILING = """
import mxnet as mx, p3
from p3.mxnet.keys import dense as keys
keys.is_on_device = lambda _engine, _array: True
store = mx.kv.create("p3_sync")
store.init("w", mx.nd.zeros(100000))
broken = mx.nd.random.normal(0, -1, shape=100000)  # a negative scale: MXNet says so when it computes
out = mx.nd.empty(100000)
try:
    store.pushpull("w", broken, out=out)
    out.asnumpy()
    store.pushpull("w", broken, out=out)
    out.asnumpy()
except mx.MXNetError as error:
    print(error)
try:
    store.pull("w", out=out)
except mx.MXNetError as error:
    assert "gradient of key 'w' failed on this worker" in str(error), error
else:
    raise AssertionError("no error")
"""
