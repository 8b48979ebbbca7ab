"""The store's contract, in one process: what MXNet, Gluon and a loop of one's own may ask of it."""

import inspect
import pickle

import numpy as np
import pytest

mx = pytest.importorskip("mxnet")
from mxnet import autograd, gluon  # noqa: E402
from mxnet.base import MXNetError  # noqa: E402

import p3  # noqa: E402


@pytest.fixture
def kv():
    return mx.kv.create("p3_sync")


def zeros(*shape, **settings):
    return mx.nd.zeros(shape, **settings)


def random(*shape, dtype="float32", seed=3):
    return mx.nd.array(np.random.RandomState(seed).uniform(-1, 1, size=shape), dtype=dtype)


# What it is


@pytest.mark.parametrize("name", ["p3_sync", "dist_p3_sync", "P3_Sync"])
def test_mxnet_creates_it_by_name(name):
    kv = mx.kv.create(name)
    assert isinstance(kv, mx.kvstore.KVStore) and isinstance(kv, p3.P3KVStore)
    assert (kv.type, kv.rank, kv.num_workers) == ("dist_p3_sync", 0, 1)
    assert kv.is_capable("optimizer")
    with pytest.raises(ValueError, match="Unknown capability: colour"):
        kv.is_capable("colour")


def test_no_inherited_method_is_left_to_touch_a_native_handle(kv):
    members = {**vars(mx.kvstore.KVStoreBase), **vars(mx.kvstore.KVStore)}
    offered = {name for name, member in members.items() if inspect.isfunction(member) or isinstance(member, property)}
    assert offered <= set(vars(p3.P3KVStore))
    with pytest.raises(MXNetError, match="no native handle"):
        kv.handle


# Values in, values out


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "uint8", "int8", "int32", "int64"])
def test_without_an_optimizer_the_sum_replaces_the_value(kv, dtype):
    out = zeros(2, 3, dtype=dtype)
    kv.broadcast("key", mx.nd.array([[0, 1, 2], [3, 4, 5]], dtype=dtype), out)
    assert out.asnumpy().tolist() == [[0, 1, 2], [3, 4, 5]]
    kv.pushpull("key", mx.nd.full((2, 3), 7, dtype=dtype), out=out)
    assert out.dtype == np.dtype(dtype) and out.asnumpy().tolist() == [[7, 7, 7], [7, 7, 7]]


@pytest.mark.parametrize("shape", [(), (1,), (0,), (0, 3), (3, 1, 2), (49_999,), (50_000,), (120_001,)])
def test_any_number_of_elements(kv, shape):
    with mx.util.np_shape(True):
        value = mx.nd.array(np.arange(np.prod(shape, dtype=int)).reshape(shape))
        out = mx.nd.ones(shape)
        kv.init(0, value)
        kv.pull(0, out)
        assert np.array_equal(out.asnumpy(), value.asnumpy()) and out.shape == shape
        kv.pushpull(0, value + 1, out=out)
        assert np.array_equal(out.asnumpy(), value.asnumpy() + 1)


def test_push_without_pull_keeps_the_result_for_the_next_pull(kv):
    out = zeros(4)
    kv.init("key", random(4))
    kv.push("key", mx.nd.ones(4))
    kv.push("key", mx.nd.ones(4) * 2)
    kv.pull("key", out)
    assert out.asnumpy().tolist() == [2] * 4


def test_pushpull_without_out_writes_the_gradients(kv):
    gradients = [mx.nd.ones(4), mx.nd.ones(4, ctx=mx.cpu(1)) * 2]
    kv.init("key", random(4))
    kv.pushpull("key", gradients)
    assert [gradient.asnumpy().tolist() for gradient in gradients] == [[3] * 4] * 2


def test_devices_are_summed_in_the_order_given(kv):
    large, small = mx.nd.full(4, 2.0**24), mx.nd.ones(4)
    kv.init("key", zeros(4))
    for order in ([large, small, small], [small, small, large]):
        values = [value.as_in_context(mx.cpu(i)) for i, value in enumerate(order)]
        expected = (order[0] + order[1]) + order[2]
        out = zeros(4)
        kv.pushpull("key", values, out=out)
        assert np.array_equal(out.asnumpy(), expected.asnumpy())


def test_lists_of_keys(kv):
    keys = [5, 3, 9]
    outs = [zeros(2), [zeros(3), zeros(3, ctx=mx.cpu(1))], zeros(1)]
    kv.broadcast(keys, [mx.nd.ones(n) * n for n in (2, 3, 1)], outs)
    assert outs[1][1].asnumpy().tolist() == [3] * 3
    kv.push(keys, [[mx.nd.ones(n)] * 2 for n in (2, 3, 1)])
    kv.pull(keys, outs)
    assert [outs[0].asnumpy().tolist(), outs[2].asnumpy().tolist()] == [[2, 2], [2]]
    with pytest.raises(MXNetError, match="3 keys need as many values"):
        kv.pull(keys, outs[:2])


