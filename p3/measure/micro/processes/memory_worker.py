"""One worker of `p3 bench memory`:
    python -m p3.measure.micro.processes.memory_worker OPTIMIZER WAY MEGABYTES LAYERS STEPS

Says by how much its peak in the steps that count, and the largest server's ever, exceed what each had before the model.
"""

from __future__ import annotations

import json
import math
import os
import sys
from typing import Any, Callable, Dict, NamedTuple

from p3.measure.chaos.strike import MARK, marked
from p3.measure.jobs import usage

WARMUP = 2
BATCH = 2
NORM = 1.0
OPTIMIZERS: Dict[str, Dict[str, Any]] = {"SGD": {"lr": 0.01, "momentum": 0.9}, "AdamW": {"lr": 0.001}}


class Way(NamedTuple):
    prepare: Callable  # (optimizer, model) -> the model to call, the optimizer, and what stands behind backward()
    beside: str  # whose memory its own is compared with
    is_ddp: bool = False


def _ddp(clips: bool) -> Callable:
    def prepare(optimizer, model):
        import torch

        import p3.torch

        p3.torch.process_group()
        wrapped = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=25, gradient_as_bucket_view=True)

        def update() -> None:
            if clips:
                torch.nn.utils.clip_grad_norm_(model.parameters(), NORM)
            optimizer.step()

        return wrapped, optimizer, update

    return prepare


def _p3(**options: Any) -> Callable:
    def prepare(optimizer, model):
        import p3.torch

        optimizer = p3.torch.DistributedOptimizer(optimizer, model, **options)
        return model, optimizer, optimizer.step

    return prepare


WAYS = {
    "ddp": Way(_ddp(clips=False), "ddp", is_ddp=True),
    "p3": Way(_p3(), "ddp"),
    "ddp_clipped": Way(_ddp(clips=True), "ddp_clipped", is_ddp=True),
    "p3_clipped": Way(_p3(max_grad_norm=NORM), "ddp_clipped"),
    "p3_synchronous": Way(_p3(synchronous=True, max_grad_norm=NORM), "ddp_clipped"),
}


def main(optimizer_name: str, way: str, megabytes: float, layers: int, steps: int) -> None:
    import torch

    import p3.torch

    torch.manual_seed(0)
    p3.torch.rank()  # the session is open: what it needs is none of the model's
    before, servers_before = usage.own_rss(), _servers_bytes()
    width = math.isqrt(int(megabytes * 1e6 / 4 / layers))
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(layers)])
    optimizer = getattr(torch.optim, optimizer_name)(model.parameters(), **OPTIMIZERS[optimizer_name])
    called, optimizer, update = WAYS[way].prepare(optimizer, model)
    batch = torch.randn(BATCH, width)
    for number in range(-WARMUP, steps):
        if number == 0:
            usage.reset_own_peak_rss()
        optimizer.zero_grad()
        called(batch).square().mean().backward()
        update()
    peak = usage.own_peak_rss()
    p3.torch.barrier()  # every worker's last step has begun; the servers have seen all that they need memory for
    report = {"worker": peak - before, "server": _servers_bytes() - servers_before}
    print(json.dumps({"memory": report}), flush=True)
    p3.torch.barrier()  # the servers live until all have looked at them


def _servers_bytes() -> int:
    """The most that the largest server ever had."""
    pids = [pid for pid, env in marked(os.environ[MARK]).items() if env.get("DMLC_ROLE") == "server"]
    return max(map(usage.process_peak_rss, pids))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
