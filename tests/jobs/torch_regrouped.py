"""torch_regrouped.py STEPS KILL_AT [BACK_AT]: p3.torch in a job that comes back with another number of workers.

Five models, whose optimizers update on the servers, on the workers, and on the workers in step(); the last two with
what comes back encoded, changes of weights and mean gradients. All workers have the same batches, so with 1, 2 or 4 of
them the mean gradient has the same bits; but from the first step on each worker has running statistics of its own. The
last rank is killed behind step KILL_AT, once its snapshot is complete; 0: nobody is. With BACK_AT, the worker that is
killed is the one with "mortal" in its environment, and its agent of torchrun with it; and who is alone waits behind
step BACK_AT until torchrun starts the workers again, as another host is there.
"""

import os
import signal
import sys
import time
import zlib

import torch
from regrouped import kill_self_behind, wait_for_snapshot
from torch import nn

import p3.torch

KINDS = (
    (torch.optim.AdamW, {}, {}),
    (torch.optim.Adamax, {}, {}),
    (torch.optim.SGD, {"momentum": 0.9}, {"synchronous": True}),
    (torch.optim.AdamW, {}, {"compression": {"down": "int8"}}),
    (torch.optim.SGD, {"momentum": 0.9}, {"synchronous": True, "compression": {"down": "int8"}}),
)


def digests(models):
    """Of all parameters, and of all buffers."""
    found = []
    for named in ("named_parameters", "named_buffers"):
        digest = 0
        for model in models:
            for _, tensor in getattr(model, named)():
                digest = zlib.crc32(tensor.detach().numpy().tobytes(), digest)
        found.append("%08x" % digest)
    return "weights %s statistics %s" % tuple(found)


def main():
    steps, kill_at, back_at = map(int, [*sys.argv[1:], 0][:3])
    size = p3.torch.size()
    resumed = round, state = p3.torch.resume()
    rank = p3.torch.rank()
    torch.manual_seed(3 + round)
    models, optimizers, schedules = [], [], []
    for make, arguments, options in KINDS:
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        optimizer = p3.torch.DistributedOptimizer(make(model.parameters(), lr=0.05, **arguments), model, **options)
        models.append(model)
        optimizers.append(optimizer)
        schedules.append(torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5))
    if state is not None:
        for schedule, its in zip(schedules, state["schedules"]):
            schedule.load_state_dict(its)
        assert state["rank"] == resumed.from_rank, state
        print("worker %d at %d of %d: %s" % (rank, round, resumed.workers, digests(models)), flush=True)
    for step in range(round, steps):
        batch = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
        for model, optimizer, schedule in zip(models, optimizers, schedules):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            schedule.step()
            if step == 0:
                model[1].running_mean.add_(rank)
        p3.torch.snapshot(step + 1, {"rank": rank, "schedules": [schedule.state_dict() for schedule in schedules]})
        if step + 1 in (kill_at, steps):
            for optimizer in optimizers:
                optimizer.synchronize()
            print("worker %d behind %d: %s" % (rank, step + 1, digests(models)), flush=True)
            if step + 1 == kill_at and back_at and "mortal" in os.environ:
                wait_for_snapshot(kill_at)
                os.kill(os.getppid(), signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)
            if step + 1 == kill_at and not back_at and rank == size - 1:
                kill_self_behind(kill_at)
        if step + 1 == back_at and size == 1:
            wait_for_snapshot(back_at)
            # As no step ends any more at whose end P3 would heed it; torchrun waits for 30 s.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            print("alone behind %d" % back_at, flush=True)
            time.sleep(60)


if __name__ == "__main__":
    main()
