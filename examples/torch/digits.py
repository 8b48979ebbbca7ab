"""Trains a convolutional net on scikit-learn's handwritten digits with PyTorch, on any number of workers.

    python examples/torch/digits.py                         # alone, in one process
    p3 run -n 2 -s 2 python examples/torch/digits.py        # two workers and two servers
    torchrun --nproc-per-node 2 examples/torch/digits.py    # two workers, which start a server themselves
"""

import argparse
import time

import p3.torch
import torch
from sklearn.datasets import load_digits
from torch import nn


def load():
    """(images, labels) of 1,500 digits for training, and of the other 297 for testing; images are 1 x 8 x 8."""
    digits = load_digits()
    images = torch.tensor(digits.images[:, None], dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1))
    return [(images[part], labels[part]) for part in (order[:1500], order[1500:])]


def make_net():
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(1024, 128), nn.ReLU(),
        nn.Linear(128, 10),
    )  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=50, help="images per step, of all workers together")
    options = parser.parse_args()

    rank, size = p3.torch.rank(), p3.torch.size()
    (images, labels), (test_images, test_labels) = load()
    torch.manual_seed(1)
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    optimizer = p3.torch.DistributedOptimizer(optimizer, net)

    share = max(1, options.batch_size // size)
    steps = len(images) // (share * size)
    started = time.perf_counter()
    for epoch in range(options.epochs):
        total = torch.zeros(())
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))  # the same on all workers
        for batch in order[rank::size].split(share)[:steps]:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            total += loss.detach()
        if rank == 0:
            print("epoch %d: loss %.4f" % (epoch + 1, total / steps), flush=True)
    seconds = time.perf_counter() - started

    with torch.no_grad():
        right = (net(test_images).argmax(1) == test_labels).float().mean()
    print("worker %d of %d: accuracy %.1f%% of %d test images, %.0f images/s of this worker"
          % (rank, size, 100 * right, len(test_labels), options.epochs * steps * share / seconds))  # fmt: skip


if __name__ == "__main__":
    main()
