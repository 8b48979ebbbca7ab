"""Page faults and memory of a step with PyTorch: what it costs that each step's gradients are fresh memory.

    p3 run -n 2 -s 2 python tests/jobs/torch_faults.py [--plain] [--steps 12]

Each worker trains a net like VGG, scaled down to 86 MB of weights, and prints the minor page faults of its process in a
step behind the warm-up (the median), and its peak of resident memory. --plain: torch alone, without P3. Set glibc's
MALLOC_ variables, or torch's THP_MEM_ALLOC_ENABLE, in the environment. Counts do not depend on what else the machine
does.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
from typing import Optional, Sequence

import torch
from torch import nn

_WARM_UP = 4


def make_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Conv2d(128, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1024), nn.ReLU(), nn.Linear(1024, 100),
    )  # fmt: skip


def main(arguments: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args(arguments)
    torch.manual_seed(1)
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    if not options.plain:
        import p3.torch

        p3.torch.DistributedOptimizer(optimizer, net)
    pictures, labels = torch.randn(8, 3, 32, 32), torch.randint(0, 100, (8,))
    faults = []
    for _ in range(_WARM_UP + options.steps):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(pictures), labels).backward()
        optimizer.step()
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    print(json.dumps({
        "faults": statistics.median(faults[_WARM_UP:]),
        "weights_mb": round(sum(one.numel() for one in net.parameters()) * 4e-6, 1),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1.024e-3, 1),
    }), flush=True)  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
