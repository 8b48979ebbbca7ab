"""Trains a small convolutional net on scikit-learn's handwritten digits with local steps, across a slow network.

    python examples/local_steps.py                     # alone, in one process
    p3 run -n 2 -s 2 python examples/local_steps.py    # two workers and two servers

What it changes in train_digits.py: the Trainer has no store and takes the batch size of one worker, and each half of
the net is exchanged once in 12 steps, in 4 bits, with 3 more steps to come back in.
"""

import argparse

import digits
import p3
import p3.mxnet
import mxnet as mx
from mxnet import autograd, gluon


def make_net():
    net = gluon.nn.HybridSequential()
    net.add(
        gluon.nn.Conv2D(16, 3, padding=1, activation="relu"),
        gluon.nn.MaxPool2D(),
        gluon.nn.Dense(64, activation="relu"),
        gluon.nn.Dense(10),
    )
    mx.random.seed(1)
    net.initialize(mx.init.Xavier())
    net.hybridize()
    return net


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=25, help="images per step, of each worker")
    options = parser.parse_args()

    train, (test_images, test_labels) = digits.load()
    net = make_net()
    net(mx.nd.array(test_images[:1]))  # so that all parameters have shapes
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.003}, kvstore=None)
    trainer = p3.mxnet.LocalSteps(trainer, every=12, fragments=2, delay=3, codec="int4")

    dataset = gluon.data.ArrayDataset(*train)
    batches = gluon.data.DataLoader(dataset, options.batch_size, sampler=p3.SplitSampler(len(dataset)),
                                    last_batch="discard")  # as many on every worker  # fmt: skip
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    for epoch in range(options.epochs):
        total = 0.0
        for images, labels in batches:
            with autograd.record():
                loss = loss_of(net(images), labels)
            loss.backward()
            trainer.step(len(images))  # this worker's, as without P3
            total += loss.mean().asscalar()
        if trainer.rank == 0:
            print("epoch %d: loss %.4f" % (epoch + 1, total / len(batches)), flush=True)

    trainer.take_global()  # from here on all workers have the same net
    right = (net(mx.nd.array(test_images)).argmax(1).asnumpy() == test_labels).mean()
    stats = trainer.stats()
    print("worker %d of %d: accuracy %.1f%% of %d test images; waited for %d of %d exchanges, %.2f s"
          % (trainer.rank, trainer.num_workers, 100 * right, len(test_labels), stats["waits"], stats["merges"],
             stats["waited_s"]))  # fmt: skip


if __name__ == "__main__":
    main()
