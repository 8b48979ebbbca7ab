"""Trains a multilayer perceptron on handwritten digits with Module.fit.

    python examples/module_mlp.py                          # alone, in one process
    p3 run -n 2 -s 2 python examples/module_mlp.py         # two workers and two servers
"""

import argparse
import logging

import digits
import p3
import mxnet as mx
import numpy as np

SEED = 1  # all workers start with the same weights


def make_net():
    net = mx.sym.flatten(mx.sym.var("data"))
    net = mx.sym.Activation(mx.sym.FullyConnected(net, num_hidden=64), act_type="relu")
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(net, num_hidden=10), name="softmax")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=50, help="images per step, of all workers together")
    options = parser.parse_args()

    kv = mx.kv.create("p3_sync")  # the object: given only the name, Module creates no store for one device
    if kv.rank == 0:
        logging.basicConfig(level=logging.INFO)  # where fit and Speedometer report
    train, test = digits.load()
    share = max(1, options.batch_size // kv.num_workers)
    images, labels = (np.asarray(p3.shard(array)) for array in train)
    train_batches = mx.io.NDArrayIter(images, labels, share, shuffle=True, last_batch_handle="discard")
    test_batches = mx.io.NDArrayIter(*test, batch_size=99)

    mx.random.seed(SEED)
    module = mx.mod.Module(make_net())
    module.fit(
        train_batches,
        eval_data=test_batches,
        eval_metric="acc",
        kvstore=kv,
        optimizer_params={"learning_rate": 0.1, "momentum": 0.9},  # Module divides by the joined batch size itself
        initializer=mx.init.Xavier(),
        batch_end_callback=mx.callback.Speedometer(share, frequent=10),
        num_epoch=options.epochs,
    )
    ((_, accuracy),) = module.score(test_batches, "acc")
    print(f"worker {kv.rank} of {kv.num_workers}: accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
