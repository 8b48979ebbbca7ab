"""The methods of a KVStore, called as MXNet documents them."""

import ctypes
import pickle

import numpy as np

from compatibility.registry import case, expect, expect_close, expect_equal

METHODS = "Methods"


@case(METHODS)
def init(mx, kv):
    """`init`: the initial value is that of rank 0"""
    kv.init("key", mx.nd.full((2, 3), 10 + kv.rank))
    expect_equal(pulled(mx, kv, "key", (2, 3)), 10)


@case(METHODS)
def broadcast(mx, kv):
    """`broadcast`"""
    out = mx.nd.zeros((2, 3))
    kv.broadcast("key", mx.nd.full((2, 3), 10 + kv.rank), out)
    expect_equal(out, 10)


@case(METHODS)
def push_and_pull(mx, kv):
    """`push` and `pull`: the sum over the workers, in each round"""
    kv.init("key", mx.nd.zeros((2, 3)))
    for round in range(1, 4):
        kv.push("key", mx.nd.full((2, 3), round * (kv.rank + 1)))
        expect_equal(pulled(mx, kv, "key", (2, 3)), 3 * round)


@case(METHODS)
def pushes_without_pull(mx, kv):
    """several `push` of a key without `pull` between them: rounds stay separate"""
    kv.set_optimizer(mx.optimizer.create("adagrad", learning_rate=0.1))
    weight, updater = mx.nd.ones(1000), mx.optimizer.get_updater(mx.optimizer.create("adagrad", learning_rate=0.1))
    kv.init(3, weight)
    for round in range(1, 11):
        kv.push(3, mx.nd.full(1000, round * (3 * kv.rank - 1)))
        updater(3, mx.nd.full(1000, round), weight)
    expect_close(pulled(mx, kv, 3, 1000), weight)


@case(METHODS)
def large_tensor(mx, kv):
    """a tensor of 3 million elements"""
    kv.init("key", mx.nd.zeros(3000000))
    kv.push("key", mx.nd.arange(3000000) * (kv.rank + 1))
    expect_equal(pulled(mx, kv, "key", 3000000), np.arange(3000000, dtype="float32") * 3)


@case(METHODS)
def pull_ignore_sparse(mx, kv):
    """`pull` with `ignore_sparse` True and False"""
    kv.init("key", mx.nd.full(3, 5))
    for ignore_sparse in (True, False):
        out = mx.nd.zeros(3)
        kv.pull("key", out, ignore_sparse=ignore_sparse)
        expect_equal(out, 5)


@case(METHODS)
def pushpull_with_out(mx, kv):
    """`pushpull` with `out`"""
    kv.init("key", mx.nd.zeros(3))
    gradient, out = mx.nd.full(3, kv.rank + 1), mx.nd.zeros(3)
    kv.pushpull("key", gradient, out=out)
    expect_equal(out, 3)


@case(METHODS)
def pushpull_keeps_gradient(mx, kv):
    """`pushpull` with `out` leaves the gradient unchanged"""
    kv.init("key", mx.nd.zeros(3))
    gradient, out = mx.nd.full(3, kv.rank + 1), mx.nd.zeros(3)
    kv.pushpull("key", gradient, out=out)
    expect_equal(out, 3)
    expect_equal(gradient, kv.rank + 1)


@case(METHODS)
def pushpull_without_out(mx, kv):
    """`pushpull` without `out`: in place"""
    kv.init("key", mx.nd.zeros(3))
    gradient = mx.nd.full(3, kv.rank + 1)
    kv.pushpull("key", gradient)
    expect_equal(gradient, 3)


@case(METHODS)
def lists_of_keys(mx, kv):
    """lists of keys in `init`, `push`, `pull` and `pushpull`"""
    keys, shapes = ["a", "b"], [(2,), (3, 2)]
    kv.init(keys, [mx.nd.zeros(shape) for shape in shapes])
    kv.push(keys, [mx.nd.ones(shape) for shape in shapes])
    outs = [mx.nd.zeros(shape) for shape in shapes]
    kv.pull(keys, outs)
    for out in outs:
        expect_equal(out, 2)
    kv.pushpull(keys, [mx.nd.full(shape, 3) for shape in shapes], out=outs)
    for out in outs:
        expect_equal(out, 6)


