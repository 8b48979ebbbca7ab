"""Trains a convolutional net on scikit-learn's handwritten digits in Ray Train's TorchTrainer, with P3.

    python examples/ray/digits.py --workers 2        # on a node of a Ray cluster; without one, Ray starts it here

The training function is that of a single-process script except for three lines: two split the data by p3.torch.rank()
and size(), one wraps the optimizer. No prepare_model(): gradients go through P3, not through DistributedDataParallel.
"""

import argparse


def train(config):
    import p3.torch
    import torch
    from sklearn.datasets import load_digits
    from torch import nn

    digits = load_digits()
    images, labels = torch.tensor(digits.images[:, None], dtype=torch.float32) / 16, torch.tensor(digits.target)
    test_images, test_labels = images[1500:], labels[1500:]

    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    optimizer = p3.torch.DistributedOptimizer(optimizer, net)

    rank, size = p3.torch.rank(), p3.torch.size()
    share = max(1, 50 // size)
    for epoch in range(config["epochs"]):
        order = torch.randperm(1500, generator=torch.Generator().manual_seed(epoch))  # the same on all workers
        for batch in order[rank::size].split(share)[: 1500 // (share * size)]:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        right = (net(test_images).argmax(1) == test_labels).float().mean()
    print("worker %d of %d: accuracy %.1f%% of %d test images" % (rank, size, 100 * right, len(test_labels)))


def main():
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    scaling = ScalingConfig(num_workers=options.workers, placement_strategy="SPREAD")
    TorchTrainer(train, train_loop_config={"epochs": options.epochs}, scaling_config=scaling).fit()


if __name__ == "__main__":
    main()
