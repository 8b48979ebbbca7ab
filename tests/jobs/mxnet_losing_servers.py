"""mxnet_losing_servers.py: workers of Gluon that update, whose servers die (struck.py), and who train on. Each prints a
digest of its weights."""

import hashlib

import struck

import mxnet as mx
from mxnet import gluon

from p3.worker.session import current

STEPS, ROWS = 12, 8


def main():
    kv = mx.kv.create("p3_sync")
    kv.set_clipping()
    mx.random.seed(1)
    net = gluon.nn.Sequential()
    net.add(gluon.nn.Dense(900, in_units=20, activation="tanh"), gluon.nn.Dense(30, in_units=900))
    net.initialize(mx.init.Xavier())
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.01}, kvstore=kv, update_on_kvstore=False)
    for step in range(STEPS):
        mx.random.seed(100 * step + kv.rank)
        inputs, targets = mx.nd.random.normal(shape=(ROWS, 20)), mx.nd.random.normal(shape=(ROWS, 30))
        with mx.autograd.record():
            loss = ((net(inputs) - targets) ** 2).mean()
        loss.backward()
        trainer.step(kv.num_workers)
        if step == 0:
            struck.begin(current())
    digest = hashlib.sha256()
    for _, parameter in sorted(net.collect_params().items()):
        digest.update(parameter.data().asnumpy().tobytes())
    print("worker %d: %s" % (kv.rank, digest.hexdigest()), flush=True)
    current().barrier()


if __name__ == "__main__":
    main()
