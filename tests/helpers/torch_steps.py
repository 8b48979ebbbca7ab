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
