"""The training of mxnet_convnet.py with PyTorch: the same net, pictures and lines; only the name of the store differs.

    python -m p3.measure.trainings.torch_convnet --store p3_torch --iterations 20

Stores as in p3/measure/workers/torch_store.py.
"""

from __future__ import annotations

import sys
import time
from typing import Optional, Sequence

import torch
from torch import nn

from p3.measure.trainings import mxnet_convnet as train
from p3.measure.workers import torch_store
from p3.measure.workers.lines import Lines, digest


def make_net(size: float) -> nn.Module:
    hidden = train.hidden(size)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 48, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(train.FEATURES, hidden), nn.ReLU(), nn.Linear(hidden, train.CLASSES),
    )  # fmt: skip


def run(options, out) -> bool:
    lines = Lines(out, "real", options.store)
    torch.manual_seed(1)  # the same first weights and patterns on every worker
    net = make_net(options.size)
    optimizer = torch.optim.SGD(net.parameters(), lr=options.learning_rate, momentum=options.momentum)
    patterns = torch.rand(train.CLASSES, 1, train.SIDE, train.SIDE)
    rank, workers, net = torch_store.distribute(options.store, net, optimizer, options.clip)
    torch.manual_seed(100 + rank)
    lines.header(
        {"torch": torch.__version__}, rank=rank, workers=workers,
        bytes=sum(4 * tensor.numel() for tensor in net.parameters()),
    )  # fmt: skip
    losses, start, pause_s = [], None, train.pauses(options.pause, rank)
    for number in range(-1, options.warmup + options.iterations):
        time.sleep(next(pause_s))
        labels = torch.randint(0, train.CLASSES, (train.BATCH,))
        pictures = patterns[labels] + train.NOISE * torch.randn(train.BATCH, 1, train.SIDE, train.SIDE)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(pictures), labels)
        losses.append(loss.item())
        loss.backward()
        torch_store.clip_as_usual(options.store, net, options.clip)
        optimizer.step()
        end = time.monotonic()
        if start is not None:  # the first step of all builds what later ones use
            lines.iteration(number, number < options.warmup, start, end, loss=losses[-1])
        start = end
    if torch_store.is_p3(options.store) and torch_store.staleness(options.store) > 0:
        optimizer.join()
    fallen = train.has_fallen(losses)
    lines.result(fallen, digest=digest(torch_store.weights(net)))
    print(f"{options.store}: the loss went from {losses[0]:.3f} to {losses[-1]:.3f}", file=sys.stderr)
    torch_store.leave(fallen)
    return fallen


def main(argv: Optional[Sequence[str]] = None) -> int:
    return 0 if run(train.parse(argv, "torch_convnet"), sys.stdout) else 1


if __name__ == "__main__":
    sys.exit(main())
