"""Trains small torch models: torch_training.py FOLDER p3|ddp|alone[-cuda|-staged|-late] CASE...

`p3`: as a worker of a job of P3's. `ddp`: with DistributedDataParallel on Gloo. `alone`: one process, on the joined
batch, with torch only. On the CPU; with `-cuda` on a GPU; with `-staged` on the CPU as if that were a GPU, and with
`-late` as if its copies were late. Writes CASE-MODE-RANK.pt: the state_dicts of model and optimizer, and the losses.
"""

import copy
import functools
import os
import random
import sys

import torch
from torch import nn

STEPS, BATCH = 6, 8


class Case:
    """One training; `batch` are rows of this worker's share. Subclasses say what is special."""

    dtype = torch.float32
    options = {}  # of DistributedOptimizer
    tolerance = 1e-6
    has_ddp = False  # that must give the same
    device = "cpu"

    def model(self):
        return nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 17), nn.Tanh(), nn.Linear(17, 5))

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def data(self):
        return torch.randn(STEPS, BATCH, 12, dtype=self.dtype), torch.randint(0, 5, (STEPS, BATCH))

    def loss(self, model, x, y):
        return nn.functional.cross_entropy(model(x), y)

    def prepare(self, run):
        """Before the first step, the optimizer being distributed if it is to be."""

    def step(self, run, x, y):
        run.optimizer.zero_grad()
        loss = self.loss(run.model, x, y)
        loss.backward()
        run.optimizer.step()
        return loss


CASES = {}


def case(of):
    CASES[of.__name__] = of
    return of


def _with_optimizer(name, make, **fields):
    CASES[name] = type(name, (Case,), {"optimizer": lambda self, model: make(model.parameters()), **fields})


_optim = torch.optim
_with_optimizer("sgd", lambda p: _optim.SGD(p, lr=0.1), has_ddp=True)
_moving = dict(lr=0.1, momentum=0.9, weight_decay=0.01)
_with_optimizer("momentum", lambda p: _optim.SGD(p, dampening=0.3, **_moving), has_ddp=True)
_with_optimizer("nesterov", lambda p: _optim.SGD(p, nesterov=True, **_moving), has_ddp=True)
_with_optimizer("maximize", lambda p: _optim.SGD(p, lr=0.01, momentum=0.9, maximize=True))
_with_optimizer("adam", lambda p: _optim.Adam(p, lr=0.01, weight_decay=0.01), has_ddp=True)
_with_optimizer("adam_amsgrad", lambda p: _optim.Adam(p, lr=0.01, amsgrad=True))
_with_optimizer("adamw", lambda p: _optim.AdamW(p, lr=0.01, weight_decay=0.1), has_ddp=True)
_with_optimizer("adamw_amsgrad", lambda p: _optim.AdamW(p, lr=0.01, weight_decay=0.1, amsgrad=True))
_adagrad = dict(lr=0.05, lr_decay=0.1, initial_accumulator_value=0.1, weight_decay=0.01)
_with_optimizer("adagrad", lambda p: _optim.Adagrad(p, **_adagrad))
# Divides by the root of a mean of squares that is small at first: what rounding changes in a sum, it makes larger.
_with_optimizer("rmsprop", lambda p: _optim.RMSprop(p, lr=0.01, weight_decay=0.01), tolerance=1e-5)
_with_optimizer("rmsprop_centered", lambda p: _optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True), tolerance=1e-5)
_with_optimizer("adamax", lambda p: _optim.Adamax(p, lr=0.01))  # the workers update
_with_optimizer("nadam", lambda p: _optim.NAdam(p, lr=0.01))
_with_optimizer("synchronous", lambda p: _optim.AdamW(p, lr=0.01), options={"synchronous": True})
_with_optimizer("double", lambda p: _optim.AdamW(p, lr=0.01), dtype=torch.float64, tolerance=1e-13)


