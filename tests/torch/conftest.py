"""A small model and its distributed optimizer, in this process."""

import pytest


@pytest.fixture
def model():
    from torch_steps import small_model

    return small_model()


@pytest.fixture
def optimizer(model):
    import p3.torch
    from torch_steps import sgd

    return p3.torch.DistributedOptimizer(sgd(model), model)
