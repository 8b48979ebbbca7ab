"""Jobs with local steps of Gluon's Trainer, a function for each: mxnet_local_steps.py NAME ARGUMENT...

The reference is that of local_steps.py, which trains all workers' weights in NumPy, as the papers' algorithms say.
"""

import sys
import zlib

import local_steps as plain
import numpy as np
import p3
import p3.mxnet
import this_job
from p3.worker.session import current

import mxnet as mx
from mxnet import autograd, gluon

LR, MOMENTUM = 0.05, 0.9


class Perceptron(gluon.Block):
    """local_steps.py's, with its weights."""

    def __init__(self, dtype):
        super().__init__(prefix="net_")
        for name, value in plain.first(dtype).items():
            name = name.replace(".", "_")
            setattr(self, "p" + name, self.params.get(name, shape=value.shape, dtype=dtype,
                                                      init=mx.init.Constant(0)))  # fmt: skip

    def forward(self, x):
        for number in range(len(plain.LAYERS)):
            weight, bias = (getattr(self, "p%d_%s" % (number, kind)).data() for kind in ("weight", "bias"))
            x = mx.nd.broadcast_add(mx.nd.dot(x, weight), bias)
            x = mx.nd.tanh(x) if number < len(plain.LAYERS) - 1 else x
        return x


class Sgd:
    """The Trainer's, of the reference."""

    def __init__(self):
        self.velocity = {}

    def step(self, weights, worker, step):
        for name, gradient in plain.gradients(weights, worker, step).items():
            self.velocity[name] = MOMENTUM * self.velocity.get(name, 0.0) - LR * gradient
        return {name: weights[name] + self.velocity[name] for name in weights}


def made(dtype="float64", **given):
    """A net and its Trainer, with LocalSteps."""
    net = Perceptron(dtype)
    net.initialize()
    for name, value in plain.first(dtype).items():
        getattr(net, "p" + name.replace(".", "_")).set_data(mx.nd.array(value, dtype=dtype))
    settings = {"learning_rate": LR, "momentum": MOMENTUM}
    trainer = gluon.Trainer(net.collect_params(), "sgd", settings, kvstore=None)
    return net, p3.mxnet.LocalSteps(trainer, **given)


def take(net, trainer, worker, step):
    dtype = np.dtype(net.p0_bias.dtype)
    x = mx.nd.array(np.random.RandomState(1000 * worker + step).normal(size=(8, 6)).astype(dtype), dtype=dtype)
    with autograd.record():
        loss = ((net(x) - x[:, :3].sin()) ** 2).mean()
    loss.backward()
    trainer.step(1)


def weights_of(net):
    return {name: getattr(net, "p" + name.replace(".", "_")).data().asnumpy() for name in plain.first()}


def follows(steps, layers, every, delay, alpha, weighed):
    every, delay, alpha, layers = int(every), int(delay), float(alpha), [one.split("-") for one in layers.split(",")]
    outer = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
    net, trainer = made(every=every, delay=delay, alpha=alpha, fragments=len(layers), outer=outer)
    reference = plain.Reference(trainer.num_workers, "float64", layers, every, delay, alpha, **outer)
    reference.inner = [Sgd() for _ in reference.inner]
    if weighed == "weighed":
        plain.Reference.weighs = staticmethod(plain.samples)
    for step in range(int(steps)):
        if weighed == "weighed":
            trainer.weigh(mx.nd.array([plain.samples(trainer.rank, step)]))
        take(net, trainer, trainer.rank, step)
        reference.step(step + 1)
        off = plain.distance(weights_of(net), reference.locals[trainer.rank])
        assert off < 1e-6, (step, off)
    with trainer.global_weights():
        assert plain.distance(weights_of(net), reference.theta) < 1e-6
    assert plain.distance(weights_of(net), reference.locals[trainer.rank]) < 1e-6
    assert plain.distance(weights_of(net), plain.first("float64")) > 0.05  # it has trained
    print("worker %d follows" % trainer.rank)