class Halving(torch.optim.Optimizer):
    """Of the user's own: looks at all gradients at once."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.5})

    @torch.no_grad()
    def step(self, closure=None):
        tensors = [tensor for group in self.param_groups for tensor in group["params"] if tensor.grad is not None]
        norm = sum(tensor.grad.square().sum() for tensor in tensors).sqrt()
        for tensor in tensors:
            tensor.add_(tensor.grad / norm, alpha=-self.param_groups[0]["lr"])


_with_optimizer("own_optimizer", Halving)


class Lion(torch.optim.Optimizer):
    """As a package of somebody else's may have it: each parameter by itself."""

    def __init__(self, parameters, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(parameters, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            first, second = group["betas"]
            for tensor in group["params"]:
                if tensor.grad is None:
                    continue
                average = self.state[tensor].setdefault("average", torch.zeros_like(tensor))
                tensor.mul_(1 - group["lr"] * group["weight_decay"])
                tensor.add_(average.lerp(tensor.grad, 1 - first).sign_(), alpha=-group["lr"])
                average.lerp_(tensor.grad, 1 - second)


# A sign that rounding turns moves a weight by twice the rate: in float64 none does.
_lion = lambda p: Lion(p, lr=0.01, weight_decay=0.1)  # noqa: E731
_with_optimizer("lion", _lion, options={"independent": True}, dtype=torch.float64)


@case
class muon(Case):
    """Matrices by Muon, which computes in bfloat16; the rest by a declared optimizer."""

    tolerance = 1e-3

    def optimizer(self, model):
        self.rest = Lion([tensor for tensor in model.parameters() if tensor.dim() < 2], lr=0.01)
        return torch.optim.Muon([tensor for tensor in model.parameters() if tensor.dim() == 2], lr=0.02)

    def prepare(self, run):
        if run.mode == "p3":
            import p3.torch

            p3.torch.DistributedOptimizer(self.rest, run.model, independent=True)

    def step(self, run, x, y):
        self.rest.zero_grad()
        loss = super().step(run, x, y)
        self.rest.step()
        return loss


if not hasattr(torch.optim, "Muon"):
    del CASES["muon"]  # before 2.9


@case
class half(Case):
    dtype, tolerance = torch.float16, 2e-3  # its states are float32 on the servers
    optimizer = lambda self, model: _optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # noqa: E731


@case
class brain(half):
    dtype, tolerance = torch.bfloat16, 2e-2


@case
class lbfgs(Case):
    dtype, tolerance = torch.float64, 1e-9

    def optimizer(self, model):
        return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, line_search_fn="strong_wolfe")

    def step(self, run, x, y):
        def closure():
            run.optimizer.zero_grad()
            loss = self.loss(run.model, x, y)
            loss.backward()
            return loss

        return run.optimizer.step(closure)


@case
class closure(lbfgs):
    dtype, tolerance = torch.float32, 1e-6
    optimizer = Case.optimizer


@case
class groups(Case):
    """Per-group settings, a frozen parameter, and a scheduler that was made before the optimizer became distributed."""

    def optimizer(self, model):
        model[0].bias.requires_grad_(False)
        first, rest = model[0], [*model[2].parameters(), *model[4].parameters()]
        own = {"params": first.parameters(), "lr": 0.02, "momentum": 0.5, "weight_decay": 0.1}
        optimizer = torch.optim.SGD([own, {"params": rest}], lr=0.1, momentum=0.9)
        self.before = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return optimizer

    def prepare(self, run):
        self.after = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 1 / (1 + step))

    def step(self, run, x, y):
        loss = super().step(run, x, y)
        self.before.step()
        self.after.step()
        return loss


def _in_two_groups(make):
    """Weights and biases."""

    def made(self, model):
        weights = [tensor for tensor in model.parameters() if tensor.dim() > 1]
        return make([{"params": weights}, {"params": [one for one in model.parameters() if one.dim() <= 1]}])

    return made


