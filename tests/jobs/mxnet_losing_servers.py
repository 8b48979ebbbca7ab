"""mxnet_losing_servers.py OPTIMIZER [STEPS]: workers of Gluon whose servers die (struck.py), and who train on. Takes
snapshots where the job does, and goes on from one. Each prints a digest of its weights. The Trainer updates, by
gradients that are clipped; or the store does by that optimizer, and its states are part of the digest."""

import hashlib
import os
import sys
import tempfile

import struck

import mxnet as mx
from mxnet import gluon

from p3.worker.session import current

STEPS, ROWS = 12, 8


def main(optimizer, steps):
    kv = mx.kv.create("p3_sync")
    if not optimizer:
        kv.set_clipping()
    mx.random.seed(1)
    net = gluon.nn.Sequential()
    net.add(gluon.nn.Dense(900, in_units=20, activation="tanh"), gluon.nn.Dense(30, in_units=900))
    net.initialize(mx.init.Xavier())
    numbers = {"learning_rate": 0.01, **({"momentum": 0.9} if optimizer == "sgd" else {})}
    trainer = gluon.Trainer(
        net.collect_params(), optimizer or "adam", numbers, kvstore=kv, update_on_kvstore=bool(optimizer)
    )
    first, _ = kv.resume(trainer=trainer)
    marks = struck.key_of_marks(current())
    for step in range(first, steps):
        if struck.MARKS and step % struck.MARKS == 0:
            struck.until_all_are_back(current(), marks, step, kv.members)
        mx.random.seed(100 * step + kv.rank)
        inputs, targets = mx.nd.random.normal(shape=(ROWS, 20)), mx.nd.random.normal(shape=(ROWS, 30))
        with mx.autograd.record():
            loss = ((net(inputs) - targets) ** 2).mean()
        loss.backward()
        trainer.step(kv.num_workers)
        kv.snapshot(step + 1, trainer=trainer)
        if step == first:
            struck.begin(current())
    if struck.MARKS:
        struck.until_all_are_back(current(), marks, steps, kv.members)
    digest = hashlib.sha256()
    for _, parameter in sorted(net.collect_params().items()):
        digest.update(parameter.data().asnumpy().tobytes())
    if optimizer:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "states")
            kv.save_optimizer_states(path)
            kv.load_optimizer_states(path)  # and nothing changes
            kv.save_optimizer_states(path)
            with open(path, "rb") as file:
                digest.update(file.read())
    print("worker %d: %s" % (kv.rank, digest.hexdigest()), flush=True)
    current().barrier()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "", int(sys.argv[2]) if len(sys.argv) > 2 else STEPS)