def test_a_key_that_a_call_repeats_has_the_values_of_all(kv):
    kv.init([3, 5], [zeros(2), zeros(2)])
    kv.push([3, 5, 3], [mx.nd.ones(2), [mx.nd.ones(2) * 10] * 2, [mx.nd.ones(2) * 2, mx.nd.ones(2) * 4]])
    outs = [zeros(2) for _ in range(3)]
    kv.pull([3, 5, 3], outs)
    assert [out.asnumpy().tolist() for out in outs] == [[7, 7], [20, 20], [7, 7]]
    assert kv.stats()["keys"][3]["rounds"] == 1
    kv.pushpull((3, 3), outs[:2])
    assert [out.asnumpy().tolist() for out in outs] == [[27, 27], [27, 27], [7, 7]]
    kv.broadcast([7, 9], [mx.nd.ones(2), zeros(2)], [[outs[0], outs[1]], outs[2]])
    assert [out.asnumpy().tolist() for out in outs] == [[1, 1], [1, 1], [0, 0]]


def test_what_is_wrong_with_one_key_of_a_list_leaves_the_others_as_they_were(kv):
    kv.init([3, 5], [zeros(2), zeros(2)])
    ones, wide, kept = mx.nd.ones(2), mx.nd.ones(3), zeros(2)
    for wrong in (
        lambda: kv.push([3, "unknown"], [ones, ones]),
        lambda: kv.push([3, 5], [ones, wide]),
        lambda: kv.pushpull([3, "unknown"], [ones, ones], out=[kept, kept]),
        lambda: kv.pushpull([3, 5], [ones, ones], out=[kept, wide]),
    ):
        with pytest.raises(MXNetError, match="not initialised|has shape"):
            wrong()
        kv.pull(3, out := mx.nd.ones(2))
        assert out.asnumpy().tolist() == kept.asnumpy().tolist() == [0, 0]
    kv.push(3, ones)
    for wrong in (lambda: kv.pull([3, "unknown"], [kept, kept]), lambda: kv.pull([3, 5], [kept, wide])):
        with pytest.raises(MXNetError, match="not initialised|has shape"):
            wrong()
        assert kept.asnumpy().tolist() == [0, 0]


def test_keys_that_share_gradients_are_all_pushed_before_any_is_pulled(kv):
    gradients = [mx.nd.ones(2), mx.nd.ones(2, ctx=mx.cpu(1))]
    kv.init([3, 5], [zeros(2), zeros(2)])
    kv.pushpull([3, 5], [gradients] * 2)
    assert [gradient.asnumpy().tolist() for gradient in gradients] == [[2, 2]] * 2


def test_values_are_cast_to_the_type_of_the_array_that_takes_them(kv):
    value = mx.nd.array([0.5, 2.75, -3.25])
    kv.broadcast("w", value, out := zeros(3, dtype="float16"))
    assert (out.dtype, out.asnumpy().tolist()) == (np.float16, [0.5, 2.75, -3.25])
    for dtype, expected in (("float16", [1, 5.5, -6.5]), ("float64", [1, 5.5, -6.5]), ("int32", [1, 5, -6])):
        outs = zeros(3, dtype=dtype), zeros(3), mx.np.zeros((3,), dtype=dtype)
        kv.push("w", [value, value])
        kv.pull("w", out=list(outs))
        assert [str(np.dtype(out.dtype)) for out in outs] == [dtype, "float32", dtype]
        assert [out.asnumpy().tolist() for out in outs] == [expected, [1, 5.5, -6.5], expected]
        kv.pushpull("w", value, out=outs[0])
        assert outs[0].asnumpy().tolist() == [np.dtype(dtype).type(number) for number in value.asnumpy()]


def test_the_sum_over_devices_has_the_type_of_the_first(kv):
    kv.init("w", zeros(3))
    finer = mx.nd.full(3, 1 + 2.0**-30, dtype="float64", ctx=mx.cpu(1))
    kv.pushpull("w", [mx.nd.ones(3), finer], out=(out := zeros(3)))
    assert out.asnumpy().tolist() == [2] * 3


def test_a_worker_that_updates_casts_too(kv):
    kv._set_updater(lambda key, received, stored: mx.nd.elemwise_add(stored, received * 2, out=stored))
    kv.init("w", mx.nd.ones(3, dtype="float16"))
    kv.push("w", mx.nd.full(3, 0.25, dtype="float16"))
    kv.pull("w", out := zeros(3))
    assert (out.dtype, out.asnumpy().tolist()) == (np.float32, [1.5] * 3)


def test_numbers_and_strings_are_different_keys(kv):
    outs = zeros(1), zeros(1)
    kv.broadcast([1, "1"], [mx.nd.ones(1), mx.nd.ones(1) * 2], list(outs))
    assert [out.asscalar() for out in outs] == [1, 2]


def test_nan_and_infinity_are_passed_on(kv):
    out = zeros(3)
    kv.init("key", zeros(3))
    kv.pushpull("key", mx.nd.array([np.nan, np.inf, 1]), out=out)
    assert np.array_equal(out.asnumpy(), [np.nan, np.inf, 1], equal_nan=True)


