"""MXNet's other ways to train: Module, Estimator, mixed precision, data loaders that fork."""

import os

import numpy as np

from compatibility.cases.training import BATCH, FEATURES, Training, make_net
from compatibility.registry import case, expect, expect_close, expect_equal

OTHERS = "Other interfaces"


def fit(mx, kv, rank, workers, **settings):
    """Weights, by name, after Module.fit on a share of each batch; on all of it if the worker is the only one."""
    random = np.random.RandomState(1)
    x, y = random.uniform(-1, 1, (5, BATCH, FEATURES)), random.uniform(-1, 1, (5, BATCH, 2))
    share = BATCH // workers
    x, y = (part[:, rank * share : (rank + 1) * share].reshape(5 * share, -1) for part in (x, y))
    data = mx.io.NDArrayIter(x, y, share, label_name="out_label")
    hidden = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=6, name="hidden")
    out = mx.sym.FullyConnected(mx.sym.tanh(hidden), num_hidden=2, name="last")
    module = mx.mod.Module(mx.sym.LinearRegressionOutput(out, name="out"), label_names=["out_label"])
    shapes = {"hidden_weight": (6, FEATURES), "hidden_bias": (6,), "last_weight": (2, 6), "last_bias": (2,)}
    weights = {name: mx.nd.array(random.uniform(-0.5, 0.5, shape)) for name, shape in shapes.items()}
    if settings.pop("different", False):
        weights = {name: value + rank for name, value in weights.items()}
    module.fit(
        data, num_epoch=2, kvstore=kv, arg_params=weights, eval_metric="mse", optimizer="sgd",
        optimizer_params={"learning_rate": 0.1, "momentum": 0.9, **settings},
    )  # fmt: skip
    return module.get_params()[0]


def expect_same(got, expected):
    for name, value in expected.items():
        expect_close(got[name], value)


@case(OTHERS)
def module_fit(mx, kv):
    """`Module.fit`, updating on the store"""
    expect_same(fit(mx, kv, kv.rank, 2), fit(mx, None, 0, 1))


@case(OTHERS)
def module_updates_on_workers(mx, kv):
    """`Module.fit` without update on the store (`MXNET_UPDATE_ON_KVSTORE=0`)"""
    _expect_without_update_on_store(mx, kv)


@case(OTHERS)
def module_synchronises_weights(mx, kv):
    """the same with different initial weights: all get those of rank 0"""
    _expect_without_update_on_store(mx, kv, different=True)


def _expect_without_update_on_store(mx, kv, **settings):
    os.environ["MXNET_UPDATE_ON_KVSTORE"] = "0"
    try:
        got = fit(mx, kv, kv.rank, 2, **settings)
    finally:
        del os.environ["MXNET_UPDATE_ON_KVSTORE"]
    expect_same(got, fit(mx, None, 0, 1))


@case(OTHERS, creates_store=True)
def module_string(mx, store):
    """`Module.fit` with the store's name as a string, each worker on the same data"""
    expect_same(fit(mx, store, 0, 1, rescale_grad=1 / BATCH / 2), fit(mx, None, 0, 1))


@case(OTHERS)
def module_states(mx, kv):
    """`Module.save_checkpoint(save_optimizer_states=True)`"""
    data = mx.io.NDArrayIter(np.ones((8, 3)), np.ones((8, 1)), 4, label_name="out_label")
    out = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=1, name="last")
    module = mx.mod.Module(mx.sym.LinearRegressionOutput(out, name="out"), label_names=["out_label"])
    settings = {"learning_rate": 0.1, "momentum": 0.9}
    module.fit(data, num_epoch=1, kvstore=kv, optimizer_params=settings, eval_metric="mse")
    prefix = "worker%d" % kv.rank
    module.save_checkpoint(prefix, 1, save_optimizer_states=True)
    updater = mx.optimizer.get_updater(mx.optimizer.create("sgd", **settings))
    with open(prefix + "-0001.states", "rb") as file:
        updater.set_states(file.read())
    expect(len(updater.states) == 2, "states of %d parameters instead of 2" % len(updater.states))