@case(METHODS)
def repeated_keys(mx, kv):
    """a key several times in one list: its values are summed in one round"""
    kv.init(3, mx.nd.zeros(3))
    kv.init(5, mx.nd.zeros(3))
    outs = [mx.nd.zeros(3) for _ in range(3)]
    for round in range(1, 4):
        values = [mx.nd.full(3, round * (kv.rank + 1) * factor) for factor in (1, 10, 100)]
        kv.push([3, 5, 3], values)
        kv.pull([3, 5, 3], outs)
        for out, expected in zip(outs, (303, 30, 303)):
            expect_equal(out, expected * round)


@case(METHODS)
def pushpull_of_repeated_keys(mx, kv):
    """the same in `pushpull`, in place"""
    kv.init(3, mx.nd.zeros(3))
    values = [mx.nd.full(3, (kv.rank + 1) * factor) for factor in (1, 100)]
    kv.pushpull([3, 3], values)
    for value in values:
        expect_equal(value, 303)


def _expect_cast(out, dtype, expected):
    expect(out.dtype == np.dtype(dtype), "another type")
    expect_equal(out, np.array(expected).astype(dtype))


@case(METHODS)
def pull_casts(mx, kv):
    """`pull` into arrays of other types casts"""
    kv.init("key", mx.nd.zeros(3))
    kv.push("key", mx.nd.array([0.5, 1.25, -2.75]))
    for dtype in ("float16", "float64", "int32"):
        _expect_cast(pulled(mx, kv, "key", 3, dtype), dtype, [1, 2.5, -5.5])


@case(METHODS)
def pull_casts_before_a_push(mx, kv):
    """the same before the first `push`"""
    kv.init("key", mx.nd.array([0.5, 1.25, -2.75]))
    _expect_cast(pulled(mx, kv, "key", 3, "float16"), "float16", [0.5, 1.25, -2.75])


@case(METHODS)
def broadcast_casts(mx, kv):
    """`broadcast` to an array of another type casts"""
    out = mx.nd.zeros(3, dtype="float16")
    kv.broadcast("key", mx.nd.array([0.5, 1.25, -2.75]), out)
    _expect_cast(out, "float16", [0.5, 1.25, -2.75])


@case(METHODS)
def pushpull_casts(mx, kv):
    """`pushpull` with an `out` of another type casts"""
    kv.init("key", mx.nd.zeros(3))
    out = mx.nd.zeros(3, dtype="float64")
    kv.pushpull("key", mx.nd.array([0.5, 1.25, -2.75]), out=out)
    _expect_cast(out, "float64", [1, 2.5, -5.5])


@case(METHODS)
def row_sparse_pull_casts(mx, kv):
    """`row_sparse_pull` into an array of another type casts"""
    kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=0.5))
    kv.init("key", mx.nd.ones((4, 2), dtype="float16").tostype("row_sparse"))
    rows = mx.nd.array([1], dtype="int64")
    values = mx.nd.ones((1, 2), dtype="float16")
    kv.push("key", mx.nd.sparse.row_sparse_array((values, rows), shape=(4, 2), dtype="float16"))
    out = mx.nd.sparse.zeros("row_sparse", (4, 2))
    kv.row_sparse_pull("key", out=out, row_ids=mx.nd.array([1, 3], dtype="int64"))
    _expect_cast(out.tostype("default"), "float32", [[0, 0], [0, 0], [0, 0], [1, 1]])


@case(METHODS)
def push_of_several_types(mx, kv):
    """`push` of arrays of several contexts and types: the sum has the type of the first one and of the key"""
    kv.init("key", mx.nd.zeros(3))
    kv.push("key", [mx.nd.full(3, kv.rank + 1), mx.nd.full(3, 2.5, ctx=mx.cpu(1), dtype="float64")])
    expect_equal(pulled(mx, kv, "key", 3), 8)


@case(METHODS)
def string_keys(mx, kv):
    """strings as keys"""
    sum_of_each(mx, kv, ["weight", "bias", "ä b", "key/1"])