def test_numpy_like_arrays(kv):
    out = mx.np.zeros((2,))
    kv.broadcast("key", mx.np.ones((2,)), out)
    kv.pushpull("key", [mx.np.ones((2,)) * 2, mx.np.ones((2,))], out=[out])
    assert out.asnumpy().tolist() == [3, 3]


def test_calls_are_allowed_while_autograd_records(kv):
    weight = mx.nd.ones(2)
    weight.attach_grad()
    kv.init("key", weight)
    with autograd.record():
        (weight * 2).sum().backward()
        kv.pushpull("key", [weight.grad, weight.grad], out=weight)
        assert autograd.is_recording()
    assert weight.asnumpy().tolist() == [4, 4]


def test_initialising_again_keeps_the_value(kv):
    out = zeros(2)
    kv.init("key", mx.nd.ones(2))
    kv.broadcast("key", zeros(2), out)
    assert out.asnumpy().tolist() == [1, 1]


def test_stats_count_what_was_sent(kv):
    before = kv.stats()
    kv.init("key", zeros(1000))
    kv.pushpull("key", zeros(1000))
    mx.nd.waitall()
    after = kv.stats()
    assert after["rounds"] - before["rounds"] == 2
    assert 8000 <= after["bytes_sent"] - before["bytes_sent"] < 20000


def test_stats_tell_of_servers_queues_and_keys(kv):
    kv.set_gradient_compression({"type": "fp16"})
    kv.init(["large", "small"], [zeros(200_000), zeros(3, dtype="int64")])
    for _ in range(3):
        kv.push("large", zeros(200_000))
    mx.nd.waitall()
    stats = kv.stats(servers=True)
    (server,) = stats["servers"]
    assert {name: server[name] for name in server if name != "itself"}.items() <= stats.items()
    assert stats["queued_slices"] == 0 and stats["peak_queued_slices"] >= 1 and stats["queued_s"] > 0
    assert server["itself"]["rounds"] >= 12 and server["itself"]["cpu_s"] > 0
    assert stats["system_calls"] > 0 and server["itself"]["system_calls"] > 0
    large, small = stats["keys"]["large"], stats["keys"]["small"]
    assert (large["rounds"], large["compression"], small["rounds"], small["compression"]) == (3, "fp16", 0, None)
    assert 0 < large["longest_wait_s"] <= large["waited_s"] < 60
    assert "itself" not in kv.stats()["servers"][0]


def test_stats_are_flat_if_asked_for(kv):
    kv.init("key", zeros(1000))
    before = kv.stats(flat=True)
    for _ in range(3):
        kv.push("key", zeros(1000))
    mx.nd.waitall()
    kv.mark_stall("key", 1_000_000_000, 1_500_000_000)
    after = kv.stats(flat=True)
    assert all(type(value) is float for value in after.values())
    assert after["p3/steps"] >= before["p3/steps"] and after["p3/sent_bytes"] >= before["p3/sent_bytes"] + 12000
    assert after["p3/waited_s"] == before.get("p3/waited_s", 0.0) + 0.5


# Settings of a store


def test_gradients_are_averaged_if_asked_for(kv):
    kv.set_reduction("average")
    kv.set_reduction("average")
    out = zeros(2)
    kv.broadcast("key", zeros(2), out)
    kv.pushpull("key", mx.nd.ones(2) * 6, out=out)
    assert out.asnumpy().tolist() == [6, 6]  # over one worker; more in test_uneven.py


def test_a_strategy_says_how_keys_are_cut_and_has_entries_for_them_alone(kv):
    given = {"version": 1, "default": {"slice": 10}, "keys": {7: {"slice": 4}, "late": {"slice": 2}}}
    with pytest.raises(MXNetError, match="the strategy in the script: server 1 is named, but the job has 1 server"):
        kv.set_strategy({"version": 1, "default": {"servers": [1]}})
    kv.set_strategy(given)
    kv.init([7, "w"], [zeros(20), zeros(20)])
    keys = kv.store.session.keys
    assert [keys.wait_for(kv.store.keys[key].declared).plan.slice_elements for key in (7, "w")] == [4, 10]
    with pytest.raises(MXNetError, match="has an entry for key 'late', but the keys are '7', 'w'. Correct its name"):
        kv.push(7, mx.nd.ones(20))
    kv.init("late", zeros(3))
    out = zeros(20)
    kv.pushpull(7, mx.nd.ones(20), out=out)
    assert out.asnumpy().tolist() == [1] * 20


def test_compression_may_be_named_as_in_mxnet(kv):
    kv.set_gradient_compression({"type": "2bit"})
    out = zeros(3)
    kv.init("key", zeros(3))
    kv.pushpull("key", mx.nd.array([0.3, -0.7, 2]), out=out)
    assert out.asnumpy().tolist() == [0, -0.5, 0.5]
    kv.pushpull("key", mx.nd.array([0.3, 0, 0]), out=out)
    assert out.asnumpy().tolist() == [0.5, 0, 0.5]
    kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})