@case(OTHERS)
def estimator(mx, kv):
    """`Estimator.fit`"""

    def run(store):
        from mxnet.gluon.contrib.estimator import Estimator

        random = np.random.RandomState(1)
        x, y = random.uniform(-1, 1, (4, BATCH, FEATURES)), random.uniform(-1, 1, (4, BATCH, 2))
        share, first = (BATCH // 2, kv.rank * BATCH // 2) if store is not None else (BATCH, 0)
        x, y = (part[:, first : first + share].reshape(4 * share, -1).astype("float32") for part in (x, y))
        net = make_net(mx)
        # Estimator divides by a worker's own batch, and so by half of what one process divides by.
        settings = {"learning_rate": 0.1 if store is not None else 0.2}
        trainer = mx.gluon.Trainer(net.collect_params(), "sgd", settings, kvstore=store)
        loader = mx.gluon.data.DataLoader(mx.gluon.data.ArrayDataset(x, y), batch_size=share)
        Estimator(net, mx.gluon.loss.L2Loss(), mx.metric.MSE(), trainer=trainer).fit(loader, epochs=2)
        return {name: parameter.data() for name, parameter in net.collect_params().items()}

    expect_same(run(kv), run(None))


@case(OTHERS, alone=True)
def amp_updates_on_workers(mx, kv):
    """AMP's loss scaler, `update_on_kvstore=False`"""
    _amp(mx, kv, update_on_kvstore=False)


@case(OTHERS, alone=True)
def amp_updates_on_store(mx, kv):
    """AMP's loss scaler, updating on the store"""
    _amp(mx, kv, update_on_kvstore=True)


@case(OTHERS, alone=True)
def amp_overflow(mx, kv):
    """the same, `update_on_kvstore=False`: a step that overflows on one worker changes nothing on any worker"""
    _amp(mx, kv, update_on_kvstore=False, overflow=True)


def _amp(mx, kv, update_on_kvstore, overflow=False):
    """Compared with training without AMP. The scale doubles on the way, as the scaler does after 2000 good steps. No
    operator is cast, as MXNet has few of half precision for CPU: what a store sees of AMP is the scaling."""
    from mxnet.contrib import amp

    def step(training, seed, scaled=True):
        x = np.random.RandomState(seed).uniform(-1, 1, (BATCH, FEATURES))
        x = x[kv.rank * 4 : kv.rank * 4 + 4] if training.kv is not None else x
        with mx.autograd.record():
            loss = (training.net(mx.nd.array(x)) ** 2).sum()
            if scaled:
                with amp.scale_loss(loss, training.trainer) as scaled_loss:
                    mx.autograd.backward(scaled_loss)
        if not scaled:
            loss.backward()
        training.trainer.step(BATCH)

    alone = Training(mx, None)
    for seed in range(4):
        step(alone, seed, scaled=False)
    amp.init("float16", target_precision_ops=[])
    worker = Training(mx, kv, update_on_kvstore=update_on_kvstore)
    amp.init_trainer(worker.trainer)
    scaler = worker.trainer._amp_loss_scaler
    for seed in range(4):
        if seed == 2 and overflow:
            scaler._loss_scale = float("inf") if kv.rank == 0 else 2.0**16
            step(worker, 99)
            scaler._loss_scale = 2.0**16
        if seed == 2:
            scaler._loss_scale *= 2
        step(worker, seed)
    for got, expected in zip(worker.weights(), alone.weights()):
        expect_close(got, expected)


@case(OTHERS, alone=True)
def data_loader(mx, kv):
    """`DataLoader(num_workers=2)`, which forks"""
    random = np.random.RandomState(1)
    x = random.uniform(-1, 1, (5, BATCH, FEATURES)).astype("float32")

    def run(store):
        mine = x[:, kv.rank * 4 : kv.rank * 4 + 4] if store is not None else x
        training = Training(mx, store)
        dataset = mx.gluon.data.ArrayDataset(mine.reshape(-1, FEATURES))
        for _ in range(2):
            with_processes = {"num_workers": 2} if store is not None else {}
            for batch in mx.gluon.data.DataLoader(dataset, batch_size=mine.shape[1], **with_processes):
                with mx.autograd.record():
                    loss = (training.net(batch) ** 2).sum()
                loss.backward()
                training.trainer.step(BATCH)
        return training.weights()

    for got, expected in zip(run(kv), run(None)):
        expect_close(got, expected)


@case(OTHERS)
def weights_alike(mx, kv):
    """different initial weights: bitwise equal after the first steps of a `Trainer`"""
    mx.random.seed(10 + kv.rank)
    net = mx.gluon.nn.Dense(3, in_units=FEATURES, use_bias=False, prefix="dense_")
    net.initialize(mx.init.Xavier())
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=kv)
    for _ in range(3):
        with mx.autograd.record():
            loss = (net(mx.nd.random.uniform(shape=(4, FEATURES))) ** 2).sum()
        loss.backward()
        trainer.step(BATCH)
    mine = net.weight.data()
    if trainer._update_on_kvstore:
        value = mx.nd.zeros(mine.shape)
        kv.pull(0, value)  # the value that the servers have for all
        expect_equal(mine, value)
    else:
        difference = mine * (1 if kv.rank == 0 else -1)
        kv.init(99, mx.nd.zeros(mine.shape))
        kv.pushpull(99, difference)
        expect_equal(difference, 0)
