"""resumed_runs.py DIRECTORY KIND...: for each kind of training, whether a resumed run has the bits of a whole one.

Each kind is trained three times: without interruption; up to a step behind the last snapshot; and from there, with
everything made anew and other first weights. Embedded, one after the other in one process.
"""

import hashlib
import os
import sys

import numpy as np
import p3  # noqa: F401
import mxnet as mx
from mxnet import autograd, gluon

STEPS, EVERY, STOP = 7, 3, 5
LARGE_BATCHES = {"momentum": 0.9, "batch_scale": 2, "warmup_epochs": 2, "updates_per_epoch": 4}


class Kind:
    optimizer, arguments, trainer, dtype, stores = "sgd", {"momentum": 0.9}, {}, "float32", 1

    def __init__(self, **values):
        self.__dict__.update(values)


KINDS = {
    "momentum": Kind(),
    "adam": Kind(optimizer="adam", arguments={}),
    "nadam": Kind(optimizer="nadam", arguments={}),
    "scheduler": Kind(arguments={"momentum": 0.9, "lr_scheduler": mx.lr_scheduler.FactorScheduler}),
    "2bit": Kind(trainer={"compression_params": {"type": "2bit", "threshold": 0.02}}),
    "1bit": Kind(trainer={"compression_params": {"type": "1bit"}}),
    "int8": Kind(trainer={"compression_params": {"type": "int8"}}),
    "down": Kind(optimizer="adam", arguments={}, trainer={"compression_params": {"down": "int8"}}),
    "both_ways": Kind(trainer={"compression_params": {"type": "int8", "down": "int8"}}),
    "both_ways_on_trainer": Kind(
        trainer={"compression_params": {"type": "int8", "down": "1bit"}, "update_on_kvstore": False}
    ),
    "dgc": Kind(trainer={"compression_params": {"type": "dgc", "ratio": 0.1, "warmup_steps": 6}}),
    "updates_on_trainer": Kind(optimizer="adam", arguments={}, trainer={"update_on_kvstore": False}),
    "updates_on_store": Kind(optimizer="lamb", arguments={}),
    "lbsgd": Kind(optimizer="lbsgd", arguments=LARGE_BATCHES),
    "lbsgd_on_trainer": Kind(optimizer="lbsgd", arguments=LARGE_BATCHES, trainer={"update_on_kvstore": False}),
    "float16": Kind(arguments={"momentum": 0.9, "multi_precision": True}, dtype="float16"),
    "sparse": Kind(optimizer="adam", arguments={}),
    "two_stores": Kind(stores=2),
}


class Scale(gluon.nn.HybridBlock):
    """A layer that MXNet has in float16 on a CPU too."""

    def __init__(self):
        super().__init__()
        self.scale = self.params.get("scale", shape=(5,))

    def hybrid_forward(self, F, x, scale):
        return F.broadcast_mul(x, scale)


def net_of(name):
    net = gluon.nn.HybridSequential(prefix="net_")
    with net.name_scope():  # or names would count on, and after dense9 comes dense10, which Trainer sorts before it
        if name == "float16":
            net.add(Scale(), Scale())
        elif name == "sparse":
            net.add(gluon.nn.Embedding(40, 6, sparse_grad=True), gluon.nn.Dense(3))
        else:
            net.add(gluon.nn.Dense(16, activation="relu"), gluon.nn.BatchNorm(), gluon.nn.Dense(3))
    return net


def trainer_of(kind, net, store):
    net.cast(kind.dtype)
    net.initialize(mx.init.Normal(0.1))
    arguments = dict(kind.arguments, learning_rate=0.05)
    if "lr_scheduler" in arguments:
        arguments["lr_scheduler"] = arguments["lr_scheduler"](2, 0.7, base_lr=0.05)
    return gluon.Trainer(net.collect_params(), kind.optimizer, arguments, kvstore=store, **kind.trainer)


def train(name, seed, steps):
    """(the round it began at, digest of the weights and statistics)"""
    kind = KINDS[name]
    mx.random.seed(seed)
    stores = [mx.kv.create("p3_sync") for _ in range(kind.stores)]
    nets = [net_of(name) for _ in stores]
    trainers = [trainer_of(kind, net, store) for net, store in zip(nets, stores)]
    kv = stores[0]
    round, state = kv.resume(trainer=trainers)
    random = np.random.RandomState(kv.rank)
    if round:
        assert isinstance(state["batch"], mx.nd.NDArray)
        random.set_state(state["random"])
    for step in range(round, steps):
        batch = random.randint(0, 40, (8, 5)) if name == "sparse" else random.rand(8, 5)
        for net, trainer in zip(nets, trainers):
            with autograd.record():
                loss = (net(mx.nd.array(batch, dtype=kind.dtype)) ** 2).mean()
            loss.backward()
            trainer.step(kv.num_workers)
        kv.snapshot(step + 1, {"random": random.get_state(), "batch": mx.nd.array(batch)}, trainer=trainers)
    digest = hashlib.sha256()
    for net in nets:
        for parameter in net.collect_params().values():
            digest.update(parameter.data().asnumpy().tobytes())
    kv.store.session.close()  # the next store begins another job
    return round, digest.hexdigest()[:16]


def trainer_is_asked_for(folder):
    """Whether a script that resumes without its Trainer is told so, before it computes with wrong weights."""
    os.environ["P3_SNAPSHOT_DIR"] = folder
    kv = mx.kv.create("p3_sync")
    net = net_of("momentum")
    net.initialize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"momentum": 0.9, "learning_rate": 0.05}, kvstore=kv)
    try:
        kv.resume()
    except ValueError as error:
        assert "0 Trainers are given" in str(error), error
    with autograd.record():
        loss = net(mx.nd.ones((8, 5))).mean()
    loss.backward()
    try:
        trainer.step(8)
    except mx.MXNetError as error:
        return "kv.resume(trainer=trainer)" in str(error)
    finally:
        kv.store.session.close()
    return False


def main():
    folder, names = sys.argv[1], sys.argv[2:]
    os.environ["P3_SNAPSHOT_EVERY"] = str(EVERY)
    for name in names:
        if name == "forgotten":
            print(name, "same" if trainer_is_asked_for(os.path.join(folder, "momentum")) else "differs")
            continue
        os.environ.pop("P3_SNAPSHOT_DIR", None)
        undisturbed = train(name, 1, STEPS)
        os.environ["P3_SNAPSHOT_DIR"] = os.path.join(folder, name)
        _, interrupted = train(name, 1, STOP)
        resumed = train(name, 2, STEPS)
        same = resumed == (STOP // EVERY * EVERY, undisturbed[1]) and interrupted != undisturbed[1]
        print(name, "same" if same else f"differs: {undisturbed} {interrupted} {resumed}", flush=True)


if __name__ == "__main__":
    main()