def test_a_store_keeps_its_settings_and_keys_to_itself(kv):
    other = mx.kv.create("p3_sync")
    kv.set_gradient_compression({"type": "2bit"})
    other.set_optimizer(mx.optimizer.SGD(learning_rate=1.0))
    outs = zeros(1), zeros(1)
    for store, out in zip((kv, other), outs):
        store.broadcast("key", mx.nd.ones(1) * 3, out)
        store.pushpull("key", mx.nd.ones(1) * 0.25, out=out)
    assert [out.asscalar() for out in outs] == [0, 2.75]
    kv.pushpull("key", mx.nd.ones(1) * 0.25, out=outs[0])  # rounds of its own, too
    assert outs[0].asscalar() == 0.5


def test_join_of_the_only_worker_returns_at_once(kv):
    with pytest.raises(MXNetError, match="has no keys"):
        kv.join()
    out = zeros(2)
    kv.broadcast("key", mx.nd.ones(2), out)
    kv.join()
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=1.0))
    kv.pushpull("key", mx.nd.ones(2), out=out)
    kv.join()
    kv.pushpull("key", mx.nd.ones(2), out=out)
    assert out.asnumpy().tolist() == [-1, -1]


def test_members_of_a_job_of_one_are_told_between_any_two_steps(kv):
    out = zeros(2)
    kv.broadcast("key", mx.nd.ones(2), out)
    for epoch in range(2):
        assert kv.members(epoch) == (0,) == kv.members()
        kv.pushpull("key", mx.nd.ones(2), out=out)


def test_members_wait_for_rounds_that_mxnets_engine_holds_back(kv):
    out = zeros(600, 600)
    kv.init("key", out)
    gradient = random(600, 600)
    for _ in range(50):
        gradient = mx.nd.dot(gradient, gradient) * 1e-2
    kv.pushpull("key", gradient, out=out)
    kv.members(1)
    assert kv.stats()["keys"]["key"]["rounds"] == 1


# Wrong use: the error names the key and both values, and the store goes on working


def wrong_uses(kv):
    sparse = zeros(2, 3).tostype("csr")
    yield "key 'unknown' was not initialised", lambda: kv.pull("unknown", zeros(2, 3))
    yield "key 7 was not initialised", lambda: kv.pushpull(7, zeros(2, 3))
    yield r"key 'key' has shape \(2, 3\) and type float32.*initialised again with shape \(3, 2\) and type float32", (
        lambda: kv.init("key", zeros(3, 2))
    )
    yield "type float32.*initialised again with .*float64", lambda: kv.init("key", zeros(2, 3, dtype="float64"))
    yield r"pushed with shape \(6,\)", lambda: kv.push("key", zeros(6))
    yield r"pushed with shape \(1, 3\)", lambda: kv.push("key", [zeros(2, 3), zeros(1, 3)])
    yield r"pulled into an array of shape \(2,\)", lambda: kv.pull("key", out=zeros(2))
    yield "pushed with .*float64", lambda: kv.push("key", zeros(2, 3, dtype="float64"))
    yield "key 'key' takes one first value, not 2", lambda: kv.init("key", [zeros(2, 3)] * 2)
    yield "key 'new' takes one first value, not 2", lambda: kv.init(["new", "new"], [zeros(2, 3)] * 2)
    yield r"whole number, not \['key'\]", lambda: kv.pull([["key"]], [zeros(2, 3)])
    yield "no `out`", lambda: kv.pull("key")
    yield "an empty list", lambda: kv.push("key", [])
    yield "expected an NDArray or a list of them, not ndarray", lambda: kv.push("key", np.zeros((2, 3)))
    yield "a key is a string or a whole number", lambda: kv.init(1.5, zeros(2))
    yield "type bool cannot be synchronised", lambda: kv.init("flags", mx.np.zeros((2,), dtype="bool"))
    yield "csr array.*dense and row_sparse arrays only", lambda: kv.push("key", sparse)
    yield "must be set before the first init", lambda: kv.set_gradient_compression({"type": "2bit"})
    yield "must be set before the first init", lambda: kv.set_reduction("average")
    yield "strategy .* must be set before the first init", lambda: kv.set_strategy({"version": 1})
    yield "the strategy /nowhere cannot be read: No such file", lambda: kv.set_strategy("/nowhere")
    yield "must be a dict", lambda: kv.set_gradient_compression("2bit")
    yield "type is '3bit'; it must be one of 1bit, 2bit", lambda: kv.set_gradient_compression({"type": "3bit"})
    yield "threshold is 0.0; it must be", lambda: kv.set_gradient_compression({"type": "2bit", "threshold": 0})
    yield "type is 'product'; it must be one of average, mean, sum", lambda: kv.set_reduction("product")
    yield "no optimizer was set", lambda: kv.save_optimizer_states("/nowhere")
    yield "no optimizer was set", lambda: kv.load_optimizer_states("/nowhere")
    yield "round is -1; it must be a whole number", lambda: kv.members(-1)
    yield "take no command 2: they never evaluate", lambda: kv._send_command_to_servers(2, "")


