"""Stores whose workers may be rounds apart: p3_async and p3_ssp."""

import math
import re
import signal
import sys

import numpy as np
import plugin_jobs as jobs
import pytest

mx = pytest.importorskip("mxnet")
from mxnet import gluon  # noqa: E402
from mxnet.base import MXNetError  # noqa: E402

import p3  # noqa: E402, F401
from p3.trace.lives import load  # noqa: E402


def code(text):
    return [sys.executable, "-c", "import p3, mxnet as mx; " + text]


def run(workers, servers, *arguments, **variables):
    status, output = jobs.run_p3(workers, servers, jobs.python("staleness.py", *arguments), **variables)
    assert status == 0, output
    return output


@pytest.mark.parametrize("name, kind", [("p3_async", "dist_p3_async"), ("dist_p3_ssp", "dist_p3_ssp_async")])
def test_mxnet_creates_them_by_name(name, kind):
    assert mx.kv.create(name).type == kind


@pytest.mark.parametrize(
    "kind, staleness, workers, variables",
    [
        ("p3_ssp", 1, 2, {}),
        ("p3_ssp", 3, 3, {}),
        ("p3_ssp", 3, 2, {"P3_TLS": "1"}),
        ("p3_ssp", 3, 2, {"P3_SERVER_THREADS": "2", "P3_SLICE_ELEMENTS": "7000", "P3_PARTITIONS": "5"}),
        ("p3_ssp", 2, 3, {"P3_SLICE_ELEMENTS": "80"}),
        ("p3_ssp", 2, 2, {"P3_LOCAL_AGGREGATION": "0"}),
        ("p3_async", "inf", 3, {}),
    ],
)
def test_what_a_worker_receives_is_never_staler_than_allowed(kind, staleness, workers, variables):
    output = run(workers, 2, "clocks", kind, staleness, 30, **variables)
    assert output.count("rounds ahead") == workers


@pytest.mark.parametrize("kind, staleness", [("p3_ssp", 1), ("p3_async", "inf")])
def test_a_dead_worker_ends_the_job_also_where_nobody_waits_for_it(kind, staleness):
    """With keys of rows beside dense ones, and as many rounds as nobody would finish within the deadline."""
    status, output = jobs.run_p3(2, 2, jobs.python("staleness.py", "clocks", kind, staleness, 1_000_000, 5))
    assert status == 128 + signal.SIGKILL, output
    # By the connection to it, or in the scheduler's words, whichever comes first.
    assert re.search(r"^\[worker 0\] .*Error: .*worker 1 \(127\.0\.0\.1\)", output, re.M), output


def test_workers_that_push_in_turn_have_the_weights_of_one_process():
    output = run(2, 2, "in_turn", 6, P3_SLICE_ELEMENTS="10")
    assert output.count("is as one process") == 2


def weights_of(directory, workers):
    results = [dict(np.load(directory / f"{rank}.npz")) for rank in range(workers)]
    for result in results:
        assert np.mean(result.pop("losses")[-5:]) < 0.2
    return results


def test_without_staleness_it_is_p3_sync_to_the_bit(tmp_path):
    results = {}
    for kind in ("p3_sync", "p3_ssp"):
        (tmp_path / kind).mkdir()
        run(2, 2, "train", kind, tmp_path / kind, P3_STALENESS="0")
        results[kind] = weights_of(tmp_path / kind, 2)
    for name, expected in results["p3_sync"][0].items():
        for result in (*results["p3_sync"], *results["p3_ssp"]):
            assert np.array_equal(result[name], expected), name


@pytest.mark.parametrize("kind", ["p3_ssp", "p3_async"])
def test_workers_that_are_apart_learn_and_end_with_the_same_weights(tmp_path, kind):
    run(3, 2, "train", kind, tmp_path, P3_STALENESS="2")
    results = weights_of(tmp_path, 3)
    for name, expected in results[0].items():
        for result in results[1:]:
            assert np.array_equal(result[name], expected), name


def test_join_needs_no_optimizer_of_stores_that_were_never_pushed_to():
    script = (
        "kv = mx.kv.create('p3_ssp'); out = mx.nd.zeros(2); kv.broadcast('w', mx.nd.ones(2), out); "
        "kv.init('rows', mx.nd.ones((3, 2)).tostype('row_sparse')); kv.join(); "
        "kv.pull('w', out=out); print('joined with', out.asnumpy().tolist())"
    )
    status, output = jobs.run_p3(2, 1, code(script))
    assert status == 0 and output.count("joined with [1.0, 1.0]") == 2, output


