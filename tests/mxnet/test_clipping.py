"""Clipping Gluon's gradients by their global norm: equal to gluon.utils.clip_global_norm on the joined batch, without
waiting for any gradient."""

import math
import re
from importlib.util import find_spec
from types import SimpleNamespace

import plugin_jobs as jobs
import pytest

if find_spec("mxnet") is None:
    pytest.skip("MXNet is not installed", allow_module_level=True)
import mxnet as mx
from mxnet import gluon

import p3
from p3.mxnet import clip_global_norm
from p3.plan import choices, combinations

QUIET = {"MXNET_STORAGE_FALLBACK_LOG_VERBOSE": "0"}


def run(workers, servers, name, status=0, **variables):
    """The output."""
    found, output = jobs.run_p3(workers, servers, jobs.python("gluon_clipping.py", name), **QUIET, **variables)
    assert (found == 0) == (status == 0), output
    return output


def bits_of(output, workers):
    """By case."""
    found = re.findall(r"worker \d: (.*) ends with (\w+)", output)
    bits = dict(found)
    assert len(bits) == 6 and sorted(found) == sorted([*bits.items()] * workers), output
    return bits


@pytest.mark.parametrize("workers, servers", [(1, 1), (2, 2), (3, 1)])
def test_it_trains_as_mxnet_does_on_the_joined_batch_and_all_workers_have_the_same_bits(workers, servers):
    slices = {"P3_SLICE_ELEMENTS": "10"}
    bits = bits_of(run(workers, servers, "trained", **slices), workers)
    if workers == 2:
        for aggregates in ("1", "0"):
            again = run(workers, servers, "trained", P3_LOCAL_AGGREGATION=aggregates, **slices)
            assert bits == bits_of(again, workers), aggregates


@pytest.mark.parametrize("workers, servers", [(1, 1), (2, 2)])
@pytest.mark.parametrize(
    "name, said",
    [
        ("averaged", "clipped averages"),
        ("compressed", "knows the norm of compressed sums"),
        ("half", "clipped half precision"),
        ("now_and_then", "clips as it likes"),
        ("two_stores", "clipped two nets"),
        ("not_finite", "left out what was not finite"),
        ("uneven", "follows"),
    ],
)
def test_kinds_of_training(workers, servers, name, said):
    output = run(workers, servers, name)
    assert output.count(said) == workers, output


def test_a_step_returns_while_the_network_is_stopped():
    output = run(1, 1, "never_waits")
    assert "the step returned while the server was frozen" in output and "its norm came afterwards" in output


def test_a_gradient_does_not_wait_for_others_that_are_late_nor_layers_for_any():
    alone = {"MXNET_OPTIMIZER_AGGREGATION_SIZE": "1"}  # else MXNet's SGD updates four weights together
    output = run(2, 1, "one_by_one", P3_WAIT_TIMEOUT_S="10", **alone)
    assert output.count("has all") == 2, output


def test_keys_do_not_run_ahead_of_the_norm():
    output = run(2, 2, "in_step")
    assert output.count("has rounds of one step") == 2, output


def test_a_job_that_clips_resumes_with_the_bits_of_an_uninterrupted_one(tmp_path):
    ends = {}
    for name, steps in (("whole", 6), ("broken", 3), ("broken", 6)):
        output = run(2, 2, f"resumed:{steps}", P3_SNAPSHOT_DIR=str(tmp_path / name), P3_SNAPSHOT_EVERY="2")
        found = set(re.findall(r"took steps from (\d) on and ends with (\w+)", output))
        assert len(found) == 1, output
        ends[name, steps] = found.pop()
    assert ends["whole", 6][0] == "0" and ends["broken", 6] == ("2", ends["whole", 6][1]), ends


@pytest.mark.parametrize("aggregates", ["1", "0"])
def test_a_step_in_which_nobody_pushes_is_not_the_end_of_join(aggregates):
    output = run(3, 2, "frozen_for_a_step", P3_LOCAL_AGGREGATION=aggregates)
    assert output.count("followed all steps") == 3, output