def test_wrong_use_is_an_error_that_says_what_and_where(kv):
    kv.init("key", mx.nd.ones((2, 3)))
    for message, call in wrong_uses(kv):
        with pytest.raises(MXNetError, match=message):
            call()
    out = zeros(2, 3)
    kv.pull("key", out)
    assert out.asnumpy().tolist() == [[1] * 3] * 2


# Optimizers


def updates_of(optimizer, rounds, change=lambda round, optimizer: None):
    """The weight after each round, by MXNet's own updater."""
    weight, updater, seen = random(5, 4), mx.optimizer.get_updater(optimizer), []
    for round in range(rounds):
        change(round, optimizer)
        updater(0, random(5, 4, seed=round), weight)
        seen.append(weight.asnumpy())
    return seen


def updates_through(kv, optimizer, rounds, change=lambda round, optimizer: None):
    weight, seen = random(5, 4), []
    kv.set_optimizer(optimizer)
    kv.init(0, weight)
    for round in range(rounds):
        change(round, optimizer)
        kv.pushpull(0, random(5, 4, seed=round), out=weight)
        seen.append(weight.asnumpy())
    return seen


@pytest.mark.parametrize("gradient", [mx.nd.ones((2, 2)), mx.nd.ones((2, 2)).tostype("row_sparse")])
def test_another_optimizer_of_the_same_kind_begins_with_fresh_states(kv, gradient):
    """As in MXNet; Adam's moments without the count of updates that its correction needs are neither."""
    out, expected = zeros(2, 2), zeros(2, 2)
    kv.set_optimizer(mx.optimizer.Adam())
    kv.init("w", zeros(2, 2))
    updater = mx.optimizer.get_updater(mx.optimizer.Adam())
    for step in range(4):
        if step == 2:
            kv.set_optimizer(mx.optimizer.Adam(learning_rate=0.5))
            updater = mx.optimizer.get_updater(mx.optimizer.Adam(learning_rate=0.5))
        kv.push("w", gradient * (step + 1))
        updater("w", gradient * (step + 1), expected)
        kv.pull("w", out)
        assert np.array_equal(out.asnumpy(), expected.asnumpy())


@pytest.mark.parametrize("name", ["sgd", "adam", "lamb"])  # the last one runs on the workers
def test_set_optimizer_updates_as_mxnet_does(kv, name):
    def new():
        return mx.optimizer.create(name, learning_rate=0.1, wd=0.01, rescale_grad=0.5)

    assert np.allclose(updates_through(kv, new(), 5), updates_of(new(), 5), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["sgd", "lamb"])
def test_changed_scalars_count_from_the_next_push(kv, name):
    def new():
        return mx.optimizer.create(name, learning_rate=0.1)

    def change(round, optimizer):
        if round == 2:
            optimizer.set_learning_rate(0.01)
            optimizer.rescale_grad = 3.0
            optimizer.wd = 0.1

    assert np.allclose(updates_through(kv, new(), 5, change), updates_of(new(), 5, change), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", "sgd nag signum adam adamax nadam adagrad adadelta rmsprop ftml ftrl".split())
def test_so_do_all_other_numbers_of_an_optimizer(kv, name):
    def new():
        moves = {"momentum": 0.9} if name in ("sgd", "nag", "signum") else {}
        return mx.optimizer.create(name, learning_rate=0.1, wd=0.01, **moves)

    def change(round, optimizer):
        for number in "momentum beta1 beta2 gamma1 epsilon float_stable_eps rho lamda1 wd_lh".split() * (round > 1):
            if getattr(optimizer, number, None):
                setattr(optimizer, number, getattr(optimizer, number) * 0.75)

    assert np.allclose(updates_through(kv, new(), 5, change), updates_of(new(), 5, change), rtol=1e-6, atol=1e-7)


def test_a_momentum_that_begins_in_the_middle_is_an_error(kv):
    def change(round, optimizer):
        optimizer.momentum = 0.9 if round == 2 else 0.0

    with pytest.raises(MXNetError, match="momentum has become 0.9 .* began with 0.0: the servers keep no velocity"):
        updates_through(kv, mx.optimizer.SGD(), 5, change)


def test_optimizer_that_the_servers_lack_is_named_in_the_log(kv, caplog):
    kv.set_optimizer(mx.optimizer.LAMB())
    assert "LAMB updates the weights on every worker" in caplog.text and "whole tensors" in caplog.text


def test_weights_of_before_an_optimizer_on_the_workers_are_kept(kv):
    out = zeros(3)
    kv.init(0, mx.nd.ones(3))
    kv._set_updater(lambda key, received, stored: mx.nd.elemwise_add(stored, received * 2, out=stored))
    kv.pushpull(0, mx.nd.ones(3), out=out)
    kv.push(0, mx.nd.ones(3))
    kv.pull(0, out)
    assert out.asnumpy().tolist() == [5] * 3


def test_a_second_optimizer_is_refused(kv):
    kv.set_optimizer(mx.optimizer.SGD(momentum=0.9))
    with pytest.raises(MXNetError, match="sgd.*already"):
        kv.set_optimizer(mx.optimizer.Adam())
    with pytest.raises(MXNetError, match="SGD already"):
        kv.set_optimizer(mx.optimizer.LAMB())
    kv.set_optimizer(mx.optimizer.SGD(momentum=0.9, learning_rate=0.5))  # the same, but for what may change


@pytest.mark.parametrize("name", ["sgd", "lamb"])  # the last one runs on the workers in any case
@pytest.mark.parametrize("waits", [False, True])
def test_an_optimizer_set_after_a_push_goes_on_from_the_sum_as_in_mxnet(kv, caplog, name, waits):
    results = []
    for store in (mx.kv.create("local"), kv):
        optimizer = mx.optimizer.create(name, learning_rate=0.5, wd=0.01)
        outs = [random(5, 4), random(5, 4, seed=1)]
        store.init([0, 1], outs)
        store.push(0, random(5, 4, seed=4))
        if waits:
            store.pull(0, outs[0])
            outs[0].wait_to_read()
        store.set_optimizer(optimizer)
        for round in range(3):
            store.push([0, 1], [random(5, 4, seed=round), random(5, 4, seed=-round % 100)])
        store.pull([0, 1], outs)
        results.append([out.asnumpy() for out in outs])
    assert np.allclose(*results, rtol=1e-5, atol=1e-6)
    assert "updates the weights on every worker" in caplog.text
    assert ("pushed without it; set it before the first push" in caplog.text) == (name == "sgd")


def test_an_optimizer_in_place_of_one_on_the_workers_keeps_the_weights(kv, caplog):
    out = zeros(3)
    kv.init(0, mx.nd.ones(3))
    kv.set_optimizer(mx.optimizer.LAMB())
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=1))
    kv.push(0, mx.nd.ones(3) * 2)
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=2))
    kv.pushpull(0, mx.nd.ones(3), out=out)
    assert out.asnumpy().tolist() == [1 - 2 - 2] * 3
    assert "the workers update this store's weights already" in caplog.text