def test_workers_that_differ_in_staleness_fail_the_job():
    script = "kv = mx.kv.create('p3_ssp'); kv.set_staleness(kv.rank + 1); kv.init('w', mx.nd.ones(2)); kv._barrier()"
    status, output = jobs.run_p3(2, 1, code(script))
    assert status != 0 and "staleness is 1 on the first and 2 on the second" in output, output


def test_a_trace_shows_how_long_a_push_waited_for_slower_workers(tmp_path):
    run(2, 1, "clocks", "p3_ssp", 2, 10, P3_TRACE=str(tmp_path))
    lives = load(tmp_path).lives
    known = lives[~np.isnan(lives["landed"])]
    assert len(known) > 2 * 10 * 3
    at_server = ("received", "summed", "complete", "updated", "returning")
    for earlier, later in zip(at_server, at_server[1:]):
        assert (known[earlier] <= known[later]).all(), (earlier, later)


# Wrong use, in one process


def sgd():
    return mx.optimizer.SGD(learning_rate=1.0, rescale_grad=1.0)


def test_alone_a_worker_waits_for_nobody():
    kv = mx.kv.create("p3_async")
    out = mx.nd.zeros(3)
    kv.broadcast("w", mx.nd.zeros(3), out)
    kv.set_optimizer(sgd())
    for round in range(1, 4):
        kv.pushpull("w", -mx.nd.ones(3), out=out)
        assert out.asnumpy().tolist() == [round] * 3


def test_a_push_needs_an_optimizer():
    kv = mx.kv.create("p3_async")
    kv.init("w", mx.nd.ones(2))
    with pytest.raises(MXNetError, match=r"key 'w': staleness and sums .*no optimizer is set .*Set an optimizer"):
        kv.push("w", mx.nd.ones(2))


def test_workers_cannot_update():
    kv = mx.kv.create("p3_ssp")
    kv.init("w", mx.nd.ones(2))
    with pytest.raises(MXNetError, match=r"p3_ssp: staleness and sums .*\(LAMB runs on the workers: LAMB needs"):
        kv.set_optimizer(mx.optimizer.create("lamb"))
    with pytest.raises(MXNetError, match=r"p3_ssp: staleness and sums .*\(an updater runs on the workers\)"):
        kv._set_updater(lambda key, gradient, weight: None)


def test_a_trainer_that_updates_itself_is_refused_by_gluon():
    net = gluon.nn.Dense(2, in_units=2)
    net.initialize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", kvstore=mx.kv.create("p3_async"), update_on_kvstore=False)
    with mx.autograd.record():
        loss = net(mx.nd.ones((1, 2)))
    loss.backward()
    with pytest.raises(ValueError, match="update_on_kvstore"):
        trainer.step(1)


@pytest.mark.parametrize("rounds", [-1, 1.5, "3", True, math.nan])
def test_a_staleness_is_a_number_of_rounds(rounds):
    with pytest.raises(MXNetError, match="it must be a whole number of rounds of at least 0, or math.inf"):
        mx.kv.create("p3_ssp").set_staleness(rounds)


def test_staleness_comes_before_the_first_init():
    kv = mx.kv.create("p3_ssp")
    kv.init("w", mx.nd.ones(2))
    with pytest.raises(MXNetError, match="key 'w' was initialised already"):
        kv.set_staleness(2)
    kv.set_staleness(2, keys=["v"])
    with pytest.raises(MXNetError, match="key 'w' was initialised already"):
        kv.set_staleness(2, keys=["w", "u"])


def test_p3_sync_has_none():
    with pytest.raises(MXNetError, match="the rounds of p3_sync are synchronous; create p3_ssp or p3_async"):
        mx.kv.create("p3_sync").set_staleness(1)


def test_deep_gradient_compression_needs_common_rounds():
    kv = mx.kv.create("p3_ssp")
    kv.set_gradient_compression({"type": "dgc"})
    with pytest.raises(MXNetError, match="dgc sums what all workers send in a round, and there is no such round"):
        kv.init("w", mx.nd.ones((2, 2)))


@pytest.mark.parametrize(
    "variables, problem",
    [
        (
            {"P3_ON_WORKER_LOSS": "continue"},
            "going on without lost workers (P3_ON_WORKER_LOSS=continue is set) and staleness",
        ),
        ({"P3_SNAPSHOT_DIR": "snapshots"}, "key 'w': staleness and snapshots (P3_SNAPSHOT_DIR is set)"),
    ],
)
def test_what_needs_a_common_state_is_refused(tmp_path, variables, problem):
    if "P3_SNAPSHOT_DIR" in variables:
        variables = {"P3_SNAPSHOT_DIR": str(tmp_path)}
    script = "mx.kv.create('p3_ssp').init('w', mx.nd.ones(2))"
    status, output = jobs.run_p3(2, 1, code(script), **variables)
    assert status != 0 and problem in output, output
