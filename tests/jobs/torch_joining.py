"""torch_joining.py MODE FOLDER: workers of PyTorch of whom ranks 0 and 2 die behind step 4; others take their places at
step 8, once FOLDER has a file "go". With P3_ON_WORKER_LOSS=continue. Leaves the weights of each worker in FOLDER.
torch_joining.py MODE FOLDER FIRST LAST [STEP]: so many begin, nobody dies, and at step 8, or STEP, others join until
there are so many; with STEP, behind a load of the optimizer's states.

MODE is one of MODES. alone(MODE, there): the same in one process, without P3: on the joined batch of who is `there` at
each step, losing() or growing().
"""

import os
import signal
import sys
import time

import torch
import torch_departing

STEPS, WORKERS = 14, 4
GONE, DIE_AT, JOIN_AT = (0, 2), 4, 8
MODES = {
    **torch_departing.MODES,
    "both ways": (torch.optim.SGD, {"lr": 0.1}, {"compression": {"up": "int8", "down": "int8"}}),
    "here": (torch.optim.Adamax, {"lr": 0.01}, {}),
    "adam clipping": (torch.optim.Adam, {"lr": 0.01}, {"max_grad_norm": 0.1}),
}


class Model(torch.nn.Module):
    """With weights that are not trained, and a buffer."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.base = torch.nn.Linear(20, 30).requires_grad_(False)
        self.hidden, self.head = torch.nn.Linear(30, 100), torch.nn.Linear(100, 5)
        self.register_buffer("scale", torch.full((), 1.0 + 1 / seed))

    def forward(self, inputs):
        return self.head(torch.tanh(self.hidden(torch.tanh(self.base(inputs))))) * self.scale


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(8, 20, generator=generator), torch.randn(8, 5, generator=generator)


def optimizer_of(mode, model):
    kind, settings, options = MODES[mode]
    optimizer = kind([one for one in model.parameters() if one.requires_grad], **settings)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.95**step), options


def losing(step):
    return [rank for rank in range(WORKERS) if rank not in GONE or not DIE_AT <= step < JOIN_AT]


def states_of(mode):
    """Of the optimizer, which has trained another model."""
    model = Model(3)
    optimizer, _, _ = optimizer_of(mode, model)
    inputs, targets = batch(0, STEPS)
    torch.nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()
    return optimizer.state_dict()


def growing(first, last, join_at=JOIN_AT):
    return lambda step: list(range(first if step < join_at else last))


def received_bytes():
    import p3.torch

    stats = p3.torch.stats()
    return stats["p3/received_bytes"] + stats["p3/local_received_bytes"]


def train(mode, folder, *numbers):
    import p3.torch

    there = growing(*map(int, numbers)) if numbers else losing
    join_at = int(numbers[2]) if numbers[2:] else JOIN_AT
    first, state = p3.torch.resume()
    rank = p3.torch.rank()
    model = Model(1 if state is None else 2)  # other weights, where they are to come from the others
    optimizer, schedule, options = optimizer_of(mode, model)
    before = received_bytes()
    optimizer = p3.torch.DistributedOptimizer(optimizer, model, **options)
    if state is not None and mode == "here":  # the servers have sums alone, which it does not need
        assert received_bytes() - before < model.hidden.weight.nbytes, received_bytes() - before
    if state is not None:
        schedule.load_state_dict(state["schedule"])
    for step in range(first, STEPS):
        if step == DIE_AT:
            optimizer.synchronize()  # so that all that it has pushed has landed
            p3.torch.barrier()
            if rank not in there(DIE_AT):
                os.kill(os.getpid(), signal.SIGKILL)
            p3.torch.barrier()
        if step == join_at and state is None:
            print("worker %d waits for go" % rank, flush=True)
            while not os.path.exists(os.path.join(folder, "go")):
                time.sleep(0.01)
            if numbers[2:]:
                optimizer.load_state_dict(states_of(mode))
        if step % 4 == 0:
            members = p3.torch.members(step, {"schedule": schedule.state_dict()})
            print("worker %d at %d knows %s" % (rank, step, list(members)), flush=True)
            assert list(members) == there(step), (step, members)
        inputs, targets = batch(rank, step)
        if mode == "weighed":
            optimizer.weigh(rank + 1)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        schedule.step()
        if step % 3 == 0:
            here = there(step)
            assert p3.torch.all_reduce(torch.tensor([1.0, rank])).tolist() == [len(here), sum(here)], step
            said = p3.torch.all_gather_object(rank)
            ranks = range(len(here) if numbers else WORKERS)
            assert said == [other if other in here else None for other in ranks], (step, said)
            assert p3.torch.broadcast_object(rank, here[-1]) == here[-1], step
    optimizer.synchronize()
    torch.save(model.state_dict(), os.path.join(folder, "%d.pt" % rank))


def alone(mode, there, loads_at=None):
    model = Model(1)
    optimizer, schedule, options = optimizer_of(mode, model)
    for step in range(STEPS):
        if step == loads_at:
            optimizer.load_state_dict(states_of(mode))
        here = there(step)
        shares = [rank + 1 if mode == "weighed" else 1 for rank in here]
        optimizer.zero_grad()
        for rank, share in zip(here, shares):
            inputs, targets = batch(rank, step)
            (torch.nn.functional.mse_loss(model(inputs), targets) * share / sum(shares)).backward()
        if "max_grad_norm" in options:
            torch.nn.utils.clip_grad_norm_(model.parameters(), options["max_grad_norm"])
        optimizer.step()
        schedule.step()
    return model.state_dict()


if __name__ == "__main__":
    train(*sys.argv[1:])