def _cycling(name, make, cycle):
    """The schedule changes momentum or betas in each step."""

    def step(self, run, x, y):
        if run.steps == 0:
            self.schedule = cycle(run.optimizer)
        loss = Case.step(self, run, x, y)
        self.schedule.step()
        return loss

    CASES[name] = type(name, (Case,), {"optimizer": _in_two_groups(make), "step": step, "has_ddp": True})


_schedulers = torch.optim.lr_scheduler
_one_cycle = lambda o: _schedulers.OneCycleLR(o, max_lr=0.1, total_steps=STEPS + 1)  # noqa: E731
_cycling("one_cycle", lambda p: _optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True), _one_cycle)
_cycling("one_cycle_adamw", lambda p: _optim.AdamW(p, lr=0.01, weight_decay=0.1),
         lambda o: _schedulers.OneCycleLR(o, max_lr=0.02, total_steps=STEPS + 1))  # fmt: skip
_cycling("cyclic", lambda p: _optim.SGD(p, lr=0.1, momentum=0.9),
         lambda o: _schedulers.CyclicLR(o, 0.01, 0.1, 2, base_momentum=0.0))  # fmt: skip


def _changing(name, make, values, of=Case, **fields):
    """The script sets numbers of each group at random steps, each to one of those values."""

    def step(self, run, x, y):
        random_of_step = random.Random(100 * run.steps)  # the same on all workers
        for group in run.optimizer.param_groups * (run.steps > 0):
            for field, choices in values.items():
                if random_of_step.random() < 0.5:
                    group[field] = random_of_step.choice(choices)
        return Case.step(self, run, x, y)

    CASES[name] = type(name, (of,), {"optimizer": _in_two_groups(make), "step": step, **fields})


_flags, _decays = (False, True), (0.0, 0.01, 0.1)
_changing("changing_sgd", lambda p: _optim.SGD(p, lr=0.02, momentum=0.9, dampening=0.2),
          dict(lr=(0.01, 0.03), momentum=(0.0, 0.5, 0.95), dampening=(0.0, 0.3), nesterov=_flags, maximize=_flags,
               weight_decay=_decays))  # fmt: skip
_betas = ((0.9, 0.999), [0.5, 0.9], (0.0, 0.99))
_of_adam = dict(lr=(0.003, 0.01), betas=_betas, eps=(1e-4, 1e-3), amsgrad=_flags, maximize=_flags, weight_decay=_decays)
_changing("changing_adam", lambda p: _optim.Adam(p, lr=0.01, eps=1e-4, amsgrad=True), _of_adam)
_changing("changing_adamw", lambda p: _optim.AdamW(p, lr=0.01, eps=1e-4, amsgrad=True), _of_adam)
_of_adagrad = dict(lr=(0.01, 0.05), eps=(1e-10, 1e-2), lr_decay=(0.0, 0.5))
_changing("changing_adagrad", lambda p: _optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
          dict(_of_adagrad, maximize=_flags, weight_decay=_decays))  # fmt: skip
_changing("changing_rmsprop", lambda p: _optim.RMSprop(p, lr=0.01, eps=1e-2, momentum=0.5, centered=True),
          dict(lr=(0.003, 0.01), alpha=(0.5, 0.99), eps=(1e-2, 1e-1), momentum=(0.0, 0.5, 0.9), centered=_flags,
               maximize=_flags, weight_decay=_decays), tolerance=1e-5)  # fmt: skip


@case
class thawed(Case):
    """A parameter that is frozen in the first steps."""

    def step(self, run, x, y):
        run.model[0].weight.requires_grad_(run.steps >= 2)
        return super().step(run, x, y)


class Shared(nn.Module):
    """Weights that two modules have, one that a module has which never runs, and one that nothing uses."""

    def __init__(self):
        super().__init__()
        self.inward = nn.Linear(12, 12)
        self.outward = nn.Linear(12, 12)
        self.outward.weight = self.inward.weight
        self.attention = nn.MultiheadAttention(12, 2, batch_first=True)
        self.head = nn.Linear(12, 5)
        self.unused = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(12))

    def forward(self, x):
        x = torch.tanh(self.inward(x)) * self.scale
        x = x + self.attention(x[None], x[None], x[None])[0][0]
        return self.head(torch.tanh(self.outward(self.inward(x))))