def test_mxnets_own_commands_are_applied(kv):
    kv._send_command_to_servers(0, pickle.dumps(mx.optimizer.SGD(learning_rate=0.5), 0).decode())
    kv._send_command_to_servers(1, "")
    out = zeros(2)
    kv.broadcast("key", mx.nd.ones(2), out)
    kv.pushpull("key", mx.nd.ones(2), out=out)
    assert out.asnumpy().tolist() == [0.5] * 2


def test_average_of_whole_numbers_is_refused(kv):
    kv.set_reduction("average")
    with pytest.raises(MXNetError, match="key 'steps': .*int32.* averages .*another store"):
        kv.init("steps", zeros(2, dtype="int32"))


# The optimizer's state, on the servers (or for LAMB on the workers), and in files

OPTIMIZERS = {
    "sgd": {"momentum": 0.9},
    "plain": {"name": "sgd"},
    "adam": {},
    "rmsprop": {"centered": True},
    "lamb": {},
}


def new_optimizer(case):
    settings = dict({"name": case, "learning_rate": 0.1, "wd": 0.01}, **OPTIMIZERS[case])
    return mx.optimizer.create(settings.pop("name"), **settings)


def stepped(store, rounds, weights):
    for step in rounds:
        for key, weight in weights.items():
            store.pushpull(key, random(*weight.shape, seed=step, dtype=weight.dtype), out=weight)


def opened(case, dtype="float32", multi_precision=False):
    """A store with that optimizer and two keys, one of several slices; and their weights."""
    store = mx.kv.create("p3_sync")
    optimizer = new_optimizer(case)
    optimizer.multi_precision = multi_precision
    store.set_optimizer(optimizer)
    weights = {"large": random(120_001, dtype=dtype), 7: random(2, 3, dtype=dtype)}
    store.broadcast(list(weights), list(weights.values()), list(weights.values()))
    return store, weights


@pytest.mark.parametrize("dump", [False, True])
@pytest.mark.parametrize("case", OPTIMIZERS)
def test_saved_states_continue_an_undisturbed_run(case, dump, tmp_path):
    states = str(tmp_path / "states")
    store, weights = opened(case)
    stepped(store, range(4), weights)
    store.save_optimizer_states(states, dump_optimizer=dump)
    saved = {key: weight.copy() for key, weight in weights.items()}
    counts = dict(store._updater.optimizer._index_update_count)
    stepped(store, range(4, 7), weights)

    other, others = opened(case)
    other.store.expect_new_values()
    other.broadcast(list(saved), list(saved.values()), list(others.values()))
    other.load_optimizer_states(states)
    if not dump:  # then only the states are in the file
        other._updater.optimizer._index_update_count.update(counts)
        other._updater.optimizer.num_update = 4
    stepped(other, range(4, 7), others)
    for key, weight in weights.items():
        assert np.array_equal(others[key].asnumpy(), weight.asnumpy()), key


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_saved_states_are_those_of_mxnets_own_updater_which_can_load_them(case, tmp_path):
    states = str(tmp_path / "states")
    store, weights = opened(case)
    updater, mine = mx.optimizer.get_updater(new_optimizer(case)), {k: w.copy() for k, w in weights.items()}
    stepped(store, range(3), weights)
    store.save_optimizer_states(states, dump_optimizer=True)
    loaded = mx.optimizer.get_updater(new_optimizer(case))
    with open(states, "rb") as file:
        loaded.set_states(file.read())
    for step in range(6):
        for key, weight in mine.items():
            if step == 3:
                weight[:] = weights[key]
            (updater if step < 3 else loaded)(key, random(*weight.shape, seed=step), weight)
    stepped(store, range(3, 6), weights)
    for key, weight in weights.items():
        assert np.allclose(mine[key].asnumpy(), weight.asnumpy(), rtol=1e-6, atol=1e-7), key


