"""Gradients for jobs of MXNet whose codec a reference follows, and a small net that learns whatever the compression."""

import hashlib

import numpy as np
import p3  # noqa: F401  before MXNet
import mxnet as mx
from mxnet import autograd, gluon

SHAPE = (300, 400)  # of "w": three slices


def gradients(rank, step):
    """By key: a matrix, and what most codecs leave as it is, one of one dimension and one of float64."""
    random = np.random.RandomState(1000 * step + rank)
    return {
        "w": random.randn(*SHAPE).astype("float32"),
        "b": random.randn(400).astype("float32"),
        "d": random.randn(20, 30).astype("float64"),
    }


def learn(compression_params, new_rates=()):
    """Some workers for more steps than others; prints the loss at both ends and a digest of the weights. `new_rates`:
    learning rates, each with the step behind which it is set."""
    kv = mx.kv.create("p3_sync")
    mx.random.seed(1)
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(64, activation="tanh"), gluon.nn.Dense(32, activation="tanh"), gluon.nn.Dense(1))
    net.initialize(mx.init.Xavier())
    settings = {"learning_rate": 0.05, "momentum": 0.9, "wd": 1e-4}
    trainer = gluon.Trainer(
        net.collect_params(), "sgd", settings, kvstore=kv, compression_params=compression_params
    )
    random = np.random.RandomState(kv.rank)
    losses = []
    for step in range(60 + 5 * kv.rank):
        x = mx.nd.array(random.uniform(-1, 1, (16, 8)))
        y = (x * x).sum(axis=1, keepdims=True) - x.sum(axis=1, keepdims=True)
        with autograd.record():
            loss = gluon.loss.L2Loss()(net(x), y)
        loss.backward()
        trainer.step(16 * kv.num_workers)
        losses.append(loss.mean().asscalar())
        for behind, rate in new_rates:
            if behind == step:
                trainer.set_learning_rate(rate)
    kv.join()
    digest = hashlib.sha256()
    for parameter in net.collect_params().values():
        digest.update(parameter.data().asnumpy().tobytes())
    print("rank %d: from %.3f to %.3f" % (kv.rank, np.mean(losses[:5]), np.mean(losses[-10:])))
    assert np.mean(losses[-10:]) < 0.3 * np.mean(losses[:5]), losses
    print("rank %d: digest %s" % (kv.rank, digest.hexdigest()[:16]))