def test_a_session_knows_nothing_of_the_norms_of_another_one():
    status, output = jobs.run(jobs.python("gluon_clipping.py", "another_session"), **QUIET)
    assert status == 0 and "joined in another session" in output, output


def test_naive_engine_waits_for_each():
    output = run(2, 2, "naive", MXNET_ENGINE_TYPE="NaiveEngine")
    assert output.count("waited for each") == 2, output


def test_a_key_that_one_worker_alone_pushes_is_an_error():
    output = run(2, 1, "frozen_on_one", status=1)
    text = (
        r"error: (?:MXNetError: )?.*worker 0 \([^()]*\): another worker has pushed key '[45]' in a step in which "
        "this one has not"
    )
    assert len(re.findall(text, output)) == 2, output


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_clips_alone_is_an_error_that_names_it_on_all(rank):
    output = run(2, 1, f"on_one_alone:{rank}", status=1, P3_WAIT_TIMEOUT_S="600")
    said = ("asked for", "not set") if rank == 0 else ("not set", "asked for")
    problem = (
        r"error: (?:MXNetError: )?.*worker 0 \(.*\) and worker 1 \(.*\) disagree about the norm to clip the gradients "
        r"of store 0 by, which all workers ask for or none \(.*set_clipping\(\) in MXNet\): "
        "it is %s on the first and %s on the second" % said
    )
    assert len(re.findall(problem, output)) == 2, output


# What is refused, and misuse


def trainer_of(kv, **options):
    net = gluon.nn.Dense(2, in_units=3)
    net.initialize()
    options = {"kvstore": kv, "update_on_kvstore": False, **options}
    return net, gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, **options)


def backward(net):
    with mx.autograd.record():
        loss = net(mx.nd.ones((4, 3))).sum()
    loss.backward()


@pytest.fixture
def kv():
    kv = mx.kv.create("p3_sync")
    kv.set_clipping()
    kv.set_clipping()
    return kv


def refuses(text, call, *arguments, **named):
    with pytest.raises(mx.MXNetError, match=re.escape(text)):
        call(*arguments, **named)


@pytest.mark.parametrize("norm", [0, -1.0, math.nan, None, True, "1"])
def test_norms_that_are_none(kv, norm):
    net, trainer = trainer_of(kv)
    backward(net)
    trainer.allreduce_grads()
    refuses(f"max_norm is {norm!r}; it must be a number above 0", clip_global_norm, trainer, norm)


def test_it_needs_a_store_that_tells_norms():
    net, trainer = trainer_of(mx.kv.create("p3_sync"))
    refuses("behind its allreduce_grads()", clip_global_norm, trainer, 1.0)
    backward(net)
    trainer.allreduce_grads()
    refuses("Call set_clipping() of the store before the first step", clip_global_norm, trainer, 1.0)
    refuses("the store has keys already", trainer._kvstore.set_clipping)
    net, trainer = trainer_of(None)
    backward(net)
    trainer.allreduce_grads()
    refuses("for others take gluon.utils.clip_global_norm", clip_global_norm, trainer, 1.0)


def test_it_needs_new_sums(kv):
    net, trainer = trainer_of(kv)
    backward(net)
    trainer.step(4)
    refuses("call it between trainer.allreduce_grads() and trainer.update()", clip_global_norm, trainer, 1.0)
    backward(net)
    trainer.allreduce_grads()
    clip_global_norm(trainer, 1.0)
    trainer.update(4)
    refuses("there are no new sums", clip_global_norm, trainer, 1.0)


def test_without_any_key_there_is_nothing_to_clip(kv):
    trainer = SimpleNamespace(_kvstore=kv, _params=[])
    refuses("there are no new sums to clip", clip_global_norm, trainer, 1.0)