@case
class shared(Case):
    model = lambda self: Shared()  # noqa: E731

    def loss(self, model, x, y):  # attention mixes rows: each is a batch of its own
        return sum(super(shared, self).loss(model, one, of) for one, of in zip(x.split(2), y.split(2))) / (len(x) // 2)


@case
class other_method(Case):
    """Weights used by a method that is not forward, and from outside."""

    def model(self):
        model = super().model()
        model.extra = nn.Linear(12, 5)
        return model

    def loss(self, model, x, y):
        return super().loss(lambda x: model[4](model[3](model[2](model[1](model[0](x))))) + nn.functional.linear(
            x, model.extra.weight, model.extra.bias), x, y)

    def step(self, run, x, y):
        if run.mode == "p3":
            run.optimizer.synchronize()
        return super().step(run, x, y)


class TwoTowers(nn.Module):
    """Without a forward: a script calls its methods, which use parameters of its own."""

    def __init__(self):
        super().__init__()
        self.scale, self.bias = nn.Parameter(torch.ones(17)), nn.Parameter(torch.zeros(5))
        self.hidden, self.head, self.other = nn.Linear(12, 17), nn.Linear(17, 5), nn.Linear(12, 5)

    def encode(self, x):
        return torch.tanh(self.hidden(x)) * self.scale

    def classify(self, x):
        return self.head(self.encode(x)) + self.bias


@case
class rootless(Case):
    """No forward of the model ever runs, and another module is the first in every other step."""

    model = lambda self: TwoTowers()  # noqa: E731

    def loss(self, model, x, y):
        others = model.other(x) if self.step_number % 2 else 0.0
        return nn.functional.cross_entropy(model.classify(x) + others, y)

    def step(self, run, x, y):
        self.step_number = run.steps
        return super().step(run, x, y)


@case
class not_always(Case):
    """A layer that every other step leaves out, one that a worker leaves out alone, and one that runs twice."""

    def loss(self, model, x, y):
        hidden = model[1](model[0](x))
        if self.step_number % 2:
            hidden = hidden * 0.5
        else:
            hidden = torch.relu(hidden)
        out = model[2](hidden) + model[2](0.1 * hidden)
        return nn.functional.cross_entropy(model[4](out) if self.step_number % 3 else out[:, :5], y)

    def step(self, run, x, y):
        self.step_number = run.steps
        return super().step(run, x, y)


class Routed(nn.Module):
    """Layers that each half of a worker's batch uses in an order of its own, and never all of them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(5))
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        return torch.cat([self.head(self.route(part)) for part in x.split(2)])

    def route(self, x):
        order = x[0, :5].argsort()  # of the rows themselves, so that one process takes the same ways
        for number in order[:3]:
            x = x + torch.tanh(self.layers[number](x))
        return x


@case
class routed(Case):
    model = lambda self: Routed()  # noqa: E731
    optimizer = lambda self, model: _optim.AdamW(model.parameters(), lr=0.01)  # noqa: E731


@case
class accumulated(Case):
    """Two backward passes for each step, the first one without synchronisation."""

    def step(self, run, x, y):
        run.optimizer.zero_grad()
        for number, (part, of) in enumerate(zip(x.chunk(2), y.chunk(2))):
            with run.optimizer.no_sync() if run.mode == "p3" and not number else torch.enable_grad():
                (self.loss(run.model, part, of) / 2).backward()
        run.optimizer.step()


@case
class accumulated_plainly(Case):
    """The same without telling; in the last step there is only one."""

    def step(self, run, x, y):
        run.optimizer.zero_grad(set_to_none=run.steps % 2 == 0)
        for part, of in [(x, y)] if run.steps == STEPS - 1 else zip(x.chunk(2), y.chunk(2)):
            (self.loss(run.model, part, of) / 2).backward()
        run.optimizer.step()


@case
class zeroed(not_always):
    """What has no gradient in a step has one of zero, so momentum and decay go on."""

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)

    def step(self, run, x, y):
        self.step_number = run.steps
        (run.model if run.steps % 2 else run.optimizer).zero_grad(set_to_none=False)
        loss = self.loss(run.model, x, y)
        loss.backward()
        run.optimizer.step()
        return loss


@case
class touched(Case):
    """Weights read outside their modules, by references from before, and before these run; without a word to P3."""

    optimizer = lambda self, model: _optim.AdamW(model.parameters(), lr=0.01)  # noqa: E731

    def prepare(self, run):
        self.weights = list(run.model.parameters())

    def loss(self, model, x, y):
        penalty = sum(weight.square().sum() for weight in self.weights)
        tied = nn.functional.embedding(y, model[4].weight).sum()
        return super().loss(model, x, y) + 0.01 * penalty + 0.01 * tied / len(y)


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.first, self.twice, self.head = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 5)

    def forward(self, x):
        from torch.utils.checkpoint import checkpoint

        x = self.first(x)
        for _ in range(2):
            x = checkpoint(lambda x: torch.tanh(self.twice(x)), x, use_reentrant=self.reentrant)
        return self.head(x)


@case
class checkpointed(Case):
    model = lambda self: Checkpointed(False)  # noqa: E731


@case
class checkpointed_reentrantly(Case):
    model = lambda self: Checkpointed(True)  # noqa: E731


@case
class autocast(Case):
    tolerance = 2e-2  # products of bfloat16 are summed in another order

    def loss(self, model, x, y):
        with torch.autocast(self.device, dtype=torch.bfloat16):
            return super().loss(model, x, y)


@case
class scaled(Case):
    """GradScaler, with an overflow on one worker alone in step 3."""

    options = {"synchronous": True}

    def prepare(self, run):
        self.scaler = torch.amp.GradScaler(self.device, init_scale=1024.0)

    def step(self, run, x, y):
        run.optimizer.zero_grad()
        loss = self.loss(run.model, x, y)
        if run.steps == 3 and run.rank == 0:
            loss = loss * float("inf")
        self.scaler.scale(loss).backward()
        if run.mode == "p3":
            run.optimizer.synchronize()
        self.scaler.step(run.optimizer)
        self.scaler.update()


if not hasattr(torch.amp, "GradScaler"):
    del CASES["scaled"], CASES["half"]  # before 2.3 torch has neither that nor products of float16 on the CPU


@case
class looked_at(Case):
    """A forward pass and a state_dict between backward() and step() see the old weights, and no gradient is lost."""

    options = {"synchronous": True}

    def step(self, run, x, y):
        run.optimizer.zero_grad()
        loss = self.loss(run.model, x, y)
        loss.backward()
        with torch.no_grad():
            again = self.loss(run.model, x, y)
        assert again == loss and run.model.state_dict()["0.weight"].equal(run.model[0].weight)
        run.optimizer.step()


@case
class clipped(Case):
    options = {"max_grad_norm": 0.3}
    optimizer = lambda self, model: _optim.AdamW(model.parameters(), lr=0.01)  # noqa: E731

    def step(self, run, x, y):
        run.optimizer.zero_grad()
        self.loss(run.model, x, y).backward()
        if run.mode != "p3":
            nn.utils.clip_grad_norm_(run.model.parameters(), 0.3)
        run.optimizer.step()


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(50, 12, sparse=True), nn.Linear(12, 5)

    def forward(self, x):
        return self.head(torch.tanh(self.words(x).mean(1)))


@case
class sparse(Case):
    optimizer = lambda self, model: _optim.SGD(model.parameters(), lr=0.5)  # noqa: E731
    model = lambda self: Embedded()  # noqa: E731

    def data(self):
        return torch.randint(0, 50, (STEPS, BATCH, 3)), torch.randint(0, 5, (STEPS, BATCH))


@case
class sparse_adagrad(sparse):
    optimizer = lambda self, model: _optim.Adagrad(model.parameters(), lr=0.5)  # noqa: E731


_changing("sparse_changing", lambda p: _optim.Adagrad(p, lr=0.05), _of_adagrad, of=sparse)


@case
class sparse_adam(sparse):
    """SparseAdam for the rows, which the workers update, and another optimizer for the rest."""

    def optimizer(self, model):
        self.rest = torch.optim.AdamW(model.head.parameters(), lr=0.01)
        return torch.optim.SparseAdam(model.words.parameters(), lr=0.1)

    def prepare(self, run):
        if run.mode == "p3":
            import p3.torch

            p3.torch.DistributedOptimizer(self.rest, run.model)

    def step(self, run, x, y):
        self.rest.zero_grad()
        loss = super().step(run, x, y)
        self.rest.step()
        return loss


@case
class convolved(Case):
    """channels_last, group normalisation, and a transposed parameter."""

    def model(self):
        convolutions = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.GroupNorm(2, 4)]
        model = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(16, 5))
        model[5].weight = nn.Parameter(model[5].weight.detach().t().contiguous().t())
        return model.to(memory_format=torch.channels_last)

    def data(self):
        return torch.randn(STEPS, BATCH, 3, 6, 6), torch.randint(0, 5, (STEPS, BATCH))


@case
class adversarial(Case):
    """Two models, an optimizer each; the generator's loss goes through the discriminator."""

    def model(self):
        discriminator = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 1))
        return nn.ModuleDict({"g": nn.Linear(12, 12), "d": discriminator})

    def optimizer(self, model):
        self.other = torch.optim.Adam(model["d"].parameters(), lr=0.01)
        return torch.optim.Adam(model["g"].parameters(), lr=0.01)

    def prepare(self, run):
        if run.mode == "p3":
            import p3.torch

            p3.torch.DistributedOptimizer(self.other, run.model["d"])

    def step(self, run, x, y):
        generator, discriminator = run.model["g"], run.model["d"]
        discriminator.zero_grad()
        discriminator(x).mean().neg().backward()
        discriminator(generator(x).detach()).mean().backward()
        self.other.step()
        run.optimizer.zero_grad()
        for tensor in discriminator.parameters():
            tensor.requires_grad_(False)
        discriminator(generator(x)).square().mean().backward()
        for tensor in discriminator.parameters():
            tensor.requires_grad_(True)
        run.optimizer.step()


