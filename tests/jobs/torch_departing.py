"""torch_departing.py MODE FOLDER: workers of PyTorch of whom rank 0 dies behind step 5, and rank 2 behind step 9; the
others train on. With P3_ON_WORKER_LOSS=continue. Leaves the weights of each survivor in FOLDER.

MODE is one of MODES. "alone FOLDER": the same in one process, of every mode, without P3: on the joined batch of those
who are there.
"""

import os
import signal
import sys

import torch

STEPS, WORKERS = 14, 4
DEATHS = {0: 5, 2: 9}
MODES = {
    "servers": (torch.optim.Adam, {"lr": 0.01}, {}),
    "sgd int8": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, {"compression": "int8"}),
    "clipping": (torch.optim.AdamW, {"lr": 0.01}, {"max_grad_norm": 0.1}),
    "synchronous": (torch.optim.SGD, {"lr": 0.1, "nesterov": True, "momentum": 0.9}, {"synchronous": True}),
    "weighed": (torch.optim.SGD, {"lr": 0.1}, {}),
}


def model_and_data(rank):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(20, 300), torch.nn.Tanh(), torch.nn.Linear(300, 5))
    generator = torch.Generator().manual_seed(rank)
    return model, lambda: (torch.randn(8, 20, generator=generator), torch.randn(8, 5, generator=generator))


def train(mode, folder):
    import p3.torch

    rank = p3.torch.rank()
    model, batch = model_and_data(rank)
    kind, settings, options = MODES[mode]
    optimizer = p3.torch.DistributedOptimizer(kind(model.parameters(), **settings), model, **options)
    for step in range(STEPS):
        if step == DEATHS.get(rank, STEPS):
            with torch.no_grad():
                model(torch.zeros(1, 20))  # so that all that it has pushed has landed
        if step in DEATHS.values():
            p3.torch.barrier()
        if step == DEATHS.get(rank, STEPS):
            os.kill(os.getpid(), signal.SIGKILL)
        if step == DEATHS[0] and rank == 1:
            print(p3.torch.members(), flush=True)
        elif step == DEATHS[0]:
            p3.torch.members()
        inputs, targets = batch()
        if mode == "weighed":
            optimizer.weigh(rank + 1)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        lost = p3.torch.all_reduce(torch.tensor([1.0, rank]))
        mean = p3.torch.all_reduce(torch.tensor([1.0, rank]), op="mean")
        here = [other for other in range(WORKERS) if DEATHS.get(other, STEPS) > step]
        assert lost.tolist() == [len(here), sum(here)], (step, lost)
        assert torch.allclose(mean, lost / len(here)), (step, mean)
        said = p3.torch.all_gather_object({"rank": rank})
        assert said == [{"rank": other} if other in here else None for other in range(WORKERS)], (step, said)
        assert p3.torch.broadcast_object(rank, src=3) == 3
    optimizer.synchronize()
    torch.save(model.state_dict(), os.path.join(folder, "%d.pt" % rank))


def alone(mode):
    model, _ = model_and_data(0)
    batches = [model_and_data(rank)[1] for rank in range(WORKERS)]
    kind, settings, options = MODES[mode]
    optimizer = kind(model.parameters(), **settings)
    for step in range(STEPS):
        here = [rank for rank in range(WORKERS) if DEATHS.get(rank, STEPS) > step]
        shares = [rank + 1 if mode == "weighed" else 1 for rank in here]
        optimizer.zero_grad()
        for rank, share in zip(here, shares):
            inputs, targets = batches[rank]()
            (torch.nn.functional.mse_loss(model(inputs), targets) * share / sum(shares)).backward()
        if "max_grad_norm" in options:
            torch.nn.utils.clip_grad_norm_(model.parameters(), options["max_grad_norm"])
        optimizer.step()
    return model.state_dict()


if __name__ == "__main__":
    train(*sys.argv[1:])