def test_the_float32_master_of_a_float16_weight_is_saved_too(tmp_path):
    states = str(tmp_path / "states")
    store, weights = opened("sgd", "float16", multi_precision=True)
    stepped(store, range(4), weights)
    store.save_optimizer_states(states, dump_optimizer=True)
    saved = {key: weight.copy() for key, weight in weights.items()}
    stepped(store, range(4, 9), weights)
    other, others = opened("sgd", "float16", multi_precision=True)
    other.store.expect_new_values()
    other.broadcast(list(saved), list(saved.values()), list(others.values()))
    other.load_optimizer_states(states)
    stepped(other, range(4, 9), others)
    for key, weight in weights.items():
        assert np.array_equal(others[key].asnumpy(), weight.asnumpy()), key


def test_a_key_that_the_file_lacks_begins_anew(tmp_path):
    states = str(tmp_path / "states")
    store, weights = opened("sgd")
    stepped(store, range(2), {7: weights[7]})
    store.save_optimizer_states(states)
    stepped(store, range(2), {"large": weights["large"]})
    store.load_optimizer_states(states)
    before = weights["large"].copy()
    stepped(store, [5], {"large": weights["large"]})
    expected = before - 0.1 * (random(120_001, seed=5) + 0.01 * before)  # no momentum left
    assert np.allclose(weights["large"].asnumpy(), expected.asnumpy(), atol=1e-6)


def test_a_file_that_does_not_fit_is_refused_and_changes_nothing(tmp_path):
    states = tmp_path / "states"
    store, weights = opened("sgd")
    twin, twins = opened("sgd")
    for one, its in ((store, weights), (twin, twins)):
        stepped(one, range(3), its)
    store.save_optimizer_states(str(states))
    good = states.read_bytes()

    def refuses(content, message):
        states.write_bytes(content)
        with pytest.raises(MXNetError, match=message):
            store.load_optimizer_states(str(states))

    def saved(**changes):
        return pickle.dumps(dict(pickle.loads(good), **changes))

    for length in (0, 1, len(good) // 2, len(good) - 1):
        refuses(good[:length], "is truncated")
    refuses(b"a text of somebody", "holds no optimizer states")
    refuses(pickle.dumps([1, 2]), "holds no optimizer states")
    refuses(saved(stranger=None), "has no key 'stranger'")
    refuses(saved(large=mx.nd.ones(3)), r"key 'large'.*shape \(120001,\).*shape \(3,\)")
    refuses(saved(large=None), "key 'large'")
    refuses(saved(large=(mx.nd.ones(120_001), mx.nd.ones(120_001))), "key 'large'")
    other_optimizer = mx.optimizer.Adam()
    refuses(pickle.dumps((pickle.loads(good), other_optimizer)), "state of Adam.*optimizer is SGD")
    refuses(pickle.dumps((pickle.loads(good), mx.optimizer.SGD(momentum=0.5))), "'momentum': 0.5")
    with pytest.raises(MXNetError, match="No such file"):
        store.load_optimizer_states(str(tmp_path / "missing"))
    with pytest.raises(MXNetError, match="cannot be written"):
        store.save_optimizer_states(str(tmp_path / "missing" / "states"))
    assert [path.name for path in tmp_path.iterdir()] == ["states"]

    for one, its in ((store, weights), (twin, twins)):
        stepped(one, range(3, 6), its)
    for key, weight in weights.items():
        assert np.array_equal(twins[key].asnumpy(), weight.asnumpy()), key


# Gluon's Trainer


def trained(kvstore, during=lambda step, net, trainer: None, steps=6, optimizer="sgd", **settings):
    mx.random.seed(5)
    net = gluon.nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(gluon.nn.Dense(6, activation="tanh"), gluon.nn.Dense(2))
    net.initialize(mx.init.Xavier())
    trainer = gluon.Trainer(net.collect_params(), optimizer, {"learning_rate": 0.1, **settings}, kvstore=kvstore)
    for step in range(steps):
        with autograd.record():
            loss = gluon.loss.L2Loss()(net(random(8, 3, seed=step)), random(8, 2, seed=step + 50))
        loss.backward()
        during(step, net, trainer)
        trainer.step(8)
    return [parameter.data().asnumpy() for parameter in net.collect_params().values()]


def assert_close(got, expected):
    for left, right in zip(got, expected):
        assert np.allclose(left, right, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kvstore", ["p3_sync", "dist_p3_sync"])
def test_trainer_takes_the_name_as_well(kvstore):
    before = mx.kv.create("p3_sync").stats()["rounds"]
    assert_close(trained(kvstore), trained(None))
    assert mx.kv.create("p3_sync").stats()["rounds"] > before  # or it would have trained alone


def test_batch_size_may_change(kv):
    def during(step, net, trainer):
        if step == 3:
            trainer._scale = 2.0  # as step(4) would do, which other stores refuse

    assert_close(trained(kv, during), trained(None, during))


def test_learning_rate_may_change(kv):
    def during(step, net, trainer):
        if step == 3:
            trainer.set_learning_rate(0.01)

    assert_close(trained(kv, during), trained(None, during))


def test_multipliers_of_a_parameter_count(kv):
    def during(step, net, trainer):
        net[0].weight.lr_mult, net[1].bias.wd_mult = 0.1, 3.0

    assert_close(trained(kv, during, wd=0.1), trained(None, during, wd=0.1))


def test_values_may_be_loaded_between_steps(kv):
    def during(step, net, trainer):
        if step == 3:
            net[0].weight.set_data(mx.nd.ones((6, 3)) * 0.1)
            net[1].bias.set_data(mx.nd.ones(2))

    assert_close(trained(kv, during), trained(None, during))


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "lamb"])
def test_loading_the_states_of_before_and_after_counts(kv, optimizer, tmp_path):
    states = str(tmp_path / "states")

    def during(step, net, trainer):
        if step == 2:
            trainer.save_states(states)
        elif step == 4:
            trainer.load_states(states)

    settings = {"momentum": 0.9} if optimizer == "sgd" else {}
    through = trained(kv, during, optimizer=optimizer, **settings)
    assert_close(through, trained(None, during, optimizer=optimizer, **settings))
    assert any(not np.allclose(a, b) for a, b in zip(through, trained(None, optimizer=optimizer, **settings)))


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "lamb"])  # the last one runs on the workers
def test_loading_parameters_keeps_the_optimizers_state(kv, tmp_path, optimizer, by_name):
    """As training without a store does."""
    parameters = str(tmp_path / "parameters")

    def during(step, net, trainer):
        if step == 2:
            net.save_parameters(parameters)
        elif step in (3, 4):
            net.load_parameters(parameters)
        if step > 0:
            stores.append(trainer._kvstore or stores[-1])

    stores = []
    settings = {"momentum": 0.9} if optimizer == "sgd" else {}
    through = trained("p3_sync" if by_name else kv, during, optimizer=optimizer, **settings)
    assert stores[-1].stats()["keys"][0]["rounds"] == 6  # the same keys on the servers all the time
    stores = [None]
    assert_close(through, trained(None, during, optimizer=optimizer, **settings))


