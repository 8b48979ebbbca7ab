"""A worker of `p3 bench outages`: python -m p3.measure.outages.worker WAY STEPS SECONDS MEGABYTES FOLDER.

Trains a model of equal square layers, whose computation is emulated, and writes a line for each of its steps into a
file of its own in FOLDER. WAY is how it takes part: of WAYS. What it saves is in FOLDER as well.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from typing import Callable

import torch

from p3.measure.outages import MARK_EVERY, SAVE_EVERY

LAYERS = 16
_TIMEOUT = timedelta(seconds=5)  # of torchft's Gloo, as in its own example

Told = Callable[[int, int], None]  # step that is done, workers that took part


class _Timed(torch.autograd.Function):
    """Takes as long as a layer; its backward pass twice as long."""

    @staticmethod
    def forward(ctx, inputs, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(2 * ctx.seconds)
        return gradient, None


class Model(torch.nn.Module):
    def __init__(self, compute_s: float, megabytes: float) -> None:
        super().__init__()
        torch.manual_seed(1)
        self._seconds = compute_s / LAYERS / 3
        self.width = max(1, round((megabytes * 1e6 / 4 / LAYERS) ** 0.5))
        self.layers = torch.nn.ModuleList(torch.nn.Linear(self.width, self.width, bias=False) for _ in range(LAYERS))

    def forward(self, inputs):
        for layer in self.layers:
            inputs = _Timed.apply(layer(inputs), self._seconds)
        return inputs


def _optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def _step(model, optimizer, rank: int, step: int) -> None:
    torch.manual_seed(1000 * step + rank)
    optimizer.zero_grad()
    model(torch.randn(1, getattr(model, "module", model).width)).square().mean().backward()
    optimizer.step()


def with_p3(model: Model, steps: int, told: Told, _folder: str) -> None:
    import p3.torch

    first, _ = p3.torch.resume()
    optimizer = p3.torch.DistributedOptimizer(_optimizer(model), model)
    goes_on = os.environ.get("P3_ON_WORKER_LOSS") == "continue"
    present = p3.torch.size()
    for step in range(first, steps):
        if goes_on and step % MARK_EVERY == 0:
            present = len(p3.torch.members(step))
        _step(model, optimizer, p3.torch.rank(), step)
        p3.torch.snapshot(step + 1)
        told(step, present)
    optimizer.synchronize()


def with_ddp(model: Model, steps: int, told: Told, folder: str) -> None:
    from torch import distributed

    distributed.init_process_group("gloo")
    rank, path = distributed.get_rank(), os.path.join(folder, "checkpoint.pt")
    optimizer, first = _optimizer(model), 0
    if os.path.exists(path):
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    for step in range(first, steps):
        _step(parallel, optimizer, rank, step)
        if (step + 1) % SAVE_EVERY == 0 and rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state, path + ".part")
            os.replace(path + ".part", path)
        told(step, distributed.get_world_size())
    distributed.destroy_process_group()


def with_torchft(model: Model, steps: int, told: Told, _folder: str) -> None:
    import torchft

    optimizer = _optimizer(model)

    def load(state) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    rank = int(os.environ["OUTAGES_RANK"])
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=_TIMEOUT), min_replica_size=1, load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        replica_id=f"replica_{rank}", timeout=2 * _TIMEOUT,
    )  # fmt: skip
    parallel, managed = torchft.DistributedDataParallel(manager, model), torchft.Optimizer(manager, optimizer)
    while manager.current_step() < steps:
        before = manager.current_step()
        _step(parallel, managed, rank, before)
        if manager.current_step() > before:  # else the step has failed, and is taken again
            told(manager.current_step() - 1, manager.num_participants())
    manager.shutdown(wait=False)


WAYS = {"p3": with_p3, "ddp": with_ddp, "torchft": with_torchft}


def main() -> None:
    way, steps, compute_s, megabytes, folder = sys.argv[1:]
    torch.set_num_threads(1)
    rank = os.environ.get("P3_RANK") or os.environ["OUTAGES_RANK"]
    with open(os.path.join(folder, "worker-%s-%d.jsonl" % (rank, os.getpid())), "w", encoding="utf-8") as file:

        def told(step: int, present: int) -> None:
            line = {"at": time.monotonic(), "rank": int(rank), "step": step, "present": present}
            print(json.dumps(line), file=file, flush=True)

        WAYS[way](Model(float(compute_s), float(megabytes)), int(steps), told, folder)


if __name__ == "__main__":
    main()
