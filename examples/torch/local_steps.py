"""Trains a convolutional net on scikit-learn's handwritten digits with local steps, for workers across a slow network.

    python examples/torch/local_steps.py                         # alone, in one process
    p3 run -n 2 -s 2 python examples/torch/local_steps.py        # two workers and two servers

Every worker takes steps of its own. Each third of the net is exchanged once in 12 steps, in 4 bits, and has 3 more
steps to come back in.
"""

import argparse

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
    parser.add_argument("--batch-size", type=int, default=25, help="images per step, of each worker")
    options = parser.parse_args()

    rank, size = p3.torch.rank(), p3.torch.size()
    (images, labels), (test_images, test_labels) = load()
    torch.manual_seed(1)
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.002)
    optimizer = p3.torch.LocalSteps(optimizer, net, every=12, fragments=3, delay=3, codec="int4")

    steps = len(images) // (options.batch_size * size)  # of every worker, or one would wait for the others
    for epoch in range(options.epochs):
        total = torch.zeros(())
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))  # the same on all workers
        for batch in order[rank::size].split(options.batch_size)[:steps]:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(images[batch]), labels[batch])
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)  # this worker's, as in plain torch
            optimizer.step()
            total += loss.detach()
        if rank == 0:
            print("epoch %d: loss %.4f" % (epoch + 1, total / steps), flush=True)

    optimizer.take_global()  # from here on all workers have the same net
    stats = optimizer.stats()
    with torch.no_grad():
        right = (net(test_images).argmax(1) == test_labels).float().mean()
    print(
        "worker %d of %d: accuracy %.1f%% of %d test images; waited for %d of %d exchanges, %.2f s"
        % (rank, size, 100 * right, len(test_labels), stats["waits"], stats["merges"], stats["waited_s"])
    )


if __name__ == "__main__":
    main()