@case
class compiled(Case):
    """The whole model, by a backend that needs no compiler."""

    def prepare(self, run):
        run.model = torch.compile(run.model, backend="eager")

    def model(self):
        return super().model()


@case
class compiled_before(Case):
    def model(self):
        model = super().model()
        model[2] = torch.compile(model[2], backend="eager")
        return model


class Block(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.inner, self.scale = nn.Linear(inputs, outputs), nn.Parameter(torch.ones(outputs))

    def forward(self, x):
        return torch.tanh(self.inner(x)) * self.scale


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Block(12, 17), Block(17, 5)

    def forward(self, x):
        return self.second(self.first(x))


@case
class compiled_in_place(Case):
    """By module.compile(): a block of the model, in one graph that nothing may interrupt."""

    def model(self):
        model = Blocks()
        model.second.compile(backend="eager", fullgraph=True)
        return model


@case
class compiled_in_place_as_a_whole(Case):
    def model(self):
        model = Blocks()
        model.compile(backend="eager", fullgraph=True)
        return model


@case
class checkpoints(Case):
    """state_dict and load_state_dict of both in the middle, into a plain copy of torch's and back."""

    optimizer = lambda self, model: _optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)  # noqa: E731

    def step(self, run, x, y):
        if run.steps == 3:
            states = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
            plain = self.model().to(self.device)
            optimizer = self.optimizer(plain)
            plain.load_state_dict(states[0])
            optimizer.load_state_dict(copy.deepcopy(states[1]))  # the tensors themselves become its state
            super().step(Run("alone", self, plain, optimizer), x, y)  # torch takes what P3 gives
            run.model.load_state_dict(states[0])
            run.optimizer.load_state_dict(states[1])
        return super().step(run, x, y)


