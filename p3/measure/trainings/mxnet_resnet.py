"""One worker of `p3 bench accuracy`: trains a small residual net with Gluon, nothing emulated; only the store differs.

    python -m p3.measure.trainings.mxnet_resnet --store p3_sync --dgc 0.01 --seed 1 --epochs 30

The pictures are scikit-learn's handwritten digits, 8 x 8, of which resnets.TESTED are only tested on. First weights and
batches follow from the seed, and from the worker's rank: so they are the same for every store.

It writes the lines of p3/measure/workers/lines.py, an iteration being a step, from one loss that can be read to the
next; and after each epoch {"kind": "epoch", "accuracy": A, "at_s": S}: the share of test pictures that its net tells
right, and the seconds of training until all weights had arrived. The clock stands still while workers test and wait for
each other. A net is tested with the running means of its own worker's batches, which no store synchronises. `digest` is
of the weights, which all workers must have alike, and the result is wrong if the loss has not fallen.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from typing import Optional, Sequence, Tuple

import numpy as np

from p3.errors import ConfigError
from p3.measure.trainings import resnets
from p3.measure.trainings.resnets import BATCH
from p3.measure.workers.lines import Lines, digest
from p3.measure.workers.mxnet_store import import_mxnet

RATE, MOMENTUM = 0.1, 0.9
SLOWER = (0.5, 0.75)  # after these shares of all epochs the learning rate is a tenth
DGC_WARMUP_EPOCHS = 4  # as Lin et al. have

Pictures = Tuple[np.ndarray, np.ndarray]


def digits() -> Tuple[Pictures, Pictures]:
    """To train and to test on: pictures of n x 1 x 8 x 8 from -1 to 1, and their labels."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ConfigError(f"the digits are scikit-learn's ({error}): pip install scikit-learn") from None
    found = load_digits()
    pictures, labels = found.images[:, np.newaxis].astype("float32") / 8 - 1, found.target.astype("float32")
    order = np.random.RandomState(1).permutation(len(labels))
    return tuple((pictures[part], labels[part]) for part in (order[resnets.TESTED :], order[: resnets.TESTED]))


def make_net(mx, depth: int, seed: int):
    """With its first weights."""
    zoo = mx.gluon.model_zoo.vision
    stages = [resnets.blocks(depth)] * 3
    net = zoo.ResNetV1(zoo.BasicBlockV1, stages, list(resnets.CHANNELS), classes=resnets.CLASSES, thumbnail=True)
    mx.random.seed(seed)
    net.initialize(mx.init.Xavier())
    net(mx.nd.zeros((1, 1, 8, 8)))  # which tells it the shapes
    net.hybridize()
    return net


def run(options, out) -> bool:
    mx = import_mxnet(options.store)
    from mxnet import autograd, gluon

    lines = Lines(out, "real", options.store)
    (pictures, labels), tested = digits()
    test_pictures, test_labels = mx.nd.array(tested[0]), tested[1]
    net = make_net(mx, options.depth, options.seed)
    parameters = [one for one in net.collect_params().values() if one.grad_req != "null"]
    store = mx.kv.create(options.store)
    steps = resnets.steps_of_an_epoch(store.num_workers)
    # Of the optimizer, as a rate that is set later does not reach the servers of MXNet's own stores.
    slower = [int(share * options.epochs * steps) for share in SLOWER]
    schedule = mx.lr_scheduler.MultiFactorScheduler(slower, 0.1, base_lr=RATE)
    compression = {"type": "dgc", "ratio": options.dgc, "warmup_steps": DGC_WARMUP_EPOCHS * steps}
    trainer = gluon.Trainer(
        net.collect_params(), "sgd", {"learning_rate": RATE, "momentum": MOMENTUM, "lr_scheduler": schedule},
        kvstore=store, update_on_kvstore=True, compression_params=None if options.dgc is None else compression,
    )  # fmt: skip
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    lines.header(
        {"mxnet": mx.__version__}, rank=store.rank, workers=store.num_workers, seed=options.seed,
        bytes=sum(4 * math.prod(one.shape) for one in parameters), data=digest([pictures, tested[0]]),
    )  # fmt: skip
    epoch_losses, trained_s, number = [], 0.0, 0
    for epoch in range(options.epochs):
        order = np.random.RandomState([options.seed, epoch]).permutation(len(labels))
        losses = []
        begin = start = time.monotonic()
        for step in range(steps):
            first = (step * store.num_workers + store.rank) * BATCH
            chosen = order[first : first + BATCH]
            with autograd.record():
                loss = loss_of(net(mx.nd.array(pictures[chosen])), mx.nd.array(labels[chosen]))
            loss.backward()
            trainer.step(BATCH * store.num_workers)
            losses.append(float(loss.mean().asscalar()))
            end = time.monotonic()
            lines.iteration(number, epoch == 0, start, end, loss=losses[-1])
            start, number = end, number + 1
        mx.nd.waitall()
        trained_s += time.monotonic() - begin
        right = (net(test_pictures).asnumpy().argmax(axis=1) == test_labels).mean()
        epoch_losses.append(statistics.fmean(losses))
        lines.write("epoch", epoch=epoch, accuracy=float(right), loss=epoch_losses[-1], at_s=trained_s)
        store._barrier()
    fallen = epoch_losses[-1] < epoch_losses[0]
    lines.result(fallen, digest=digest(one.data().asnumpy() for one in parameters))
    print(f"{options.store}: the loss went from {epoch_losses[0]:.3f} to {epoch_losses[-1]:.3f}, and the accuracy to "
          f"{right:.4f} in {trained_s:.1f} s", file=sys.stderr)  # fmt: skip
    return fallen


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m p3.measure.trainings.mxnet_resnet", description="Trains a net.")
    parser.add_argument("--store", required=True, help="what mx.kv.create is given, e.g. p3_sync or dist_sync")
    parser.add_argument("--dgc", type=float, metavar="RATIO", help="deep gradient compression, of stores of P3's")
    parser.add_argument("--depth", type=int, choices=resnets.DEPTHS, default=resnets.DEPTHS[1], help="of the net")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and of the batches (default 0)")
    parser.add_argument("--epochs", type=int, default=30, help="default 30")
    options = parser.parse_args(argv)
    if options.epochs < 2:
        parser.error("--epochs must be at least 2: the first one is a warm-up")
    return 0 if run(options, sys.stdout) else 1


if __name__ == "__main__":
    sys.exit(main())