def test_states_that_were_loaded_before_the_first_step_are_saved_again(kv, tmp_path):
    states, again = str(tmp_path / "states"), str(tmp_path / "again")

    def during(step, net, trainer):
        if step == 2:
            trainer.save_states(states)

    trained(kv, during, optimizer="adam")
    before, _ = pickle.loads(open(states, "rb").read())
    parameters = [gluon.Parameter("p%d" % key, shape=before[key][0].shape, init="zeros") for key in sorted(before)]
    for parameter in parameters:
        parameter.initialize()
    trainer = gluon.Trainer(parameters, "adam", kvstore=mx.kv.create("p3_sync"))
    trainer.load_states(states)
    trainer.save_states(again)
    after, _ = pickle.loads(open(again, "rb").read())
    assert before.keys() == after.keys() and len(after) == 4
    for key in before:
        for one, other in zip(before[key], after[key]):
            assert one.asnumpy().tobytes() == other.asnumpy().tobytes() and one.asnumpy().any()


def test_a_state_that_begins_anew_begins_with_the_value_that_is_set_behind_it(kv, tmp_path):
    """DCASGD's has the weight of the update before in it."""
    states = str(tmp_path / "states")

    def during(step, net, trainer):
        if step == 0:
            trainer.save_states(states)  # of nothing
        elif step in (3, 5):
            if step == 3:
                trainer.load_states(states)
            net[0].weight.set_data(mx.nd.ones((6, 3)) * 0.1)
            net[1].bias.set_data(mx.nd.ones(2))

    settings = {"optimizer": "dcasgd", "steps": 8, "learning_rate": 0.9, "lamda": 0.9}
    assert_close(trained(kv, during, **settings), trained(None, during, **settings))


def test_other_stores_of_mxnet_still_refuse():
    """The wrappers are for P3's stores only."""
    parameter = gluon.Parameter("p", shape=(1,))
    parameter.initialize()
    trainer = gluon.Trainer([parameter], "sgd", kvstore=None)
    trainer._kvstore, trainer._update_on_kvstore = type("Other", (), {"type": "dist_sync"})(), True
    trainer._distributed = trainer._kv_initialized = True
    with pytest.raises(RuntimeError, match="Cannot reset distributed KVStore"):
        trainer._reset_kvstore()
    with pytest.raises(UserWarning, match="batch_size"):
        trainer._check_and_rescale_grad(0.25)
