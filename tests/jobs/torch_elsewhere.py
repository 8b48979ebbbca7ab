"""Trains where torch makes tensors on another device unless told; parameters on the CPU, and staged ones."""

import copy
import io

import torch

torch.set_default_device("meta")
import p3.torch  # noqa: E402
from p3.torch.parameters import arrays  # noqa: E402
from torch import nn  # noqa: E402


class Net(nn.Module):
    def __init__(self, is_sparse):
        super().__init__()
        self.words = nn.Embedding(9, 4, sparse=is_sparse, device="cpu")
        self.head, self.unused = nn.Linear(4, 2, device="cpu"), nn.Linear(4, 2, device="cpu")

    def forward(self, ids):
        rows = torch.ones(1, 4, device="cpu") if ids is None else self.words(ids)
        return self.head(rows).square().mean()


def train(make, is_sparse, **options):
    """Against plain torch, where it makes its tensors on the CPU."""
    reference = Net(is_sparse)
    model = copy.deepcopy(reference)
    with torch.device("cpu"):  # Adagrad counts steps on the default device
        plain, optimizer = make(reference.parameters(), lr=0.1), make(model.parameters(), lr=0.1)
        steps(reference, plain)
    p3.torch.DistributedOptimizer(optimizer, model, **options)
    steps(model, optimizer)
    optimizer.synchronize()
    for name, weight in model.state_dict().items():
        assert torch.allclose(weight, reference.state_dict()[name], atol=1e-6), (make, name)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    states = torch.load(file, map_location="cpu")
    model.load_state_dict(reference.state_dict())
    optimizer.load_state_dict(states)
    optimizer.join()


def steps(model, optimizer):
    for number in range(4):
        optimizer.zero_grad(set_to_none=number % 2 == 0)
        model(None if number == 1 else torch.arange(number, number + 5, device="cpu")).backward()  # then words have 0
        optimizer.step()


def closure():
    model = Net(False)
    optimizer = p3.torch.DistributedOptimizer(torch.optim.LBFGS(model.parameters(), lr=0.1), model)

    def loss():
        optimizer.zero_grad()
        loss = model(torch.arange(5, device="cpu"))
        loss.backward()
        return loss

    first, last = optimizer.step(loss), optimizer.step(loss)
    assert last < first and last.device.type == "cpu"


if __name__ == "__main__":
    for make in (torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad):
        train(make, make is not torch.optim.Adam)
    train(torch.optim.SGD, False, synchronous=True)
    train(lambda parameters, lr: torch.optim.SparseAdam([next(parameters)], lr=lr), True)
    closure()
    arrays.DEVICES.add("cpu")
    train(torch.optim.SGD, False)
    train(torch.optim.Adam, False, synchronous=True)
    print("trained")
