"""Gluon steps as a script asks for them, or a strategy; worker 0 prints the weights' digest, what each key has become,
and what each server holds: mxnet_planned.py OPTIONS [OPTIONS...], in JSON, of each worker or of all: "kind" of the
store, "compression", "staleness" (what set_staleness takes, in lists), "strategy", "here": the workers update,
"factors": what p3.factors takes."""

import json
import os
import sys
import zlib

import numpy as np

import p3
import mxnet as mx
from mxnet import autograd, gluon

options = json.loads(sys.argv[1 + int(os.environ["P3_RANK"]) % (len(sys.argv) - 1)])
mx.random.seed(1)
net = gluon.nn.HybridSequential()
net.add(gluon.nn.Dense(60, in_units=50), gluon.nn.Dense(40, in_units=60), gluon.nn.Dense(2, in_units=40))
net.initialize()
if "factors" in options:
    p3.factors(net, **options["factors"])
kv = mx.kv.create(options.get("kind", "p3_sync"))
if "strategy" in options:
    kv.set_strategy(options["strategy"])
if "compression" in options:
    kv.set_gradient_compression(options["compression"])
for rounds in options.get("staleness", []):
    kv.set_staleness(*rounds)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9}, kvstore=kv,
                        update_on_kvstore=not options.get("here", False))  # fmt: skip
random = np.random.RandomState(kv.rank)
for _ in range(3):
    with autograd.record():
        loss = net(mx.nd.array(random.randn(4, 50))).square().sum()
    loss.backward()
    trainer.step(8)
weights = np.concatenate([one.data().asnumpy().reshape(-1) for one in net.collect_params().values()])
mx.nd.waitall()
keys, servers = kv.store.session.keys, kv.stats(servers=True)["servers"]
plans = {key.name: keys.wait_for(key).plan for key in keys.all()}
if kv.rank == 0:
    axes = {name: [plan.codec, plan.value_codec, plan.staleness, plan.parts] for name, plan in plans.items()}
    held = [one["itself"]["value_bytes"] for one in servers]
    print(json.dumps({"digest": zlib.crc32(weights), "axes": axes, "held": held}))