def has_same_bits(codec, dtype):
    """P3_CHECK=1 compares the global weights at each merge; their digests are printed."""
    net, trainer = made(dtype, every=6, fragments=3, delay=2, codec=None if codec == "none" else codec)
    for step in range(20):
        take(net, trainer, trainer.rank, step)
    local = plain.digest(weights_of(net))
    with trainer.global_weights():
        of_all = plain.digest(weights_of(net))
    assert plain.digest(weights_of(net)) == local
    trainer.take_global()
    assert plain.digest(weights_of(net)) == of_all
    print("worker %d: local %s global %s" % (trainer.rank, local, of_all))


def normalized():
    """All begin with rank 0's weights and statistics; the statistics are each worker's own from there on."""
    rank = current().rank
    mx.random.seed(rank)
    net = gluon.nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(gluon.nn.Dense(5), gluon.nn.BatchNorm(), gluon.nn.Dense(3))
    net[0].collect_params("bias").setattr("grad_req", "null")
    net.initialize(mx.init.Normal())
    net.hybridize()
    x = mx.nd.array(np.random.RandomState(rank).normal(size=(8, 6)))
    net(x)  # so that all shapes are known
    net[1].running_mean.set_data(mx.nd.full(5, rank + 1.0))
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.01}, kvstore=None)
    trainer = p3.mxnet.LocalSteps(trainer, every=2)
    assert net[1].running_mean.data().asnumpy().tolist() == [1.0] * 5
    print("worker %d: first %s" % (rank, digest_of(net)))
    for _ in range(4):
        net(x)  # leaves its weights as MXNet likes them
        with autograd.record():
            loss = (net(x) ** 2).mean()
        loss.backward()
        trainer.step(1)
    statistics = zlib.crc32(net[1].running_mean.data().asnumpy().tobytes())
    print("worker %d: weights %s, statistics %08x" % (rank, digest_of(net), statistics))
    trainer.release()
    assert type(trainer) is gluon.Trainer
    trainer.step(1, ignore_stale_grad=True)


def digest_of(net):
    parameters = [one for one in net.collect_params().values() if "running" not in one.name]
    return "%08x" % zlib.crc32(b"".join(one.data().asnumpy().tobytes() for one in parameters))


def loads(folder):
    """From what was saved, another net and Trainer take the same steps, to the bit."""
    given = {"every": 6, "fragments": 3, "delay": 3, "codec": "bf16"}
    net, trainer = made("float32", **given)
    files = ["%s/%s %d" % (folder, kind, trainer.rank) for kind in ("net", "trainer")]
    for step in range(15):
        if step == 8:
            net.collect_params().save(files[0])
            trainer.save_states(files[1])
            saved = trainer.state_dict()
        take(net, trainer, trainer.rank, step)
    expected = plain.digest(weights_of(net))
    trainer.release()
    net, trainer = made("float32", **given)
    net.collect_params().load(files[0], mx.cpu())
    trainer.load_states(files[1])
    trainer.load_state_dict(saved)
    for step in range(8, 15):
        take(net, trainer, trainer.rank, step)
    assert plain.digest(weights_of(net)) == expected
    print("worker %d goes on" % trainer.rank)


def resumed(folder, codec, steps, die_at):
    """With snapshots; rank 0 is killed behind step `die_at` the first time. Prints a digest of all weights."""
    round, state = p3.mxnet.resume()
    assert state == ({"place": round} if round else {})
    net, trainer = made("float32", every=6, fragments=3, delay=3, codec=None if codec == "none" else codec)
    for step in range(round, int(steps)):
        take(net, trainer, trainer.rank, step)
        p3.mxnet.snapshot(step + 1, {"place": step + 1})
        if step + 1 == int(die_at) and round == 0 and trainer.rank == 0:
            this_job.die_once(current(), folder)
    print("worker %d began at %d and has %s" % (trainer.rank, round, plain.digest(weights_of(net))), flush=True)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
