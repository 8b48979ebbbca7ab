"""Trains a convolutional net on scikit-learn's handwritten digits, on any number of workers.

    python examples/train_digits.py                        # alone, in one process
    p3 run -n 2 -s 2 python examples/train_digits.py       # two workers and two servers
"""

import argparse
import time

import digits
import p3
import mxnet as mx
from mxnet import autograd, gluon
from tqdm import tqdm

SEED = 1  # all workers start with the same weights


def make_net():
    net = gluon.nn.HybridSequential()
    net.add(
        gluon.nn.Conv2D(32, 3, padding=1, activation="relu"),
        gluon.nn.Conv2D(64, 3, padding=1, activation="relu"),
        gluon.nn.MaxPool2D(),
        gluon.nn.Dense(128, activation="relu"),
        gluon.nn.Dense(10),
    )
    mx.random.seed(SEED)
    net.initialize(mx.init.Xavier())
    net.hybridize(static_alloc=True, static_shape=True)
    return net


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=50, help="images per step, of all workers together")
    options = parser.parse_args()

    kv = mx.kv.create("p3_sync")
    train, (test_images, test_labels) = digits.load()
    dataset = gluon.data.ArrayDataset(*train)
    share = max(1, options.batch_size // kv.num_workers)
    batches = gluon.data.DataLoader(dataset, share, sampler=p3.SplitSampler(len(dataset)), last_batch="discard")
    net = make_net()
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05, "momentum": 0.9}, kvstore=kv)

    started = time.perf_counter()
    progress = tqdm(total=options.epochs * len(batches), unit="step", disable=kv.rank != 0)
    for epoch in range(options.epochs):
        total = mx.nd.zeros(1)
        for images, labels in batches:
            with autograd.record():
                loss = loss_of(net(images), labels)
            loss.backward()
            trainer.step(share * kv.num_workers)
            total += loss.mean()
            progress.update()
        progress.set_postfix(epoch=epoch + 1, loss="%.4f" % (total.asscalar() / len(batches)))
    progress.close()
    seconds = time.perf_counter() - started

    if kv.rank == 0:
        right = net(mx.nd.array(test_images)).argmax(axis=1).asnumpy() == test_labels
        images = options.epochs * len(batches) * share * kv.num_workers
        print(
            f"loss {total.asscalar() / len(batches):.4f}, accuracy {right.mean():.1%} of {len(right)} test images, "
            f"{images / seconds:,.0f} images/s on {kv.num_workers} worker(s), "
            f"{kv.stats()['bytes_sent'] / 1e6:.1f} MB sent by this one"
        )


if __name__ == "__main__":
    main()