@case
class momentum_loaded(checkpoints):
    optimizer = Case.optimizer


@case
class put_back(Case):
    """Weights and the optimizer's state as they were at first, in the middle; and a broadcast after a step."""

    optimizer = lambda self, model: _optim.Adam(model.parameters(), lr=0.01)  # noqa: E731

    def prepare(self, run):
        self.first = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))

    def step(self, run, x, y):
        if run.steps == 2:
            run.model.load_state_dict(self.first[0])
            run.optimizer.load_state_dict(self.first[1])
        loss = super().step(run, x, y)
        if run.steps == 3 and run.mode == "p3":
            run.optimizer.broadcast()
        return loss


@case
class wrapped_late(Case):
    """The optimizer has taken steps before it becomes distributed."""

    def optimizer(self, model):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        x, y = torch.randn(4, 12), torch.randint(0, 5, (4,))
        self.loss(model, x.to(self.device), y.to(self.device)).backward()
        optimizer.step()
        return optimizer


class Run:
    def __init__(self, mode, of, model, optimizer, rank=0, size=1):
        self.mode, self.case, self.model, self.optimizer = mode, of, model, optimizer
        self.rank, self.size, self.steps, self.losses = rank, size, 0, []

    def train(self):
        torch.manual_seed(11)
        xs, ys = (tensor.to(self.case.device) for tensor in self.case.data())
        share = BATCH // self.size
        for x, y in zip(xs, ys):
            own = slice(self.rank * share, (self.rank + 1) * share)
            loss = self.case.step(self, x[own], y[own])
            self.losses.append(None if loss is None else loss.item())
            self.steps += 1


