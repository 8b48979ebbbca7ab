"""p3.torch's jobs with low-rank gradients, a function for each: torch_lowrank.py NAME ARGUMENT...

A reference computes all workers' gradients here, and what comes of them in float64.
"""

import sys

import numpy as np
import torch
from low_rank import LowRankReference
from torch import nn
from torch_steps import losses_behind

import p3.torch
from p3 import codecs
from p3.torch.start import job

RANK, SIZE = p3.torch.rank(), p3.torch.size()
LOW_RANK = {"type": "lowrank", "rank": 2}
MAX_NORM = 0.05
COMPRESSIONS = {
    "all": LOW_RANK,
    "function": lambda name, shape: LOW_RANK if name == "2.weight" else None,
    "grouped": None,  # but the first layer is of a group that has it
    "beside bf16": lambda name, shape: LOW_RANK if name == "2.weight" else {"up": "bf16", "down": None},
}
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.5),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-3),
    "adamax": lambda parameters: torch.optim.Adamax(parameters, lr=0.01, eps=1e-3),
}


def made():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 50), nn.Tanh(), nn.Linear(50, 30), nn.Tanh(), nn.Linear(30, 3))


def is_low_rank(way, name):
    return name.endswith("weight") and name in {"all": name, "grouped": "0.weight"}.get(way, "2.weight")


def trained_of(model, way):
    if way != "grouped":
        return model.parameters()
    rest = [*model[2].parameters(), *model[4].parameters()]
    return [{"params": model[0].parameters(), "compression": LOW_RANK}, {"params": rest}]


def loss_of(model, worker, step):
    generator = torch.Generator().manual_seed(100 * worker + step)
    x = torch.randn(8, 6, generator=generator)
    return (model(x) - x[:, :3].sin()).square().mean()


class Reference:
    def __init__(self, way, make, options):
        self.model, self.clips = made(), "clipped" in options
        self.plain = make(list(self.model.parameters()))
        self.low_rank = {name: LowRankReference(tuple(one.shape), LOW_RANK["rank"], SIZE)
                         for name, one in self.model.named_parameters() if is_low_rank(way, name)}  # fmt: skip

    def step(self, workers, step):
        """Of those workers; the mean is over all."""
        gradients = {name: [None] * SIZE for name, _ in self.model.named_parameters()}
        for worker in workers:
            self.model.zero_grad()
            loss_of(self.model, worker, step).backward()
            for name, one in self.model.named_parameters():
                gradients[name][worker] = one.grad.numpy().copy()
        for name, one in self.model.named_parameters():
            parts = gradients[name]
            total = self.low_rank[name].sum(parts) if name in self.low_rank else sum(
                part.astype("float64") for part in parts if part is not None)  # fmt: skip
            one.grad = torch.from_numpy((total / SIZE).astype("float32")).view_as(one)
        if self.clips:
            nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.plain.step()

    def require_same(self, model, where, tolerance=5e-6):
        for (name, one), expected in zip(model.named_parameters(), self.model.parameters()):
            difference = (one - expected).abs().max().item()
            assert difference < tolerance, (where, name, difference)


def distributed(way, optimizer, options=()):
    model = made()
    given = {"max_grad_norm": MAX_NORM} if "clipped" in options else {}
    plain = OPTIMIZERS[optimizer](trained_of(model, way))
    trained = p3.torch.DistributedOptimizer(
        plain, model, compression=COMPRESSIONS[way], synchronous="synchronous" in options, **given
    )
    for parameter in trained._p3.parameters:
        assert (parameter.key.rank == 2) == is_low_rank(way, parameter.name), parameter.key
    return model, trained


def follows(way, optimizer, *options):
    """As the reference says, after each step. `options`: clipped, synchronous."""
    model, trained = distributed(way, optimizer, options)
    reference = Reference(way, OPTIMIZERS[optimizer], options)
    tolerance = 5e-6 if way != "beside bf16" else 1e-2
    for step in range(6):
        trained.zero_grad()
        loss_of(model, RANK, step).backward()
        trained.step()
        reference.step(range(SIZE), step)
        if not options:  # else the weights are there, and this would be the next step's
            trained.synchronize()
        reference.require_same(model, step, tolerance)
    trained.release()
    loss_of(model, RANK, 7).backward()


def uneven(*options):
    """The last worker has no batches for the last steps, and keeps what it has left out."""
    model, trained = distributed("all", "adamw", options)
    reference = Reference("all", OPTIMIZERS["adamw"], options)
    for step in range(6):
        workers = range(SIZE - 1) if step >= 3 else range(SIZE)
        reference.step(workers, step)
        if RANK in workers:
            trained.zero_grad()
            loss_of(model, RANK, step).backward()
            trained.step()
    trained.join()
    trained.synchronize()
    reference.require_same(model, "joined")


def rest():
    """A step, and a snapshot; resumed by another number of workers it has what is owed to the mean, and the basis."""
    round, _ = p3.torch.resume()
    model, trained = distributed("all", "sgd")
    loss_of(model, RANK, round).backward()
    session = job.current()
    saved = session.saved
    trained._p3._begin()
    for parameter in trained._p3.parameters:
        elements = parameter.tensor.numel()
        if round == 0 or not parameter.key.rank:
            continue
        parts = [saved._part(rank)["residuals"] for rank in range(saved.source.workers)]
        then = [next(left for _, name, left in of_rank if name == parameter.name) for of_rank in parts]
        state = session.low_rank.state(parameter.key)
        np.testing.assert_array_equal(state[:elements], sum(one[:elements] for one in then) * np.float32(SIZE / 2))
        np.testing.assert_array_equal(state[elements:], then[0][elements:])
        assert state[:elements].any()
    trained.step()
    p3.torch.snapshot(round + 1)


def learns():
    """What is lost after many steps is close to what plain training has."""
    first, losses = losses_behind(made, OPTIMIZERS["adamw"], loss_of, (None, LOW_RANK))
    print("worker %d: plain %.6f low rank %.6f" % (RANK, *losses))
    assert losses[0] < first / 5 and losses[1] < first / 5, (first, losses)


def counts():
    """What a step sends is what the formula says, and what plain parameters take."""
    from p3.placement import FRAME_BYTES

    model, trained = distributed("all", "sgd")
    session = job.current()

    def take(step):
        trained.zero_grad()
        loss_of(model, RANK, step).backward()
        trained.step()
        trained.synchronize()
        return session.counters()["bytes_sent"]

    take(0)
    before = take(1)
    sent = take(2) - before
    shapes = [shape for one in model.parameters()
              for shape in codecs.in_place_of(one.shape, codecs.rank_of(LOW_RANK, one.shape))]  # fmt: skip
    expected = sum(4 * int(np.prod(shape)) + FRAME_BYTES for shape in shapes)
    assert 0 <= sent - expected < 1000, (sent, expected)  # the count of steps, and heartbeats


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
    print("worker %d is right" % RANK, flush=True)