@case(METHODS)
def whole_number_keys(mx, kv):
    """integers as keys, ascending"""
    sum_of_each(mx, kv, [0, 3, 4, 1000000])


@case(METHODS)
def descending_keys(mx, kv):
    """integers as keys, descending"""
    sum_of_each(mx, kv, [9, 8, 7, 6, 5, 4])


@case(METHODS)
def keys_in_different_orders(mx, kv):
    """keys initialised in another order on each worker"""
    keys = list(range(6))
    for key in keys if kv.rank else reversed(keys):
        kv.init(key, mx.nd.full(key + 1, key))
    for key in keys:
        expect_equal(pulled(mx, kv, key, key + 1), key)


@case(METHODS)
def several_contexts(mx, kv):
    """one array for each of several contexts"""
    devices = [mx.cpu(0), mx.cpu(1)]
    outs = [mx.nd.zeros(3, ctx=device) for device in devices]
    kv.broadcast("key", mx.nd.full(3, 7), outs)
    for out in outs:
        expect_equal(out, 7)
    kv.pushpull("key", [mx.nd.full(3, kv.rank + i + 1, ctx=device) for i, device in enumerate(devices)], out=outs)
    for out in outs:
        expect_equal(out, 8)
        expect(out.context in devices, "another context")


def _of_type(dtype):
    def run(mx, kv):
        kv.init("key", mx.nd.zeros(1000, dtype=dtype))
        value = np.arange(1000).astype(dtype) % 50
        kv.push("key", mx.nd.array(value + kv.rank, dtype=dtype))
        out = pulled(mx, kv, "key", 1000, dtype)
        expect(out.dtype == np.dtype(dtype), "another type")
        expect_equal(out, 2 * value + np.array(1, dtype))

    return run


for _dtype in ("float16", "float32", "float64", "int32", "int64", "uint8"):
    case(METHODS, "`%s`: `push` and `pull`" % _dtype, "dtype_" + _dtype)(_of_type(_dtype))


@case(METHODS)
def one_element(mx, kv):
    """a tensor of one element"""
    kv.init("key", mx.nd.zeros(1))
    kv.push("key", mx.nd.ones(1))
    expect_equal(pulled(mx, kv, "key", 1), 2)


@case(METHODS)
def no_element(mx, kv):
    """a tensor without elements"""
    with mx.util.np_shape(True):
        kv.init("key", mx.nd.zeros((0, 3)))
        kv.init("other", mx.nd.zeros(2))
        kv.push("key", mx.nd.zeros((0, 3)))
        expect(pulled(mx, kv, "key", (0, 3)).shape == (0, 3), "another shape")
        kv.push("other", mx.nd.ones(2))
        expect_equal(pulled(mx, kv, "other", 2), 2)


@case(METHODS)
def set_optimizer(mx, kv):
    """`set_optimizer`: the weights are updated by it"""
    weight = mx.nd.full(1000, 1)
    kv.set_optimizer(sgd(mx))
    kv.init(3, weight)
    updater = mx.optimizer.get_updater(sgd(mx))
    for round in range(1, 4):
        kv.push(3, mx.nd.full(1000, round * (kv.rank + 1)))
        updater(3, mx.nd.full(1000, 3 * round), weight)
        expect_close(pulled(mx, kv, 3, 1000), weight)


@case(METHODS)
def set_optimizer_twice(mx, kv):
    """`set_optimizer` a second time, before training: the second one counts"""
    kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=0.5))
    kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=0.25))
    kv.init(3, mx.nd.zeros(4))
    kv.push(3, mx.nd.ones(4))
    expect_close(pulled(mx, kv, 3, 4), np.full(4, -0.5))


@case(METHODS, alone=True)
def set_optimizer_after_push(mx, kv):
    """`set_optimizer` after a `push`: the weights are updated by it from then on"""
    kv.init(3, mx.nd.zeros(4))
    kv.push(3, mx.nd.ones(4))
    expect_equal(pulled(mx, kv, 3, 4), 2)
    kv._barrier()
    kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=0.25))
    kv._barrier()
    kv.push(3, mx.nd.ones(4))
    expect_close(pulled(mx, kv, 3, 4), np.full(4, 1.5))


