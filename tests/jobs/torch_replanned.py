"""torch_replanned.py MODE FOLDER EVENTS: workers of PyTorch whose strategy changes while they train; each leaves its
weights in FOLDER. MODE is one of MODES. EVENTS, in JSON, is a list of [behind which step, what, more]:

    "change", STRATEGY     by optimizer.change_strategy()
    "propose", STRATEGY    by what strategy="auto" does with a plan that its first worker has made
    "die", RANK            behind the step
    "die before", RANK     when its gradients of the next step have left, and its step has not ended
    "enter"                members(), where others may join, once FOLDER has a file "go"
    "join", [STEPS...]     of each rank: after so many steps of its own in join()

Worker 0, or who is first, prints on which servers the keys were at last.
"""

import json
import os
import signal
import sys
import time

import torch
import torch_losing_servers

import p3.torch
from p3.plan import strategy as strategies
from p3.worker import session

STEPS = 12
SGD = torch.optim.SGD
MODES = {
    **torch_losing_servers.MODES,
    "int8": (SGD, {"lr": 0.1, "momentum": 0.9}, {"compression": {"up": "int8", "down": None}}),
    "of groups": (torch.optim.AdamW, {"lr": 0.01}, {}),
    "frozen": (torch.optim.Adam, {"lr": 0.01}, {}),
    "weighed": (SGD, {"lr": 0.1}, {}),
}


def model_of(mode):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(20, 900), torch.nn.BatchNorm1d(900), torch.nn.Tanh(),
                                torch.nn.Linear(900, 30))  # fmt: skip
    if mode == "frozen":
        model[0].requires_grad_(False)
    return model


def optimizer_of(mode, model):
    kind, settings, options = MODES[mode]
    parameters = list(model.parameters())
    groups = [{"params": parameters[:2]}, {"params": parameters[2:]}] if mode == "of groups" else parameters
    return p3.torch.DistributedOptimizer(kind(groups, **settings), model, strategy="auto", **options)


def main(mode, folder, events):
    events, first = json.loads(events), p3.torch.resume().round
    rank, here = p3.torch.rank(), session.current()
    model = model_of(mode)
    optimizer = optimizer_of(mode, model)

    def batch(step):
        generator = torch.Generator().manual_seed(100 * step + rank)
        return torch.randn(8, 20, generator=generator), torch.randn(8, 30, generator=generator)

    def happen(step):
        for at, what, *more in events:
            if at != step:
                continue
            if what == "change":
                optimizer.change_strategy(more[0])
            elif what == "propose" and here.is_first:
                optimizer._p3._plans.propose(strategies.given(more[0]))
            elif what == "die" and rank == more[0]:
                optimizer.synchronize()
                os.kill(os.getpid(), signal.SIGKILL)
            elif what == "enter":
                if not os.path.exists(os.path.join(folder, "go")):
                    print("worker %d waits for go" % rank, flush=True)
                while not os.path.exists(os.path.join(folder, "go")):
                    time.sleep(0.01)
                p3.torch.members(step, {})

    ends = next((more[0][rank] for _, what, *more in events if what == "join"), STEPS)
    for step in range(first, ends):
        happen(step)
        optimizer.zero_grad()
        if mode == "weighed":
            optimizer.weigh(rank + 1)
        if mode == "frozen" and step == STEPS // 2:
            model[0].requires_grad_(True)
        inputs, targets = batch(step)
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        if [step, "die before", rank] in events:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        p3.torch.snapshot(step + 1, {})
    if any(what == "join" for _, what, *_ in events):
        optimizer.join()
    optimizer.synchronize()
    torch.save(model.state_dict(), os.path.join(folder, "%d.pt" % rank))
    if here.is_first:
        keys = here.keys.agreed.items()
        print(json.dumps({"servers": {name: agreed.plan.servers for (_, name), agreed in keys}}), flush=True)
    p3.torch.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
