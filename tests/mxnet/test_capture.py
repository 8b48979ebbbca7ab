"""Captures of a store's keys in MXNet's engine: behind the pushes so far, before the next one, and nothing waits."""

import sys
import textwrap

import numpy as np
import plugin_jobs as jobs
import pytest

mx = pytest.importorskip("mxnet")
from core_jobs import DEADLINE_S  # noqa: E402

import p3  # noqa: E402, F401
from p3._core import Completions  # noqa: E402

TWO_BIT = {"type": "2bit", "threshold": 0.5}
ROUND = 7  # of the snapshot


def test_captures_take_their_turn_between_pushes_in_mxnets_engine():
    """Nothing here waits: pulls, captures and further pushes are queued before the first round may be over."""
    kv, compressed = mx.kv.create("p3_sync"), mx.kv.create("p3_sync")
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=0.5))
    compressed.set_gradient_compression(TWO_BIT)
    ids = mx.nd.array([1, 3])
    weights = {
        "dense": (kv, mx.nd.ones((70000,))),
        "rows": (kv, mx.nd.ones((5, 2))),
        "on the servers": (kv, mx.nd.ones((5, 2)).tostype("row_sparse")),
        "2bit": (compressed, mx.nd.zeros((3,))),
    }
    gradients = {
        "dense": mx.nd.ones((70000,)),
        "rows": mx.nd.sparse.row_sparse_array((mx.nd.ones((2, 2)), ids), shape=(5, 2)),
        "on the servers": mx.nd.sparse.row_sparse_array((mx.nd.ones((2, 2)), ids), shape=(5, 2)),
        "2bit": mx.nd.array([0.75, 0.25, -0.75]),
    }
    for name, (store, weight) in weights.items():
        store.init(name, weight)

    def push(times):
        for _ in range(times):
            for name, (store, _) in weights.items():
                store.push(name, gradients[name])

    push(3)
    completions, residuals = Completions(), {}
    for number, (name, (store, _)) in enumerate(weights.items()):
        key = store.store.keys[name]
        residuals[name] = key.operations.capture(ROUND, key.priority, completions, number)
    push(4)
    assert sorted(completions.next(DEADLINE_S) for _ in weights) == [(number, False) for number in range(4)]

    session = kv.store.session
    pieces = {}
    for wire_key, _, part, dtype, _, memory in session._link._server.take_captured(ROUND):
        assert part == 0
        pieces.setdefault(wire_key, []).append(np.frombuffer(memory, dtype))
    rows = [1, 1, -0.5, -0.5, 1, 1, -0.5, -0.5, 1, 1]
    expected = {"dense": [-0.5] * 70000, "rows": rows, "on the servers": rows, "2bit": [0.5, 0, -0.5]}
    for name, (store, _) in weights.items():
        plan = session.core.captured_plan(store.store.keys[name].declared.handle)
        np.testing.assert_array_equal(np.concatenate(pieces[plan.wire_key]), expected[name], name)
    assert residuals.pop("2bit") is not None and set(residuals.values()) == {None}
    mx.nd.waitall()


def test_a_residual_that_nobody_holds_is_no_danger():
    kv = mx.kv.create("p3_sync")
    kv.set_gradient_compression(TWO_BIT)
    kv.init("key", mx.nd.zeros((100000,)))
    kv.push("key", mx.nd.full((100000,), 0.75))
    completions = Completions()
    key = kv.store.keys["key"]
    kept = key.operations.capture(ROUND, key.priority, completions, 0)
    for _ in range(20):
        key.operations.capture(ROUND, key.priority, Completions(), 0)
    assert completions.next(DEADLINE_S) == (0, False)
    assert np.asarray(kept).tolist() == [0.25] * 100000
    mx.nd.waitall()


def test_a_capture_behind_a_failed_push_tells_who_waits():
    script = """
        import mxnet as mx, p3
        from p3._core import Completions, P3Error

        kv = mx.kv.create("p3_sync")
        kv.init("weight", mx.nd.zeros((2, 2)))
        kv.push("weight", mx.nd.linalg.potrf(-mx.nd.ones((2, 2))))  # not positive definite
        completions = Completions()
        key = kv.store.keys["weight"]
        key.operations.capture(7, key.priority, completions, 1)
        try:
            print("done:", completions.next(30))
        except P3Error as error:
            print("failed:", error)
    """
    _, output = jobs.run([sys.executable, "-c", textwrap.dedent(script)])
    assert "failed: " in output and "weight" in output and "done:" not in output, output
