"""What two workers and more must see of each other; each check runs on all of them. Fails with a traceback."""

import os
import tempfile

import numpy as np
import p3  # noqa: F401
import mxnet as mx
from mxnet import gluon

kv = mx.kv.create("p3_sync")
rank, workers = kv.rank, kv.num_workers


def check_first_values_are_those_of_rank_0():
    out = mx.nd.zeros(4)
    kv.broadcast("first", mx.nd.full(4, 10 + rank), out)
    assert out.asnumpy().tolist() == [10] * 4


def check_gradients_are_summed_over_workers_and_devices():
    out = [mx.nd.zeros(60_000), mx.nd.zeros(60_000, ctx=mx.cpu(1))]
    kv.init("sum", mx.nd.zeros(60_000))
    for round in range(1, 4):
        gradients = [mx.nd.full(60_000, round * (rank + 1)), mx.nd.full(60_000, 0.5, ctx=mx.cpu(1))]
        kv.pushpull("sum", gradients, out=out)
        expected = round * workers * (workers + 1) / 2 + workers * 0.5
        assert all((array.asnumpy() == expected).all() for array in out)


def check_keys_may_be_initialised_in_different_orders():
    keys = list(range(100, 120))
    np.random.RandomState(rank).shuffle(keys)
    for key in keys:
        kv.init(key, mx.nd.full((key, 3), key))
    for key in sorted(keys):
        out = mx.nd.zeros((key, 3))
        kv.pull(key, out)
        assert (out.asnumpy() == key).all()


def check_calls_return_while_the_network_has_nothing_for_them():
    """Rank 0 pushes, pulls and steps before any other worker does; if a call waited, the barrier would not be met."""
    store = mx.kv.create("p3_sync")
    net = gluon.nn.Dense(5, in_units=3)
    net.initialize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=store)

    def step():
        with mx.autograd.record():
            loss = net(mx.nd.ones((2, 3))).sum()
        loss.backward()
        trainer.step(2)

    step()
    mx.nd.waitall()
    if rank == 0:
        step()
        store._barrier()
    else:
        store._barrier()
        step()
    assert np.isfinite(net.weight.data().asnumpy()).all()


def check_any_worker_saves_at_once_what_all_have_loaded():
    """Also where rank 0, whose word the servers take, is the last to load."""
    store = mx.kv.create("p3_sync")
    store.set_optimizer(mx.optimizer.SGD(momentum=0.5))
    store.init("w", mx.nd.zeros(3))
    with tempfile.TemporaryDirectory() as folder:
        names = [os.path.join(folder, name) for name in ("first", "second")]
        for name in names:
            store.push("w", mx.nd.ones(3))
            store.save_optimizer_states(name)
        files = [open(name, "rb").read() for name in names]
        for turn in range(100):
            if rank == 0:
                mx.nd.dot(mx.nd.ones((200, 200)), mx.nd.ones((200, 200))).wait_to_read()
            store.load_optimizer_states(names[turn % 2])
            store.save_optimizer_states(os.path.join(folder, "again"))
            assert open(os.path.join(folder, "again"), "rb").read() == files[turn % 2], turn


def check_all_workers_rank_as_rank_0_does():
    layers = [gluon.nn.Dense(3, in_units=3, prefix="layer%d_" % i, use_bias=False) for i in range(3)]
    x = mx.nd.ones((1, 3))
    for layer in layers:
        layer.initialize()
    store = mx.kv.create("p3_sync")
    for number, layer in enumerate(layers):
        store.init(number, layer.weight.data())
    with mx.autograd.record():
        for layer in layers if rank else reversed(layers):  # each worker sees an order of its own
            x = layer(x)
        x.sum().backward()
    for number, layer in enumerate(layers):
        store.push(number, layer.weight.grad())
    mx.nd.waitall()
    store._barrier()  # what rank 0 announced has arrived
    for number, layer in enumerate(layers):
        store.push(number, layer.weight.grad())
    positions = [store.store.priorities._order.place(number, -1) for number in range(3)]
    assert positions == [2, 1, 0], positions


for name, check in list(globals().items()):
    if name.startswith("check_"):
        check()
        kv._barrier()
        print("passed", name, flush=True)
