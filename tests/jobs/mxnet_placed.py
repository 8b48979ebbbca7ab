"""Gluon steps with a strategy that each worker's store is given, in JSON, or with none; worker 0 prints the weights'
digest, and what each server holds: mxnet_placed.py [STRATEGY...]."""

import json
import sys
import zlib

import numpy as np

import p3  # noqa: F401
import mxnet as mx
from mxnet import autograd, gluon

mx.random.seed(1)
net = gluon.nn.HybridSequential()
net.add(gluon.nn.Dense(60, in_units=50), gluon.nn.Dense(40, in_units=60), gluon.nn.Dense(2, in_units=40))
net.initialize()
kv = mx.kv.create("p3_sync")
given = json.loads(sys.argv[1 + kv.rank]) if len(sys.argv) > 1 else None
if given is not None:
    kv.set_strategy(given)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9}, kvstore=kv)
random = np.random.RandomState(kv.rank)
for _ in range(3):
    with autograd.record():
        loss = net(mx.nd.array(random.randn(4, 50))).square().sum()
    loss.backward()
    trainer.step(8)
weights = np.concatenate([one.data().asnumpy().reshape(-1) for one in net.collect_params().values()])
servers = kv.stats(servers=True)["servers"]
if kv.rank == 0:
    print(json.dumps({"digest": zlib.crc32(weights), "held": [one["itself"]["value_bytes"] for one in servers]}))
