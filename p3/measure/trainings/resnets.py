"""What `p3 bench accuracy` trains, as far as it can be told without MXNet: residual nets of 6n + 2 layers, as He et al.
have them for CIFAR-10, and the sizes of their data (mxnet_resnet.py)."""

from __future__ import annotations

DEPTHS = (8, 14, 20)
CHANNELS = (16, 16, 32, 64)  # of the first convolution, and of three stages
CLASSES = 10

PICTURES, TESTED = 1797, 597  # scikit-learn's digits, and how many of them are only tested on
BATCH = 32  # of each worker


def name(depth: int) -> str:
    return f"resnet{depth}"


def depth_of(model: str) -> int:
    return int(model[len("resnet") :])


def steps_of_an_epoch(workers: int) -> int:
    """What does not fill a batch of all workers waits for the next epoch's order."""
    return (PICTURES - TESTED) // (BATCH * workers)


def blocks(depth: int) -> int:
    """Of each stage; each has two convolutions."""
    return (depth - 2) // 6


def model_bytes(depth: int) -> int:
    """Of the parameters that are trained."""
    before, *stages = CHANNELS
    parameters = 9 * before
    for channels in stages:
        parameters += 9 * channels * (before + (2 * blocks(depth) - 1) * channels) + 2 * blocks(depth) * 2 * channels
        if channels != before:  # the shortcut, and its scales and biases
            parameters += before * channels + 2 * channels
        before = channels
    return 4 * (parameters + (before + 1) * CLASSES)
