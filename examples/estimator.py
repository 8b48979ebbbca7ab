"""Trains a convolutional net on handwritten digits with Gluon's Estimator.

    python examples/estimator.py                           # alone, in one process
    p3 run -n 2 -s 2 python examples/estimator.py          # two workers and two servers
"""

import argparse
import logging

import digits
import p3
import mxnet as mx
from mxnet import gluon
from mxnet.gluon.contrib.estimator import Estimator

SEED = 1  # all workers start with the same weights


def make_net():
    net = gluon.nn.HybridSequential()
    net.add(
        gluon.nn.Conv2D(16, 3, padding=1, activation="relu"),
        gluon.nn.MaxPool2D(),
        gluon.nn.Dense(64, activation="relu"),
        gluon.nn.Dense(10),
    )
    mx.random.seed(SEED)
    net.initialize(mx.init.Xavier())
    net.hybridize()
    return net


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=50, help="images per step, of all workers together")
    options = parser.parse_args()

    kv = mx.kv.create("p3_sync")
    kv.set_reduction("average")  # Estimator divides by this worker's batch size, not by that of all workers together
    train, test = (gluon.data.ArrayDataset(*arrays) for arrays in digits.load())
    share = max(1, options.batch_size // kv.num_workers)
    train_batches = gluon.data.DataLoader(train, share, sampler=p3.SplitSampler(len(train)), last_batch="discard")
    test_batches = gluon.data.DataLoader(test, 99)

    net = make_net()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05, "momentum": 0.9}, kvstore=kv)
    estimator = Estimator(
        net, gluon.loss.SoftmaxCrossEntropyLoss(), train_metrics=mx.metric.Accuracy(), trainer=trainer, context=mx.cpu()
    )
    estimator.logger.setLevel(logging.INFO if kv.rank == 0 else logging.WARNING)
    estimator.fit(train_batches, test_batches, epochs=options.epochs)

    estimator.evaluate(test_batches)
    accuracy = dict(metric.get() for metric in estimator.val_metrics)["validation accuracy"]
    print(f"worker {kv.rank} of {kv.num_workers}: accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
