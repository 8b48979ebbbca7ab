"""A small torch model, and steps of training it."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
import torch
from torch import nn


def small_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def backward(model):
    model(torch.ones(2, 4)).square().sum().backward()


def step(model, optimizer):
    optimizer.zero_grad()
    backward(model)
    optimizer.step()


def losses_behind(made, optimizer_of, loss_of, compressions):
    """Of data that no worker has: what a model loses before training, and what it does behind 150 steps with each of
    these compressions. `loss_of`: of a model, a worker and a step."""
    import p3.torch

    def lost(model):
        with torch.no_grad():
            return sum(loss_of(model, 50, step) for step in range(50)).item() / 50

    losses = []
    for compression in compressions:
        model = made()
        trained = p3.torch.DistributedOptimizer(optimizer_of(model.parameters()), model, compression=compression)
        for step in range(150):
            trained.zero_grad()
            loss_of(model, p3.torch.rank(), step).backward()
            trained.step()
        trained.synchronize()
        losses.append(lost(model))
        trained.release()
    return lost(made()), losses
