"""A Gluon net whose blocks run in another order in each step, and in another one on each worker: ways.py STEPS.

Rank 0 changes its own order for good in the middle. Prints the weights' digest, and the order that priorities follow.
"""

import random
import sys
import zlib

import p3  # noqa: F401
import mxnet as mx
from mxnet import autograd, gluon

steps = int(sys.argv[1])
kv = mx.kv.create("p3_sync")
mx.random.seed(1)
layers = [gluon.nn.Dense(20, in_units=20, activation="tanh", use_bias=False, prefix="layer%d_" % n) for n in range(5)]
net = gluon.nn.HybridSequential()
net.add(*layers)
net.initialize(mx.init.Xavier())
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9}, kvstore=kv)
for step in range(steps):
    way = list(range(5))
    if kv.rank > 0:
        random.Random(step).shuffle(way)
    elif step >= steps // 2:
        way = [4, 2, 0, 3, 1]
    with autograd.record():
        x = mx.nd.full((2, 20), 0.1 * (1 + kv.rank))
        for number in way:
            x = layers[number](x)
        loss = x.square().sum()
    loss.backward()
    trainer.step(4)
    kv._barrier()  # behind it, what rank 0 has announced has come
digest = 0
for layer in layers:
    digest = zlib.crc32(layer.weight.data().asnumpy().tobytes(), digest)
order = sorted(range(5), key=lambda number: -kv.store.keys[number].priority.in_queues)
print("worker %d has %08x and follows %s" % (kv.rank, digest, " ".join(map(str, order))))