@case(METHODS, env={"P3_LOCAL_AGGREGATION": "0"})  # else the workers of a machine are added up, and encoded once
def compression_2bit(mx, kv):
    """`set_gradient_compression` 2bit, with error feedback over the rounds"""
    threshold = 0.5
    kv.set_gradient_compression({"type": "2bit", "threshold": threshold})
    size = 60007
    kv.init("key", mx.nd.zeros(size))
    gradients = [np.random.RandomState(rank).uniform(-0.6, 0.6, (4, size)).astype("float32") for rank in range(2)]
    residuals = [np.zeros(size, "float32") for _ in gradients]
    for round in range(4):
        total = np.zeros(size, "float32")
        for residual, gradient in zip(residuals, gradients):
            residual += gradient[round]
            sent = threshold * ((residual >= threshold).astype("float32") - (residual <= -threshold))
            residual -= sent
            total += sent
        kv.push("key", mx.nd.array(gradients[kv.rank][round]))
        expect_equal(pulled(mx, kv, "key", size), total)


@case(METHODS)
def compression_fp16(mx, kv):
    """`set_gradient_compression` fp16"""
    kv.set_gradient_compression({"type": "fp16"})
    size = 60007
    kv.init("key", mx.nd.zeros(size))
    gradients = [np.random.RandomState(rank).uniform(-1, 1, size).astype("float32") for rank in range(2)]
    kv.push("key", mx.nd.array(gradients[kv.rank]))
    expect_close(pulled(mx, kv, "key", size), sum(gradients), 2e-3)


@case(METHODS)
def average(mx, kv):
    """average of the gradients instead of their sum: `set_reduction`"""
    kv.set_reduction("average")
    kv.init("key", mx.nd.zeros(3))
    kv.push("key", mx.nd.full(3, 2 * kv.rank + 1))
    expect_equal(pulled(mx, kv, "key", 3), 2)


@case(METHODS)
def save_and_load_states(mx, kv):
    """`save_optimizer_states`, `load_optimizer_states`: the run continues as if uninterrupted"""
    _save_and_load(mx, kv, dump_optimizer=False)


@case(METHODS)
def save_and_load_states_with_optimizer(mx, kv):
    """the same with `dump_optimizer=True`"""
    _save_and_load(mx, kv, dump_optimizer=True)


def _save_and_load(mx, kv, dump_optimizer):
    def push(store, round):
        store.push(3, mx.nd.full(1000, round * (kv.rank + 1)))
        return pulled(mx, store, 3, 1000)

    kv.set_optimizer(sgd(mx))
    kv.init(3, mx.nd.ones(1000))
    for round in range(3):
        weight = push(kv, round)
    path = "worker%d.states" % kv.rank
    kv.save_optimizer_states(path, dump_optimizer=dump_optimizer)
    for round in range(3, 6):
        undisturbed = push(kv, round)
    other = mx.kv.create(kv.type)
    other.set_optimizer(sgd(mx))
    other.init(3, weight)
    other.load_optimizer_states(path)
    for round in range(3, 6):
        resumed = push(other, round)
    expect_equal(resumed, undisturbed)


@case(METHODS)
def states_load_in_mxnet(mx, kv):
    """the file of `save_optimizer_states` loads in `mx.optimizer.Updater`"""
    kv.set_optimizer(sgd(mx))
    kv.init(3, mx.nd.ones(1000))
    ours, weight = mx.optimizer.get_updater(sgd(mx)), mx.nd.ones(1000)
    for round in range(3):
        kv.push(3, mx.nd.full(1000, round * (kv.rank + 1)))
        ours(3, mx.nd.full(1000, 3 * round), weight)
    pulled(mx, kv, 3, 1000).wait_to_read()
    for dump_optimizer in (False, True):
        path = "worker%d.states" % kv.rank
        kv.save_optimizer_states(path, dump_optimizer=dump_optimizer)
        loaded = mx.optimizer.get_updater(sgd(mx))
        with open(path, "rb") as file:
            loaded.set_states(file.read())
        expect_close(loaded.states[3], ours.states[3])