def start(mode, device, name):
    of = CASES[name]()
    of.device = device
    torch.manual_seed(5)
    model = of.model().to(device, of.dtype)
    if mode == "alone":
        run = Run(mode, of, model, of.optimizer(model))
    elif mode == "ddp":
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        optimizer = of.optimizer(model)
        run = Run(mode, of, nn.parallel.DistributedDataParallel(model), optimizer, rank, size)
    else:
        import p3.torch

        rank, size = p3.torch.rank(), p3.torch.size()
        optimizer = of.optimizer(model)
        if rank > 0:  # what rank 0 has, counts
            with torch.no_grad():
                for tensor in model.parameters():
                    tensor.mul_(2)
        optimizer = p3.torch.DistributedOptimizer(optimizer, model, **of.options)
        run = Run(mode, of, model, optimizer, rank, size)
    of.prepare(run)
    return run


def main(folder, where, *names):
    mode, _, device = where.partition("-")
    if device in ("staged", "late"):
        from p3.torch.device import staging
        from p3.torch.parameters import arrays

        arrays.DEVICES.add("cpu")
    if device == "late":
        import late_streams

        staging.staging_of = functools.lru_cache(maxsize=None)(late_streams.Staging)
    if mode == "ddp":
        torch.distributed.init_process_group("gloo")
    for name in names:
        run = start(mode, "cuda" if device == "cuda" else "cpu", name)
        run.train()
        model = getattr(run.model, "module", run.model)
        content = {"model": model.state_dict(), "optimizer": run.optimizer.state_dict(), "losses": run.losses}
        torch.save(content, os.path.join(folder, "%s-%s-%d.pt" % (name, where, run.rank)))
    if mode == "ddp":
        from p3.measure.workers import torch_store

        torch_store.leave(True)


if __name__ == "__main__":
    main(*sys.argv[1:])
