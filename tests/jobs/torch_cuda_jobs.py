"""Jobs of p3.torch on a GPU, one function for each: torch_cuda_jobs.py NAME"""

import contextlib
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

import p3.torch

GPU = torch.device("cuda")


@contextlib.contextmanager
def no_synchronisation():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def step(model, optimizer, x):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def unsynchronised():
    for make, options in (
        (lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True), {}),
        (lambda p: torch.optim.Adamax(p, lr=0.01, foreach=True), {}),
        (lambda p: torch.optim.SGD(p, lr=0.01), {"max_grad_norm": 1.0}),
    ):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(300, 500), nn.ReLU(), nn.Linear(500, 10), nn.Linear(10, 7)).to(GPU)
        optimizer = p3.torch.DistributedOptimizer(make(model.parameters()), model, **options)
        x = torch.randn(8, 300, device=GPU)
        for number in range(6):
            for tensor in model[3].parameters():
                tensor.requires_grad_(number != 4)  # its round is skipped then
            with no_synchronisation() if number > 1 else contextlib.nullcontext():
                step(model, optimizer, x)
        optimizer.synchronize()
        assert all(tensor.isfinite().all() for tensor in model.parameters())
    print("no step waited for the device")


def ahead():
    model = nn.Sequential(nn.Linear(300, 500), nn.ReLU(), nn.Linear(500, 10)).to(GPU)
    optimizer = p3.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
    x = torch.randn(8, 300, device=GPU)
    for _ in range(3):
        step(model, optimizer, x)
    optimizer.synchronize()
    torch.cuda.synchronize()
    spinning = torch.cuda.Event()
    torch.cuda._sleep(int(2e9))  # cycles: about a second
    spinning.record()
    step(model, optimizer, x)
    assert not spinning.query(), "the step was over only when the device had come so far"
    print("ahead of the device")


def large():
    model = nn.Linear(16000, 8000, bias=False, device=GPU)
    optimizer = p3.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
    x = torch.randn(1, 16000, device=GPU)
    for _ in range(3):
        step(model, optimizer, x)
    optimizer.synchronize()


def lagging():
    """The weights of a round are all alike, as their gradients are: a mixture of two rounds would show."""
    model = nn.Linear(1000, 64, bias=False, device=GPU)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = p3.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.125), model)
    x = torch.ones(1, 1000, device=GPU)
    whole = []
    for _ in range(40):
        optimizer.zero_grad()
        torch.cuda._sleep(int(2e6))  # about a millisecond before the forward pass
        y = model(x)
        torch.cuda._sleep(int(2e6))  # and before the weight is read again
        whole.append((model.weight == model.weight[0, 0]).all() & (y == y[0, 0]).all())
        y.sum().backward()
        optimizer.step()
    optimizer.synchronize()
    assert torch.stack(whole).all()
    assert (model.weight == 1.0 - 40 * 0.125).all()
    print("every value was whole")


def moved():
    """An LSTM whose weights cuDNN moves in each step, against plain torch."""
    outcomes = []
    for is_distributed in (True, False):
        torch.manual_seed(1)
        model = nn.LSTM(6, 5, 2).to(GPU)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if is_distributed:
            optimizer = p3.torch.DistributedOptimizer(optimizer, model)
        for _ in range(5):
            optimizer.zero_grad()
            model.flatten_parameters()
            model(torch.ones(3, 2, 6, device=GPU))[0].square().mean().backward()
            optimizer.step()
        outcomes.append({name: value.cpu() for name, value in model.state_dict().items()})
    for name, value in outcomes[0].items():
        assert torch.allclose(value, outcomes[1][name], atol=1e-5), name
    print("the weights follow")


def grouped():
    """torch.distributed beside P3: NCCL would refuse workers that share a GPU."""
    p3.torch.process_group()
    torch.cuda.set_device(p3.torch.local_rank() % torch.cuda.device_count())
    for device in ("cuda", "cpu"):
        one = torch.full((3,), 1.0 + p3.torch.rank(), device=device)
        every = torch.empty(6, device=device)
        dist.all_gather_into_tensor(every, one)
        dist.all_reduce(one)
        assert one.tolist() == [3.0] * 3 and every.tolist() == [1.0] * 3 + [2.0] * 3
    dist.destroy_process_group()
    print("one group")


def one_context():
    """Worker 1 has the last GPU: no thread of its may make a context on another one."""
    device = torch.device("cuda", (torch.cuda.device_count() - 1) * min(1, p3.torch.rank()))
    torch.cuda.set_device(device)
    model = nn.Linear(300, 300).to(device)
    optimizer = p3.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
    for _ in range(4):
        step(model, optimizer, torch.ones(4, 300, device=device))
    optimizer.synchronize()
    others = [number for number in range(torch.cuda.device_count()) if number != device.index]
    assert not any(torch._C._cuda_hasPrimaryContext(number) for number in others)
    print("one context")


class TwoDevices(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(30, 40), nn.Linear(40, 5)

    def forward(self, x):
        hidden = torch.tanh(self.first(x.to(self.first.weight.device)))
        return self.last(hidden.to(self.last.weight.device))


def two_devices():
    outcomes = []
    for is_distributed in (True, False):
        torch.manual_seed(1)
        model = TwoDevices()
        model.first.to("cuda:0")
        model.last.to("cuda:1")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if is_distributed:
            optimizer = p3.torch.DistributedOptimizer(optimizer, model)
        for _ in range(5):
            step(model, optimizer, torch.ones(4, 30))
        if is_distributed:
            optimizer.synchronize()
        outcomes.append([tensor.detach().cpu() for tensor in model.parameters()])
    for one, other in zip(*outcomes):
        assert torch.allclose(one, other, atol=1e-5)
    print("both devices follow")


if __name__ == "__main__":
    began = time.monotonic()
    globals()[sys.argv[1]](*sys.argv[2:])
    print("%s took %.1f s" % (sys.argv[1], time.monotonic() - began))