@case(METHODS)
def barrier(mx, kv):
    """`_barrier`"""
    for _ in range(3):
        kv._barrier()


@case(METHODS)
def identity(mx, kv):
    """`rank`, `num_workers`, `type`"""
    expect(kv.rank in (0, 1) and kv.num_workers == 2, "rank %s of %s" % (kv.rank, kv.num_workers))
    expect("dist" in kv.type and "_sync" in kv.type, kv.type)
    kv.init("key", mx.nd.zeros(2))
    kv.push("key", mx.nd.array([kv.rank == 0, kv.rank == 1]))
    expect_equal(pulled(mx, kv, "key", 2), 1)


@case(METHODS)
def is_capable(mx, kv):
    """`is_capable("optimizer")` is True"""
    expect(kv.is_capable("optimizer") is True, "False: the workers update the weights")


@case(METHODS)
def get_num_dead_node(mx, kv):
    """`get_num_dead_node`: 0 while all are alive"""
    everyone = 1 + 2 + 4  # scheduler, servers, workers
    expect(_num_dead(mx, kv, everyone) == 0, "%d of the living are called dead" % _num_dead(mx, kv, everyone))


def _num_dead(mx, kv, nodes):
    if hasattr(kv, "get_num_dead_node"):
        return kv.get_num_dead_node(nodes, timeout=60)
    number = ctypes.c_int()  # MXNet has it in C only
    mx.base.check_call(mx.base._LIB.MXKVStoreGetNumDeadNode(kv.handle, nodes, ctypes.byref(number), 60))
    return number.value


@case(METHODS)
def stats(mx, kv):
    """`stats`: what was sent and received"""
    kv.init("key", mx.nd.zeros(1000))

    def sent():  # to servers and to this machine's workers
        return kv.stats()["bytes_sent"] + kv.stats()["local"]["bytes_sent"]

    before = sent()
    kv.push("key", mx.nd.ones(1000))
    expect_equal(pulled(mx, kv, "key", 1000), 2)
    expect(sent() >= before + 4000, "4000 bytes were pushed and not counted")


@case(METHODS, alone=True)
def send_command_to_servers(mx, kv):
    """`_send_command_to_servers`: a pickled optimizer"""
    kv.init(3, mx.nd.zeros(4))
    kv._barrier()
    optimizer = mx.optimizer.create("sgd", learning_rate=0.25)
    kv._send_command_to_servers(0, pickle.dumps(optimizer, 0).decode("ascii"))  # as set_optimizer, on every worker
    kv._barrier()
    kv.push(3, mx.nd.ones(4))
    expect_close(pulled(mx, kv, 3, 4), np.full(4, -0.5))


@case(METHODS)
def row_sparse_push_and_pull(mx, kv):
    """`row_sparse` weight: `set_optimizer`, `push` and `row_sparse_pull`"""
    kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=0.5))
    kv.init("key", mx.nd.ones((6, 2)).tostype("row_sparse"))
    rows = mx.nd.array([1, 3 + kv.rank], dtype="int64")
    kv.push("key", mx.nd.sparse.row_sparse_array((mx.nd.full((2, 2), kv.rank + 1), rows), shape=(6, 2)))
    out = mx.nd.sparse.zeros("row_sparse", (6, 2))
    kv.row_sparse_pull("key", out=out, row_ids=mx.nd.array([1, 3, 4], dtype="int64"))
    expect_equal(out.tostype("default"), [[0, 0], [-0.5, -0.5], [0, 0], [0.5, 0.5], [0, 0], [0, 0]])


def sum_of_each(mx, kv, keys):
    for key in keys:
        kv.init(key, mx.nd.zeros(3))
    for factor, key in enumerate(keys, 1):
        kv.push(key, mx.nd.full(3, factor * (kv.rank + 1)))
    for factor, key in enumerate(keys, 1):
        expect_equal(pulled(mx, kv, key, 3), 3 * factor)


def sgd(mx):
    return mx.optimizer.create("sgd", learning_rate=0.1, momentum=0.9, wd=0.01)


def pulled(mx, kv, key, shape, dtype="float32"):
    out = mx.nd.zeros(shape, dtype=dtype)
    kv.pull(key, out)
    return out
