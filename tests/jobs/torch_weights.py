"""Batches of different sizes, and weigh(): torch_weights.py [--staged] NAME..., one training for each.

Each worker has its own part of every batch, which is as large as SIZES says. The weights must become those of plain
torch in this process, on the whole batches; where compression is in between, those of losses that are scaled instead.
"""

import contextlib
import sys

import torch
from torch import nn

import p3.torch
from p3.torch.parameters import arrays

F = nn.functional
BATCH = 12
IGNORED = -100  # a label, by cross_entropy
SIZES = {
    1: [[BATCH]] * 6,
    2: [[3, 9], [1, 11], [6, 6], [0, 12], [7, 5], [12, 0]],
    3: [[3, 8, 1], [1, 1, 10], [4, 4, 4], [0, 12, 0], [7, 3, 2], [5, 0, 7]],
    4: [[6, 3, 1.5, 1.5], [3, 3, 3, 3], [1.5, 1.5, 6, 3]],  # whose shares of the mean are powers of two
}


class Training:
    """AdamW on the servers. Subclasses say what is special."""

    options, dtype, tolerance = {}, torch.float32, 1e-6
    padding = float("nan")

    def __init__(self, rank, size):
        """`rank` None: all workers' parts, in plain torch."""
        self.rank, self.size, self.steps, self.losses = rank, size, 0, []
        torch.manual_seed(5)
        self.model = self.make_model().to(self.dtype)
        self.optimizer = self.make_optimizer()
        if rank is not None:
            self.optimizer = p3.torch.DistributedOptimizer(self.optimizer, self.model, **self.options)

    def make_model(self):
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 5))

    def make_optimizer(self):
        return torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def data(self):
        return torch.randn(BATCH, 6).to(self.dtype), torch.randint(0, 5, (BATCH,))

    def loss(self, x, y):
        return F.cross_entropy(self.model(x), y)

    def sizes(self, step):
        """Of the workers' parts."""
        return SIZES[self.size][step]

    def part(self, step, x, padding):
        """Of this worker: without samples it has one that is padding, whose gradients are no numbers."""
        sizes = [int(one) for one in self.sizes(step)]
        if self.rank is None:
            return x[: sum(sizes)]
        begin = sum(sizes[: self.rank])
        own = x[begin : begin + sizes[self.rank]]
        return own if len(own) else torch.full_like(x[:1], padding)

    def weigh(self, step):
        if self.rank is not None:
            self.optimizer.weigh(self.sizes(step)[self.rank])

    def step(self, number, x, y):
        self.optimizer.zero_grad()
        self.weigh(number)
        self.loss(x, y).backward()
        self.optimizer.step()

    def train(self):
        torch.manual_seed(7)
        for number in range(len(SIZES[self.size])):
            x, y = self.data()
            self.step(number, self.part(number, x, self.padding), self.part(number, y, IGNORED))
        if self.rank is not None:
            self.optimizer.synchronize()
        return [tensor.detach().clone() for tensor in self.model.parameters()]

    def read(self):
        """What else must be that of the whole batch."""
        return []


class on_workers(Training):
    def make_optimizer(self):
        return torch.optim.Adamax(self.model.parameters(), lr=0.01)


class synchronous(Training):
    options = {"synchronous": True}


class clipped(Training):
    options = {"max_grad_norm": 0.3}

    def step(self, number, x, y):
        if self.rank is not None:
            return super().step(number, x, y)
        self.optimizer.zero_grad()
        self.loss(x, y).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.3)
        self.optimizer.step()


class closure(Training):
    weighs_in_closure = False

    def step(self, number, x, y):
        def compute():
            self.optimizer.zero_grad()
            if self.weighs_in_closure:
                self.weigh(number)
            loss = self.loss(x, y)
            loss.backward()
            return loss

        if not self.weighs_in_closure:
            self.weigh(number)
        self.losses.append(self.optimizer.step(compute).detach())


class lbfgs(closure):
    """Which looks at the loss as well."""

    dtype, tolerance = torch.float64, 1e-9

    def read(self):
        return self.losses

    def make_optimizer(self):
        return torch.optim.LBFGS(self.model.parameters(), lr=0.1, max_iter=4, line_search_fn="strong_wolfe")


class lbfgs_in_closure(lbfgs):
    weighs_in_closure = True


class half(Training):
    dtype, tolerance = torch.bfloat16, 3e-2

    def make_optimizer(self):
        return torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)


class sparse(Training):
    padding = 0

    def make_model(self):
        return nn.ModuleDict({"words": nn.Embedding(50, 8, sparse=True), "head": nn.Linear(8, 5)})

    def make_optimizer(self):
        return torch.optim.SGD(self.model.parameters(), lr=0.5)

    def data(self):
        return torch.randint(0, 50, (BATCH, 3)), torch.randint(0, 5, (BATCH,))

    def loss(self, x, y):
        return F.cross_entropy(self.model["head"](torch.tanh(self.model["words"](x).mean(1))), y)


