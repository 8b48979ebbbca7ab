"""A worker that trains with MXNet's Trainer and may be killed at any time: python replaced_trainer.py STEPS

At the end it prints a fingerprint of each weight.
"""

import hashlib
import os
import sys

import mxnet as mx
from mxnet import autograd, gluon

WIDTH = 8


def main(steps):
    kv = mx.kv.create("p3_sync")
    mx.random.seed(kv.rank)  # the first values are rank 0's
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(16, in_units=WIDTH, activation="relu"), gluon.nn.Embedding(20, 3, sparse_grad=True))
    dense, embedding = net[0], net[1]
    net.initialize(mx.init.Xavier())
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.01}, kvstore=kv)
    first, _ = kv.resume(trainer)
    print("rank", kv.rank, "process", os.getpid(), "begins", first, flush=True)
    for step in range(first, steps):
        data = mx.random.uniform(shape=(4, WIDTH))
        rows = mx.nd.array([(step + kv.rank) % 20, (3 * step) % 20])
        with autograd.record():
            loss = (dense(data) ** 2).sum() + (embedding(rows) ** 2).sum()
        loss.backward()
        trainer.step(4)
        mx.nd.waitall()
        print("rank", kv.rank, "step", step, flush=True)
    for number, parameter in enumerate(net.collect_params().values()):
        digest = hashlib.sha256(parameter.data().asnumpy().tobytes()).hexdigest()
        print("rank", kv.rank, "key", number, "holds", digest, digest, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
