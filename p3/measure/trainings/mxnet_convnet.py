"""One worker that trains a small convolutional net with Gluon, nothing emulated; only the name of the store differs.

    python -m p3.measure.trainings.mxnet_convnet --store p3_sync --iterations 20

The pictures are ten random patterns under noise, other noise on every worker. An iteration lasts from one loss that can
be read to the next, so the next forward pass has begun while weights still arrive. With --pause steps are of unlike
length, as where others use the machine. It writes the lines of p3/measure/workers/lines.py:
`digest` is of the weights, which all workers must have alike, and the result is wrong if the loss has not fallen.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import time
from typing import Iterator, Optional, Sequence

from p3.measure.workers.lines import Lines, digest
from p3.measure.workers.mxnet_store import import_mxnet, meet
from p3.mxnet import hooks

BATCH = 32
SIDE = 16
CLASSES = 10
MOMENTUM = 0.9
LEARNING_RATE = 0.02
LAST_STEPS = 5  # whose mean is the loss at the end
FEATURES = 48 * (SIDE // 4) ** 2  # that the convolutions give to the dense layers
NOISE = 0.5


def model_bytes(size: float) -> int:
    """12.9 MB for a size of 1, nearly all of them in the first dense layer, as in VGG."""
    width = hidden(size)
    weights_and_biases = (32 * 9 + 32, 48 * 32 * 9 + 48, (FEATURES + 1) * width, (width + 1) * CLASSES)
    return 4 * sum(weights_and_biases)


def make_net(gluon, size: float):
    net = gluon.nn.HybridSequential(prefix="")
    net.add(
        gluon.nn.Conv2D(32, 3, padding=1, activation="relu", in_channels=1),
        gluon.nn.MaxPool2D(2),
        gluon.nn.Conv2D(48, 3, padding=1, activation="relu", in_channels=32),
        gluon.nn.MaxPool2D(2),
        gluon.nn.Dense(hidden(size), activation="relu", in_units=FEATURES),
        gluon.nn.Dense(CLASSES, in_units=hidden(size)),
    )
    return net


def hidden(size: float) -> int:
    return max(1, round(4096 * size))


def pauses(mean_s: float, rank: int) -> Iterator[float]:
    """Seconds for which a worker pauses in each of its steps: exponential, and the same in every run."""
    generator = random.Random(rank)
    while True:
        yield generator.expovariate(1 / mean_s) if mean_s else 0.0


def has_fallen(losses: Sequence[float]) -> bool:
    return statistics.fmean(losses[-LAST_STEPS:]) < losses[0]


def run(options, out) -> bool:
    mx = import_mxnet(options.store)
    from mxnet import autograd, gluon

    lines = Lines(out, "real", options.store)
    mx.random.seed(1)  # the same first weights and patterns on every worker
    net = make_net(gluon, options.size)
    net.initialize(mx.init.Xavier())
    patterns = mx.nd.random.uniform(shape=(CLASSES, 1, SIDE, SIDE))
    store = mx.kv.create(options.store)
    sgd = {"learning_rate": options.learning_rate, "momentum": options.momentum}
    trainer = gluon.Trainer(net.collect_params(), "sgd", sgd, kvstore=store)
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    mx.random.seed(100 + store.rank)
    by_name = net.collect_params()
    parameters = [by_name[name] for name in sorted(by_name)]  # as Trainer numbers them
    lines.header(
        {"mxnet": mx.__version__}, rank=store.rank, workers=store.num_workers,
        bytes=4 * sum(math.prod(parameter.shape) for parameter in parameters),
    )  # fmt: skip
    losses, start, pause_s = [], None, pauses(options.pause, store.rank)
    for number in range(-1, options.warmup + options.iterations):
        time.sleep(next(pause_s))
        labels = mx.nd.random.randint(0, CLASSES, shape=(BATCH,))
        pictures = patterns.take(labels) + mx.nd.random.normal(scale=NOISE, shape=(BATCH, 1, SIDE, SIDE))
        with autograd.record():
            loss = loss_of(net(pictures), labels)
        loss.backward()
        trainer.step(BATCH * store.num_workers)
        losses.append(loss.mean().asscalar())
        end = time.monotonic()
        if start is not None:  # the first step of all makes keys and graphs
            lines.iteration(number, number < options.warmup, start, end, loss=float(losses[-1]))
        start = end
    if hooks.may_be_apart(store.type):
        meet(mx, store, [parameter.list_data() for parameter in parameters])
    fallen = bool(has_fallen(losses))
    lines.result(fallen, digest=digest(parameter.data().asnumpy() for parameter in parameters))
    print(f"{options.store}: the loss went from {losses[0]:.3f} to {losses[-1]:.3f}", file=sys.stderr)
    return fallen


def parse(argv: Optional[Sequence[str]], module: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m p3.measure.trainings." + module, description="Trains a small net.")
    parser.add_argument("--store", required=True, help="e.g. p3_sync or dist_sync; with torch p3_torch or ddp:25")
    parser.add_argument("--size", type=float, default=1.0, help="of the first dense layer (default 1: 12.9 MB)")
    parser.add_argument("--iterations", type=int, default=20, help="that count (default 20)")
    parser.add_argument("--warmup", type=int, default=5, help="iterations before them (default 5)")
    parser.add_argument("--pause", type=float, default=0.0, metavar="S", help="in each step, in the mean (default 0)")
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE, help="of SGD (default %(default)g)")
    parser.add_argument("--momentum", type=float, default=MOMENTUM, help="of SGD (default %(default)g)")
    parser.add_argument("--clip", type=float, metavar="NORM",
                        help="gradients to that global norm, with stores of torch (default: not)")
    options = parser.parse_args(argv)
    if options.iterations < 1 or options.warmup < 0:
        parser.error("--iterations must be at least 1, --warmup at least 0")
    return options


def main(argv: Optional[Sequence[str]] = None) -> int:
    options = parse(argv, "mxnet_convnet")
    if options.clip is not None:
        print("mxnet_convnet: --clip is for stores of torch", file=sys.stderr)
        return 2
    return 0 if run(options, sys.stdout) else 1


if __name__ == "__main__":
    sys.exit(main())