@pytest.mark.parametrize("norm, factor", [(1e39, 1), (1e300, 1), (1e-36, 1e-36), (1e-50, 0)])
def test_any_norm_above_0_is_one_to_clip_by(kv, norm, factor):
    net, trainer = trainer_of(kv)
    backward(net)
    trainer.allreduce_grads()
    told = math.sqrt(6 * 16 + 2 * 16)
    assert abs(clip_global_norm(trainer, norm).asscalar() - told) < 1e-5
    expected = 4.0 if factor == 1 else 4 * factor / told
    assert abs(net.weight.grad().asnumpy() - expected).max() <= 1e-3 * expected


def test_the_norm_is_the_scripts_to_write_to(kv):
    net, trainer = trainer_of(kv)
    backward(net)
    trainer.allreduce_grads()
    norm = clip_global_norm(trainer, math.inf)
    norm *= 100
    again = clip_global_norm(trainer, math.inf)
    assert again.shape == (1,) and abs(again.asscalar() - math.sqrt(6 * 16 + 2 * 16)) < 1e-5


@pytest.mark.parametrize("optimizer", ["sgd", "lamb"])
def test_stores_that_update_are_refused(kv, optimizer):
    net = gluon.nn.Dense(2, in_units=3)
    net.initialize()
    trainer = gluon.Trainer(net.collect_params(), optimizer, kvstore=kv)
    backward(net)
    refuses("update_on_kvstore=False", trainer.step, 4)
    updating = mx.kv.create("p3_sync")
    updating.set_optimizer(mx.optimizer.create(optimizer))
    refuses("pass update_on_kvstore=False to the Trainer", updating.set_clipping)


@pytest.mark.parametrize("kind", ["p3_async", "p3_ssp"])
def test_stale_stores_are_refused(kind):
    refuses(combinations.refusal(choices.NORM, choices.STALE), mx.kv.create(kind).set_clipping)


def test_deep_gradient_compression_is_refused(kv):
    net, trainer = trainer_of(kv, compression_params={"type": "dgc", "ratio": 0.1})
    backward(net)
    refuses("dgc", trainer.allreduce_grads)


def test_factors_are_refused(kv):
    net = gluon.nn.Dense(30, in_units=30)
    net.initialize()
    p3.factors(net, route="factors")
    trainer = gluon.Trainer(net.collect_params(), "sgd", kvstore=kv, update_on_kvstore=False)
    with mx.autograd.record():
        loss = net(mx.nd.ones((4, 30))).sum()
    loss.backward()
    refuses(combinations.refusal(choices.CLIPPING, choices.FACTORS), trainer.allreduce_grads)


def test_loss_scalers_are_refused(kv):
    net, trainer = trainer_of(kv)
    backward(net)
    trainer.allreduce_grads()
    trainer._amp_loss_scaler = object()
    try:
        refuses(combinations.refusal(choices.CLIPPING, choices.SCALER), clip_global_norm, trainer, 1.0)
    finally:
        del trainer._amp_loss_scaler


def test_keys_that_come_late_or_twice_are_errors(kv):
    net, trainer = trainer_of(kv)
    backward(net)
    trainer.step(4)
    refuses("comes after the first step, whose norm the servers have told", kv.init, "late", mx.nd.ones(3))
    kv.push(0, mx.nd.ones(2))
    refuses("key 0 is pushed twice in one step", kv.push, 0, mx.nd.ones(2))
    backward(net)
    kv.push(1, mx.nd.ones((2, 3)))
    kv.store.end_pushes()  # or no worker could join() any more


def test_row_sparse_weights_are_refused_as_such(kv):
    weight = mx.nd.ones((4, 2)).tostype("row_sparse")
    kv.init("table", weight)
    refuses("key 'table' has a row_sparse weight, which the servers update", kv.push, "table", weight)


def test_rows_that_nobody_announced_are_an_error(kv):
    kv.init("table", mx.nd.ones((4, 2)))
    gradient = mx.nd.sparse.row_sparse_array((mx.nd.ones((1, 2)), mx.nd.array([1])), shape=(4, 2))
    refuses("that must be known at init", kv.push, "table", gradient)
