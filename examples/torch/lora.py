"""Adapters (LoRA) beside a base that nobody trains: what its start and its steps cost on the network and in memory.

    p3 run -n 2 -s 2 python examples/torch/lora.py

P3_LOCAL_AGGREGATION=0 in front of it: each worker sends and receives by itself, as if it had a machine of its own.
"""

import argparse
from pathlib import Path

import p3.torch
import torch
from p3.worker.session import current
from torch import nn

MB = 1e6


class Adapted(nn.Module):
    """A linear layer that stays as it is, and a change of it of low rank."""

    def __init__(self, width, rank):
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return x + torch.tanh(self.base(x) + self.up(self.down(x))) / 4


class Costs:
    """Of this process, from here on."""

    def __init__(self):
        self.counters = current().counters()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self.memory = self.peak()

    def peak(self):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

    def said(self, steps=1):
        now = current().counters()
        sent, received = (now[name] - self.counters[name] for name in ("bytes_sent", "bytes_received"))
        traffic = "%.2f MB sent, %.2f MB received" % (sent / steps / MB, received / steps / MB)
        return "%s; memory grew by at most %.1f MB" % (traffic, (self.peak() - self.memory) / MB)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rank", type=int, default=4, help="of the adapters")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()

    rank, size = p3.torch.rank(), p3.torch.size()
    torch.manual_seed(1 + rank)  # rank 0's base is everybody's
    model = nn.Sequential(*(Adapted(options.width, options.rank) for _ in range(options.layers)))
    adapters = [tensor for tensor in model.parameters() if tensor.requires_grad]
    rest = [tensor for tensor in model.parameters() if not tensor.requires_grad]
    frozen, trained = (sum(one.nbytes for one in those) / MB for those in (rest, adapters))

    costs = Costs()
    optimizer = p3.torch.DistributedOptimizer(torch.optim.AdamW(adapters, lr=1e-3), model)
    start = costs.said()

    torch.manual_seed(1)
    directions = torch.randn(4, options.width)  # in which all data lies; the outputs shall be twice the inputs
    torch.manual_seed(100 + rank)
    losses, costs = [], Costs()
    for _ in range(options.steps):
        x = torch.randn(16, 4) @ directions / 2
        loss = nn.functional.mse_loss(model(x), 2 * x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(p3.torch.all_reduce(loss.detach(), "mean").item())
    optimizer.synchronize()
    steps = costs.said(options.steps)

    said = "worker %d of %d: " % (rank, size)
    print(said + "%.1f MB are frozen, %.2f MB are trained" % (frozen, trained))
    print(said + "at the start " + start)
    print(said + "in each step " + steps)
    p3.torch.barrier()
    if rank == 0:
        kept = sum(server["value_bytes"] for server in current().server_counters())
        print(said + "the servers keep %.2f MB, with the optimizer's state" % (kept / MB))
    print(said + "loss %.4f of the first one's" % (losses[-1] / losses[0]))


if __name__ == "__main__":
    main()