class factored(Training):
    tolerance = 1e-5

    def make_model(self):
        model = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 5))
        return model if self.rank is None else p3.torch.factors(model, batch_size=BATCH, route="factors")

    def make_optimizer(self):
        return torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)


class accumulated(Training):
    """Two backward passes; the number is that of both."""

    def step(self, number, x, y):
        self.optimizer.zero_grad()
        for is_last, (one, other) in enumerate([(x[::2], y[::2]), (x[1::2], y[1::2])]):
            with contextlib.nullcontext() if is_last or self.rank is None else self.optimizer.no_sync():
                if is_last:
                    self.weigh(number)
                if len(one):  # else there is padding alone
                    (self.loss(one, other) * len(one) / len(x)).backward()
        self.optimizer.step()


class scaled(Training):
    """One worker's gradients overflow in step 2, which all leave out."""

    options = {"synchronous": True}

    def step(self, number, x, y):
        self.scaler = getattr(self, "scaler", None) or torch.amp.GradScaler("cpu", init_scale=1024.0)
        self.optimizer.zero_grad()
        self.weigh(number)
        loss = self.loss(x, y)
        if number == 2 and self.rank in (0, None):
            loss = loss * float("inf")
        self.scaler.scale(loss).backward()
        if self.rank is not None:
            self.optimizer.synchronize()
        self.scaler.step(self.optimizer)
        self.scaler.update()


class empty(Training):
    """In step 2 nobody has a sample: it is like one without gradients, of which torch changes nothing."""

    def step(self, number, x, y):
        if number != 2:
            return super().step(number, x, y)
        self.optimizer.zero_grad()
        if self.rank is not None:
            self.optimizer.weigh(0)
            self.loss(x, y).backward()
        self.optimizer.step()


class empty_synchronous(empty):
    options = {"synchronous": True}


class zeroed(Training):
    """A layer that is used in the first step alone: from then on its gradient is zero, and momentum goes on."""

    def make_optimizer(self):
        return torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)

    def loss(self, x, y):
        hidden = torch.tanh(self.model[0](x))
        return F.cross_entropy(self.model[4](self.model[2](hidden) if self.steps == 0 else hidden[:, :8]), y)

    def step(self, number, x, y):
        self.optimizer.zero_grad(set_to_none=False)
        self.weigh(number)
        self.loss(x, y).backward()
        self.optimizer.step()
        self.steps += 1


class seldom(Training):
    """In every other step all gradients weigh the same."""

    def weigh(self, step):
        if len(set(self.sizes(step))) > 1:
            super().weigh(step)


class joined(Training):
    """The last worker has three batches; then the others' are the whole."""

    def sizes(self, step):
        return super().sizes(step) if step < 3 else [*range(1, self.size), 0]

    def train(self):
        torch.manual_seed(7)
        for number in range(5):
            x, y = self.data()
            if number < 3 or self.rank is None or self.rank < self.size - 1:
                self.step(number, self.part(number, x, self.padding), self.part(number, y, IGNORED))
        if self.rank is not None:
            self.optimizer.join()
        return [tensor.detach().clone() for tensor in self.model.parameters()]


class joined_synchronous(joined):
    options = {"synchronous": True}


class compressed(Training):
    """By whatever keeps what it leaves out; the reference is a job that scales its losses."""

    def make_optimizer(self):
        return torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def reference(self):
        other = type(self)(self.rank, self.size)
        other.weigh = lambda step: None
        other.loss = lambda x, y: Training.loss(other, x, y) * self.factors[other.steps]
        return other

    def step(self, number, x, y):
        self.steps = number
        super().step(number, x, y)

    @property
    def factors(self):
        return [sizes[self.rank] * self.size / sum(sizes) for sizes in SIZES[self.size]]


class in_two_bits(compressed):
    options = {"compression": {"type": "2bit", "threshold": 0.01}}


class by_dgc(compressed):
    options = {"compression": {"type": "dgc", "ratio": 0.2}}


def close(ones, others, tolerance):
    for one, other in zip(ones, others):
        scale = max(other.abs().max().item(), 1e-3)
        assert (one.double() - other.double()).abs().max().item() <= tolerance * scale, (one, other)


def main(*names):
    if names[0] == "--staged":
        arrays.DEVICES.add("cpu")
        names = names[1:]
    rank, size = p3.torch.rank(), p3.torch.size()
    for name in names:
        training = globals()[name](rank, size)
        reference = training.reference() if isinstance(training, compressed) else globals()[name](None, size)
        expected, became = reference.train(), training.train()
        if isinstance(training, compressed):
            assert all(torch.equal(one, other) for one, other in zip(became, expected)), name
        else:
            close(became + training.read(), expected + reference.read(), training.tolerance)
            assert not isinstance(training, factored) or training.model[2].weight._p3_layer.has_factors
        print("worker %d: %s is as one process" % (rank, name), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
