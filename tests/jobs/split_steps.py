"""Trains on samples that the workers do not divide, drawn by SplitSampler; says how many steps this worker took."""

import numpy as np
import p3
import mxnet as mx
from mxnet import autograd, gluon

EPOCHS, BATCH = 3, 8

kv = mx.kv.create("p3_sync")
data = gluon.data.ArrayDataset(np.arange(100, dtype="float32"))
batches = gluon.data.DataLoader(data, BATCH, sampler=p3.SplitSampler(len(data)))

mx.random.seed(1)
net = gluon.nn.Dense(1, in_units=1)
net.initialize()
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1e-4}, kvstore=kv)
for epoch in range(EPOCHS):
    seen, steps = [], 0
    for batch in batches:
        with autograd.record():
            loss = gluon.loss.L2Loss()(net(batch.reshape((-1, 1))), batch)
        loss.backward()
        trainer.step(BATCH * kv.num_workers)
        seen += batch.asnumpy().astype(int).tolist()
        steps += 1
    print("epoch %d: rank %d took %d steps with %s" % (epoch, kv.rank, steps, seen))
print("rank %d weight %r" % (kv.rank, net.weight.data().asscalar()))
