"""Trains small nets, one per case, and writes the weights each ends with: trajectory.py DIRECTORY STORE CASE...

STORE is p3_sync, or p3_sync-staged, which takes every array for a GPU's, or a type of MXNet's own, or none (one process
on the joined batch). Workers take turns in the joined
batch of each step: worker r of n has its r-th n-th. Files: DIRECTORY/CASE-RANK.npz.
"""

import sys

import numpy as np

BATCH = 8  # divides by 1, 2 and 4 workers with two devices each


def case(optimizer="sgd", hybridize=None, evaluate=False, devices=1, dtype="float32", normalise=False, **settings):
    settings.setdefault("learning_rate", 0.02)
    update_on_kvstore = settings.pop("update_on_kvstore", True)
    order, compression = settings.pop("order", None), settings.pop("compression", None)
    return dict(optimizer=optimizer, hybridize=hybridize, evaluate=evaluate, devices=devices, dtype=dtype, order=order,
                normalise=normalise, update_on_kvstore=update_on_kvstore, compression=compression,
                settings=settings)  # fmt: skip


STATIC_ALLOC = {"static_alloc": True}
STATIC_SHAPE = {"static_alloc": True, "static_shape": True}
CASES = {
    "imperative": case(momentum=0.9),
    "imperative-evaluated": case(momentum=0.9, wd=0.01, evaluate=True),
    "hybrid": case(momentum=0.9, hybridize={}),
    "hybrid-evaluated": case(momentum=0.9, hybridize={}, evaluate=True),
    "static-alloc-evaluated": case(momentum=0.9, hybridize=STATIC_ALLOC, evaluate=True),
    "static-shape": case(momentum=0.9, hybridize=STATIC_SHAPE),
    "static-shape-evaluated": case(momentum=0.9, hybridize=STATIC_SHAPE, evaluate=True),
    "summed": case(momentum=0.9, hybridize={}, evaluate=True, update_on_kvstore=False),
    "two-devices": case(momentum=0.9, devices=2, evaluate=True),
    "two-devices-summed": case(momentum=0.9, devices=2, update_on_kvstore=False),
    "nag": case("nag", momentum=0.9, hybridize={}),
    "adam": case("adam", learning_rate=0.002, hybridize={}, dtype="float64"),
    "on-workers": case("lamb", learning_rate=0.002, hybridize={}),
    "descending": case(momentum=0.9, order="descending"),
    "disordered": case(momentum=0.9, order="by rank"),
    "dgc": case(momentum=0.9, compression={"type": "dgc", "ratio": 0.05}),
    "dgc-clipped": case(momentum=0.9, compression={"type": "dgc", "ratio": 0.05, "clip_norm": 0.5}),
    "normalised": case(momentum=0.9, hybridize={}, evaluate=True, normalise=True),
}


def make_net(mx, case, devices):
    nn = mx.gluon.nn
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(8, 3, activation="relu"), nn.Conv2D(8, 3))
        if case["normalise"]:
            net.add(nn.BatchNorm())
        net.add(nn.Activation("relu"), nn.Dense(16, activation="tanh"), nn.Dense(10))
    mx.random.seed(7)  # the same for all, since Trainer broadcasts only after the first gradients
    np.random.seed(7)
    net.initialize(mx.init.Xavier(), ctx=devices)
    net.cast(case["dtype"])
    if case["hybridize"] is not None:
        net.hybridize(**case["hybridize"])
    return net


def losses(mx, net, x, y, devices):
    """One summed loss per device, each of its equal share of the batch, and recorded."""
    loss = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    share = len(x) // len(devices)
    with mx.autograd.record():
        return [
            loss(net(x[i * share : (i + 1) * share].as_in_context(device)),
                 y[i * share : (i + 1) * share].as_in_context(device)).sum()
            for i, device in enumerate(devices)
        ]  # fmt: skip


def train(mx, case, store, rank=0, workers=1, steps=100):
    """The weights (and statistics) after `steps`, by name, those of the last device."""
    devices = [mx.cpu(i) for i in range(case["devices"])]
    net = make_net(mx, case, devices)
    data = np.random.RandomState(11)
    update = update_by_hand if case["order"] else update_by_trainer
    step = update(mx, case, net, store, rank)
    share = BATCH // workers
    for _ in range(steps):
        x = data.uniform(size=(BATCH, 3, 8, 8))[rank * share : (rank + 1) * share]
        y = data.randint(0, 10, BATCH)[rank * share : (rank + 1) * share]
        x, y = mx.nd.array(x, dtype=case["dtype"]), mx.nd.array(y, dtype=case["dtype"])
        if case["evaluate"]:
            net(x.as_in_context(devices[0])).wait_to_read()
        mx.autograd.backward(losses(mx, net, x, y, devices))
        step()
    if store is None or not case["update_on_kvstore"]:
        # MXNet, which then updates, may still be bringing a weight back from the layout of the evaluation; asnumpy()
        # does not wait for that, and may crash. What P3 writes can be read at once (tests/mxnet/test_traps.py).
        mx.nd.waitall()
    return {name: p.data(devices[-1]).asnumpy() for name, p in net.collect_params().items()}


def update_by_trainer(mx, case, net, store, rank):
    trainer = mx.gluon.Trainer(net.collect_params(), case["optimizer"], dict(case["settings"]), kvstore=store,
                               update_on_kvstore=case["update_on_kvstore"] if store else None)  # fmt: skip
    return lambda: trainer.step(BATCH)


def update_by_hand(mx, case, net, store, rank):
    """A loop without Trainer, with the keys in an order of its own, which may differ between workers."""
    if store is None:
        return update_by_trainer(mx, case, net, store, rank)
    optimizer = mx.optimizer.create(case["optimizer"], rescale_grad=1 / BATCH, **case["settings"])
    store.set_optimizer(optimizer)
    parameters = []

    def step():
        if not parameters:
            parameters.extend(enumerate(net.collect_params().values()))
            if case["order"] == "descending" or rank % 2:
                parameters.reverse()
            for key, parameter in parameters:
                store.init(key, parameter.list_data()[0])
        for key, parameter in parameters:
            store.push(key, parameter.list_grad(), priority=-key)
        for key, parameter in reversed(parameters):
            store.pull(key, parameter.list_data(), priority=-key)

    return step


def main(directory, store_type, *names):
    if store_type.startswith("p3"):
        import p3  # noqa: F401
    import mxnet as mx

    store_type, _, staged = store_type.partition("-")
    if staged:
        from p3.mxnet.keys import dense as keys

        keys.is_on_device = lambda _engine, _array: True
    for name in names:
        store = mx.kv.create(store_type)
        if CASES[name]["compression"]:
            store.set_gradient_compression(CASES[name]["compression"])
        weights = train(mx, CASES[name], store, store.rank, store.num_workers)
        np.savez("%s/%s-%d.npz" % (directory, name, store.rank), **weights)


if __name__ == "__main__":
    main(*sys.argv[1:])
