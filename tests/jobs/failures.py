"""One thing goes wrong; every worker prints the error it gets: failures.py CASE."""

import sys
import time

import p3  # noqa: F401
import mxnet as mx


def blocked_array():
    """A convolution's weight as inference leaves it: in a layout that only MXNet can read."""
    layer = mx.gluon.nn.Conv2D(16, 3, in_channels=16)
    layer.initialize()
    layer(mx.nd.ones((4, 16, 12, 12))).wait_to_read()
    return layer.weight.data()


def different_shapes(kv):
    shape = (2, 3) if kv.rank == 0 else (3, 2)
    out = mx.nd.zeros(shape)
    kv.broadcast("weight", mx.nd.zeros(shape), out)
    out.wait_to_read()


def different_types(kv):
    out = mx.nd.zeros(2, dtype="float32" if kv.rank == 0 else "float64")
    kv.broadcast("weight", out, out)
    out.wait_to_read()


def optimizer_on_rank(kv, rank):
    out = mx.nd.zeros(3)
    kv.init("weight", mx.nd.ones(3))
    if kv.rank == rank:
        kv.set_optimizer(mx.optimizer.SGD())
    kv.pushpull("weight", mx.nd.ones(3), out=out)
    out.wait_to_read()


def optimizer_on_rank_0_alone(kv):
    optimizer_on_rank(kv, 0)


def optimizer_on_rank_1_alone(kv):
    optimizer_on_rank(kv, 1)


def other_rates_of_updating_workers(kv):
    layer = mx.gluon.nn.Dense(1, in_units=2)
    layer.initialize()
    rate = {"learning_rate": 0.1 * (1 + kv.rank)}
    trainer = mx.gluon.Trainer(layer.collect_params(), "sgd", rate, kvstore=kv, update_on_kvstore=False)
    for _ in range(100):  # a worker may be a step behind when the other one hears of it
        with mx.autograd.record():
            loss = layer(mx.nd.ones((1, 2))).sum()
        loss.backward()
        trainer.step(1)
        mx.nd.waitall()


def failed_gradient(kv):
    out = mx.nd.zeros((2, 2))
    kv.init("weight", out)
    gradient = mx.nd.ones((2, 2))
    if kv.rank == 1:
        gradient = mx.nd.linalg.potrf(-gradient)  # not positive definite: fails when the engine runs it
    kv.pushpull("weight", gradient, out=out)
    out.wait_to_read()


def blocked_gradient(kv):
    gradient = blocked_array()
    out = mx.nd.zeros(gradient.shape)
    kv.init("weight", out)
    kv.pushpull("weight", gradient, out=out)
    out.wait_to_read()
    if abs(out.asnumpy() - 2 * gradient.asnumpy()).max() > 1e-6:
        raise SystemExit("the copy was scrambled")


kv = mx.kv.create("p3_sync")
try:
    globals()[sys.argv[1]](kv)
    kv._barrier()  # one that is done early hears of the other's trouble here
    print("rank %d: no error" % kv.rank)
except mx.base.MXNetError as error:
    print("rank %d: %s" % (kv.rank, " ".join(str(error).split())))
    # MXNet wakes who waits for an array before it ends the operation that has failed, which only then tells the store.
    deadline = time.monotonic() + 20
    while kv.store.session.core.error is None and time.monotonic() < deadline:
        time.sleep(0.01)
    try:
        kv.push("anything", mx.nd.zeros(1))
    except mx.base.MXNetError as again:
        print("rank %d again: %s" % (kv.rank, " ".join(str(again).split())))
