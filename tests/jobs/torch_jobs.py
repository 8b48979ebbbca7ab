"""Jobs of p3.torch, one function for each: torch_jobs.py [--staged] [--thread] NAME ARGUMENT..."""

import json
import math
import os
import signal
import sys
import threading
import time
import zlib

import torch
from torch import nn

import p3.torch
import this_job
from p3 import codecs
from p3.torch import states
from p3.torch.device import staging
from p3.torch.parameters import arrays
from p3.torch.start import job
from p3.worker.keys import Keys
from turns import Turns


def frozen_server(port):
    """The server is frozen while a step is taken: a wait for the network would last until P3_TIMEOUT_S."""
    model = nn.Linear(2000, 1000)  # 8 MB: more than rings and sockets hold
    optimizer = p3.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)

    def step():
        optimizer.zero_grad()
        model(torch.ones(2, 2000)).sum().backward()
        optimizer.step()

    step()
    step()  # from the second one on, gradients leave during backward
    model(torch.ones(1, 2000))
    before = model.weight.detach().clone()
    with this_job.frozen_server():
        step()
        print("the step returned while the server was frozen")
    model(torch.ones(1, 2000))
    assert torch.allclose(before - model.weight, torch.full_like(before, 0.2), atol=1e-5)
    print("and took effect afterwards")


def placed(*given):
    """With a strategy that each worker is given, in JSON, or with none; worker 0 prints the weights' digest, what each
    server holds, and which servers each key has. Two groups, frozen weights, P3_CHECK: a store of every kind."""
    servers_of, apply = {}, Keys.apply

    def noting(keys, key, agreed):
        servers_of[key.name] = agreed.plan.servers
        return apply(keys, key, agreed)

    Keys.apply = noting
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30), nn.Linear(30, 20), nn.Linear(20, 2))
    model[2].requires_grad_(False)
    rest = [*model[1].parameters(), *model[3].parameters()]
    groups = [{"params": model[0].parameters()}, {"params": rest, "lr": 0.2}]
    strategy = json.loads(given[p3.torch.rank()]) if given else None
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    p3.torch.DistributedOptimizer(optimizer, model, strategy=strategy)
    for step in range(3):
        optimizer.zero_grad()
        torch.manual_seed(10 * p3.torch.rank() + step)
        model(torch.randn(4, 40)).square().sum().backward()
        optimizer.step()
    optimizer.synchronize()
    weights = torch.cat([one.detach().reshape(-1) for one in model.parameters()]).numpy()
    held = [one["value_bytes"] for one in job.current().server_counters()]
    if p3.torch.rank() == 0:
        print(json.dumps({"digest": zlib.crc32(weights), "held": held, "servers": servers_of}))


def goes_ahead():
    """With staleness a step does not wait for the answer to the one before, though its server is frozen; nor does any
    value get lost that way."""
    model = nn.Sequential(nn.Linear(200, 100), nn.Linear(100, 2))
    first = model[0].weight.detach().clone()
    optimizer = p3.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), model, staleness=1)
    taken = 0

    def step():
        nonlocal taken
        optimizer.zero_grad()
        model.train()(torch.ones(1, 200))
        weights = list(model.parameters())
        sum(weight.sum() for weight in weights).backward()
        optimizer.step()
        taken += 1

    def lag():
        return round(2 * (model[0].weight - first + 0.5 * taken).mean().item(), 3)

    for _ in range(3):
        step()
    optimizer.synchronize()
    assert lag() == 0
    for later in (optimizer.synchronize, optimizer.broadcast, optimizer.state_dict, model.state_dict, optimizer.join,
                  lambda: model[0].weight.sum(), lambda: model.eval()(torch.ones(1, 200))):  # fmt: skip
        with this_job.frozen_server():
            step()
            model(torch.ones(1, 200))
            assert lag() == 1, lag()
            step()
            print("a step was taken beside its predecessor's answer")
        later()
        assert lag() == 0, (later, lag())
        optimizer.synchronize()  # some wait for one weight alone, and what the others lack a frozen server cannot bring
    with this_job.frozen_server():
        step()
        model(torch.ones(1, 200))
    optimizer.synchronize()
    assert lag() == 0, "a round that no step waits for any more"
    print("nothing was lost")


def keeps_gradients():
    """With staleness, of a script that keeps its gradients' memory: it may write there behind synchronize(); else the
    gradients of the step before may still have to leave, as they do here from a frozen server."""

    def add_to_them(step, _model, _kept):  # as torch does with gradients that are there
        step(reuses=True)

    def write_before_the_next_step(_step, _model, kept):
        kept[2].zero_()

    def write_past_torchs_notice(_step, model, kept):  # of what P3 does not look at in each step, but in the first ones
        model(torch.ones(1, 20))
        kept[2].numpy()[0, 0] = 0

    for write in (add_to_them, write_before_the_next_step, write_past_torchs_notice):
        model = nn.Sequential(nn.Linear(20, 10), nn.Linear(10, 2))
        first = [weight.detach().clone() for weight in model.parameters()]
        optimizer = p3.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), model, staleness=1)
        kept = []

        def step(reuses=False, model=model, optimizer=optimizer, kept=kept):
            model(torch.ones(1, 20))
            for weight, gradient in zip(model.parameters(), kept if reuses else ()):
                weight.grad = gradient.zero_()
            sum(weight.sum() for weight in list(model.parameters())).backward()
            kept[:] = [weight.grad for weight in model.parameters()]
            optimizer.step()

        step()
        optimizer.synchronize()
        step(reuses=True)
        optimizer.synchronize()
        assert all(torch.allclose(weight, before - 1) for weight, before in zip(model.parameters(), first))
        with this_job.frozen_server():
            step()
            write(step, model, kept)
        for call in (optimizer.synchronize, optimizer.broadcast, optimizer.join):
            try:
                call()
            except ValueError as error:
                print(error)
            else:
                raise AssertionError("%s: no error" % write.__name__)


class Clocks(nn.Module):
    """With a learning rate of 1, each worker's row of the weights counts its steps; of `seldom`, those that use it; and
    its two rows of the table those that use them: many use neither, and other workers' others."""

    EVERY = (2, 3)  # step

    def __init__(self, workers):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(workers, 20_000))
        self.seldom = nn.Parameter(torch.zeros(workers, 2))
        on_host = "cpu" not in arrays.DEVICES  # else rows are refused
        self.table = nn.Embedding.from_pretrained(torch.zeros(2 * workers, 30), freeze=False, sparse=on_host)

    def forward(self, rank, step, uses_seldom):
        table = self.table(torch.arange(2 * len(self.weight)))
        self.seen = [one.detach().clone() for one in (self.weight, self.seldom, table)]
        counted = self.weight[rank].sum() + (self.seldom[rank].sum() if uses_seldom else 0)
        ids = [2 * rank + place for place, every in enumerate(self.EVERY) if (step + rank) % every == 0]
        if ids:
            counted = counted + self.table(torch.tensor(ids)).sum()
        return -counted * len(self.weight)  # the gradient is divided by the number of workers


    def used(self, steps):
        """How often each worker has used each of its rows after so many steps, as the table has it."""
        ranks = torch.arange(len(self.weight))
        counts = [(ranks + steps) // every - ranks // every for every in self.EVERY]
        return torch.stack(counts, 1).reshape(-1, 1)


def apart(staleness, steps):
    """The condition of Ho et al.: in its step t a worker sees all pushes of all workers up to t - s - 1. P3 promises
    more of its own: all but perhaps the last. The server stands still now and then, so that answers come late."""
    rank, size = p3.torch.rank(), p3.torch.size()
    steps, staleness = int(steps), float(staleness)
    allowed = staleness if math.isinf(staleness) else int(staleness)
    model = Clocks(size)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = p3.torch.DistributedOptimizer(optimizer, model, staleness=allowed)
    random = torch.Generator().manual_seed(rank)
    goes_ahead = staleness > 0 and "cpu" not in arrays.DEVICES
    server, used, ahead = this_job.server(), [0], 0
    for step in range(steps):
        optimizer.zero_grad()
        uses_seldom = bool(torch.rand(1, generator=random) < 0.3)
        loss = model(rank, step + 1, uses_seldom)
        weight, seldom, table = model.seen
        own = int(weight[rank, 0])
        assert own == step or goes_ahead and own == step - 1, (step, own)
        assert (weight[rank] == own).all() and float(seldom[rank, 0]) in used[-2:], (step, used, weight, seldom)
        assert (weight >= step - allowed).all() and (weight <= steps).all(), (step, weight)
        ahead += own < step
        own = slice(2 * rank, 2 * rank + 2)
        assert (table[own] == model.used(step)[own]).all() and (table <= model.used(steps)).all(), (step, table)
        assert (table >= model.used(max(0, step - allowed))).all(), (step, table)
        loss.backward()
        time.sleep(float(torch.rand(1, generator=random)) * 0.02)  # so that now one worker is ahead, and now another
        if step % 3 == rank % 3:
            os.kill(server, signal.SIGSTOP)
            threading.Timer(0.02, os.kill, (server, signal.SIGCONT)).start()
        optimizer.step()
        used.append(used[-1] + uses_seldom)
    optimizer.join()
    assert (model.weight == steps).all() and (model.seldom[rank] == used[-1]).all(), model.weight
    assert (model.table.weight == model.used(steps)).all(), model.table.weight
    print("kept within its staleness, %d times beside an answer" % ahead)


class Given(nn.Module):
    """Whose gradients are what is given, whatever its weights are."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 30))
        self.table = nn.Embedding.from_pretrained(torch.ones(6, 2), freeze=False, sparse=True)

    def forward(self, worker, round):
        generator = torch.Generator().manual_seed(100 * worker + round)
        ids = torch.randperm(6, generator=generator)[: round % 4]
        rows = self.table(ids) * torch.randn(len(ids), 2, generator=generator)
        return (self.weight * torch.randn(30, generator=generator)).sum() + rows.sum()


def in_turn(rounds):
    """Workers with staleness push one after the other: one process that takes all their steps has the same weights."""
    rank, size, rounds = p3.torch.rank(), p3.torch.size(), int(rounds)
    kinds = {
        "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
        "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.5),
        "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, lr_decay=0.3),
    }
    for kind, make in kinds.items():
        model, reference = Given(), Given()
        if kind != "adagrad":  # the others' rows depend on rows that have no gradient
            model.table.sparse = reference.table.sparse = False
        optimizer, plain = make(model.parameters()), make(reference.parameters())
        p3.torch.DistributedOptimizer(optimizer, model, staleness=math.inf)
        for round in range(rounds):
            for worker in range(size):
                plain.zero_grad()
                (reference(worker, round) / size).backward()
                plain.step()
                if worker == rank:
                    optimizer.zero_grad()
                    model(worker, round).backward()
                    optimizer.step()
                    optimizer.synchronize()
                job.current().barrier()
        optimizer.join()
        for weight, expected in zip(model.parameters(), reference.parameters()):
            assert torch.allclose(weight, expected, rtol=1e-6, atol=1e-6), (kind, weight, expected)
        for state, expected in zip(optimizer.state_dict()["state"].values(), plain.state_dict()["state"].values()):
            assert set(state) == set(expected), kind
            for name, value in expected.items():
                assert torch.allclose(state[name], value, rtol=1e-5, atol=1e-6), (kind, name, state[name], value)
    print("worker %d is as one process" % rank)


def begins_with_states():
    """With staleness, of an optimizer that has taken steps: its state is on the servers before any worker pushes."""
    model, session = Given(), job.current()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model.table.sparse = False
    for round in range(3):
        optimizer.zero_grad()
        model(0, round).backward()
        optimizer.step()
    optimizer = p3.torch.DistributedOptimizer(optimizer, model, staleness=math.inf)
    session.barrier()

    def rounds():
        return sum(server["rounds"] for server in session.server_counters())

    def give_late(*arguments, give=states.give, before=rounds()):
        deadline = time.monotonic() + 0.5  # worker 1 could push by then, if it were not made to wait
        while time.monotonic() < deadline and rounds() == before:
            time.sleep(0.01)
        give(*arguments)

    session.barrier()  # `before` is the same for all
    if session.rank == 0:
        states.give = give_late
    for seed in (1, 5):
        optimizer.zero_grad()
        model(session.rank, seed).backward()
        optimizer.step()
        optimizer.synchronize()
    session.barrier()
    for state in optimizer.state_dict()["state"].values():
        assert state["step"] == 3 + 2 * session.num_workers, state["step"]
    print("worker %d has seen all steps counted" % session.rank)


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.side = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), nn.Linear(4, 2)

    def forward(self, x, takes_side):
        return self.body(x) + (self.side(x) if takes_side else 0)


def uneven(folder, kind, *steps):
    """Each worker takes its own number of steps, in two epochs; without a step, its gradient counts as zero. Some
    weights have gradients in every other step alone."""
    rank, size = p3.torch.rank(), p3.torch.size()
    weights = []
    for is_distributed in (True, False):
        torch.manual_seed(2)
        model = Branching()
        make = {"adam": torch.optim.Adam, "adamax": torch.optim.Adamax, "synchronous": torch.optim.AdamW}[kind]
        optimizer = make(model.parameters(), lr=0.01)
        if is_distributed:
            optimizer = p3.torch.DistributedOptimizer(optimizer, model, synchronous=kind == "synchronous")
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

        def gradients(worker, epoch, step, model=model):
            generator = torch.Generator().manual_seed(100 * worker + 10 * epoch + step)
            return model(torch.randn(4, 4, generator=generator), step % 2 == 0).square().mean()

        for epoch, counts in enumerate((steps, steps[::-1])):
            counts = [int(count) for count in counts]
            for step in range(counts[rank] if is_distributed else max(counts)):
                optimizer.zero_grad()
                if is_distributed:
                    gradients(rank, epoch, step).backward()
                else:
                    losses = [gradients(worker, epoch, step) for worker in range(size) if step < counts[worker]]
                    (sum(losses) / size).backward()
                optimizer.step()
                schedule.step()
            if is_distributed:
                optimizer.join(schedule.step)
        weights.append(model.state_dict())
    for name, value in weights[0].items():
        assert torch.allclose(value, weights[1][name], atol=1e-6), (name, value, weights[1][name])
    print("worker %d follows" % rank)


def _made(kind, **settings):
    torch.manual_seed(3)
    model = nn.Linear(4, 2)
    optimizer = {"adamax": torch.optim.Adamax, "clipped": torch.optim.AdamW}.get(kind, torch.optim.Adam)
    own = {"synchronous": {"synchronous": True}, "clipped": {"max_grad_norm": 1.0}}.get(kind, {})
    optimizer = optimizer(model.parameters(), lr=0.1, **settings)
    return model, p3.torch.DistributedOptimizer(optimizer, model, **own)


def _take_step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(1, 4)).square().mean().backward()
    optimizer.step()


def joins_without_its_schedule(kind):
    """Worker 1 has no batches left, and does not step its schedule as worker 0 does."""
    model, optimizer = _made(kind)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for _ in range(1 if p3.torch.rank() == 1 else 4):
        _take_step(model, optimizer)
        schedule.step()
    optimizer.join()
    print("worker %d ends with %s" % (p3.torch.rank(), model.weight.detach().flatten().tolist()))


def begins_alone(kind, how):
    """Worker 0 begins otherwise than worker 1, whose optimizer updates weights of its own."""
    rank = p3.torch.rank()
    settings = {"betas": (0.5, 0.99)} if how == "with settings" and rank == 0 else {}
    model, optimizer = _made(kind, **settings)
    torch.manual_seed(4)
    twin = nn.Linear(4, 2)
    plain = type(optimizer).__bases__[1](twin.parameters(), lr=0.1)
    _take_step(twin, plain)
    if how == "loads later":
        _take_step(model, optimizer)
    if how == "joins":
        optimizer.join()
    if rank == 0 and how != "with settings" or how == "all load":
        optimizer.load_state_dict(plain.state_dict())
    for _ in range(0 if how == "joins first" and rank == 1 else 3):
        _take_step(model, optimizer)
    optimizer.join()
    print("worker %d ends with %s" % (rank, model.weight.detach().flatten().tolist()))


def compressed(synchronous):
    """Against both workers' gradients, computed here and compressed as the documentation says."""
    kinds = ["plain", *codecs.of_gradients()]
    digests = {_train_compressed(kind, synchronous == "1") for kind in kinds}
    assert len(digests) == len(kinds)  # each makes a difference
    print("worker %d follows" % p3.torch.rank())


def _train_compressed(kind, is_synchronous):
    from compressions import sender

    from p3._core import codec_applies

    rank, size = p3.torch.rank(), p3.torch.size()
    options = {"threshold": 0.05} if kind == "2bit" else {}
    compression = None if kind == "plain" else {"type": kind, **options}
    codec = codecs.of(compression)
    carries_means = is_synchronous and codec is not None and codec.carries_sums

    def encoded(tensor, send):
        return torch.from_numpy(send(tensor.numpy().ravel())).reshape(tensor.shape)

    def make():
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(6, 50), nn.Tanh(), nn.Linear(50, 3))
        return model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)

    def backward(model, worker, step):
        generator = torch.Generator().manual_seed(100 * worker + step)
        model(torch.randn(8, 6, generator=generator)).square().mean().backward()

    model, optimizer = make()
    p3.torch.DistributedOptimizer(optimizer, model, compression=compression, synchronous=is_synchronous)
    reference, plain = make()
    def make_sender(parameter):
        applies = codec is not None and codec_applies(compression, "float32", parameter.dim())
        return sender(kind, 50_000, **options) if applies else lambda gradient: gradient

    adds_up = os.environ["P3_LOCAL_AGGREGATION"] == "1"  # on their machine, whose sum is encoded
    encoders = range(1 if adds_up else size)
    senders = [[make_sender(one) for one in reference.parameters()] for _ in encoders]
    for step in range(6):
        optimizer.zero_grad()
        backward(model, rank, step)
        optimizer.step()
        sent = [[] for _ in senders]
        for worker in range(size):
            if worker < len(senders):
                plain.zero_grad()
            backward(reference, worker, step)
            sent[min(worker, len(senders) - 1)] = [parameter.grad.clone() for parameter in reference.parameters()]
        sums = [torch.zeros_like(one) for one in reference.parameters()]
        for gradients, its in zip(sent, senders):
            for total, gradient, send in zip(sums, gradients, its):
                total += encoded(gradient, send)
        for total, parameter in zip(sums, reference.parameters()):
            mean = total / size
            parameter.grad = encoded(mean, make_sender(parameter)) if carries_means else mean
        plain.step()
    optimizer.synchronize()
    for weight, expected in zip(model.parameters(), reference.parameters()):
        assert torch.allclose(weight, expected, rtol=1e-6, atol=1e-6), (kind, (weight - expected).abs().max())
    if kind == "fp16" and is_synchronous:  # whose sum is beyond half precision, but not their mean
        size_of_each = 40000.0 if not adds_up else 30000.0  # the machine's sum must not be
        large = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(large.parameters(), lr=1.0)
        p3.torch.DistributedOptimizer(optimizer, large, compression=compression, synchronous=True)
        large(torch.full((1, 1), size_of_each)).backward()
        optimizer.step()
        assert abs(large.weight.item() + size_of_each) < 2, large.weight
    return sum(weight.double().sum().item() for weight in model.parameters())


def dgc():
    """Against NumPy, to the bit: gradients of both workers, computed here from the weights that NumPy has."""
    from compressions import Dgc, take_steps

    rank, size, settings = p3.torch.rank(), p3.torch.size(), {"ratio": 0.01, "warmup_steps": 4, "clip_norm": 0.05}

    def make():
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(40, 200, bias=False), nn.Tanh(), nn.Linear(200, 1, bias=False))

    def backward(model, worker, step):
        generator = torch.Generator().manual_seed(100 * worker + step)
        model.zero_grad()
        model(torch.randn(8, 40, generator=generator)).square().mean().backward()

    model, reference = make(), make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, weight_decay=0.01)
    optimizer = p3.torch.DistributedOptimizer(optimizer, model, compression={"type": "dgc", **settings})
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    weights = [one.detach() for one in reference.parameters()]
    workers = [[Dgc(one.numel(), 50_000, 0.9, num_workers=size, **settings) for one in weights] for _ in range(size)]
    for step in range(8):
        rate = optimizer.param_groups[0]["lr"]
        backward(model, rank, step)
        optimizer.step()
        schedule.step()
        sent = []
        for worker in range(size):
            backward(reference, worker, step)
            gradients = [one.grad.numpy().reshape(-1) for one in reference.parameters()]
            sent.append([one(g, step + 1, rate, 1.0 / size) for one, g in zip(workers[worker], gradients)])
        for number, weight in enumerate(weights):
            new = take_steps(weight.numpy().reshape(-1), [parts[number] for parts in sent], rate, 0.01)
            weight.copy_(torch.from_numpy(new).view_as(weight))
    optimizer.synchronize()
    for weight, expected in zip(model.parameters(), weights):
        assert torch.equal(weight, expected), (weight - expected).abs().max()
    assert optimizer.state_dict()["state"] == {}
    print("worker %d has the bits of NumPy" % rank)


def differing_rates(kind):
    """A scheduler that looks at each worker's own loss."""
    model = nn.Linear(4, 3)
    make = {"adam": torch.optim.Adam, "adamax": torch.optim.Adamax, "synchronous": torch.optim.SGD}[kind]
    optimizer = make(model.parameters(), lr=0.1)
    optimizer = p3.torch.DistributedOptimizer(optimizer, model, synchronous=kind == "synchronous")
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for step in range(4):
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        schedule.step(step * (2 * p3.torch.rank() - 1))  # worker 1's grows
    optimizer.synchronize()
    p3.torch.barrier()
    print("worker %d ends" % p3.torch.rank())


class Named(nn.Module):
    """As a model of transformers is called."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, batch, mask=None):
        return self.layer(batch["x"][0])


def alike(differ_in):
    """All workers' batches are the same, but for those of one step of worker 1; -1: of none."""
    model = Named()
    other = nn.Linear(3, 2)
    optimizer = p3.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    others = p3.torch.DistributedOptimizer(torch.optim.SGD(other.parameters(), lr=0.1), other)
    for number in range(8):
        optimizer.zero_grad()
        others.zero_grad()
        if number % 2:
            optimizer.weigh(1)
        x = torch.zeros(50, 200, 4)  # like the edges of pictures
        x[:, :, 1] = torch.rand(200, generator=torch.Generator().manual_seed(number))
        if p3.torch.rank() == 1 and number == int(differ_in):
            x[:, 100:] += 1
        other(model(mask=None, batch={"x": [x]})).sum().backward()
        optimizer.step()
        others.step()
    optimizer.synchronize()
    print("worker %d ends" % p3.torch.rank())


def weighed_by_some(synchronous):
    """Two of three workers, in the third step."""
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = p3.torch.DistributedOptimizer(optimizer, model, synchronous=synchronous == "1")
    for number in range(20):
        optimizer.zero_grad()
        if number < 2 or p3.torch.rank() > 0:
            optimizer.weigh(3 + p3.torch.rank())
        model(torch.rand(1, 4)).sum().backward()
        optimizer.step()


def written(kind):
    """A script that writes to a weight on one worker, past torch's notice."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    make = torch.optim.Adamax if kind == "on_workers" else torch.optim.SGD
    optimizer = make(model.parameters(), lr=0.1)
    optimizer = p3.torch.DistributedOptimizer(optimizer, model, synchronous=kind == "synchronous")
    for number in range(4):
        optimizer.zero_grad()
        out = model(torch.ones(1, 4))
        if number == 2 and p3.torch.rank() == 1:
            model[1].weight.data.add_(1.0)
        out.sum().backward()
        optimizer.step()


def resumed(folder, kind, steps, die_at):
    """Trains with snapshots; rank 0 is killed behind step `die_at` the first time. Prints a digest of the weights."""
    import zlib

    round, state = p3.torch.resume()
    torch.manual_seed(3 + round)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    kinds = {"adamw": torch.optim.AdamW, "adamax": torch.optim.Adamax}
    make = kinds.get(kind, lambda parameters, lr: torch.optim.SGD(parameters, lr, momentum=0.9))
    optimizer = make(model.parameters(), lr=0.05)
    if round == 0:
        torch.manual_seed(3)
        for module in model:
            module.reset_parameters()
    options = {}
    if kind.startswith("compressed"):
        options = {"compression": {"type": "2bit", "threshold": 0.02}, "synchronous": kind == "compressed_synchronous"}
    elif kind == "dgc":
        options = {"compression": {"type": "dgc", "ratio": 0.1, "warmup_steps": 6}}
    elif kind.startswith("lowrank"):
        options = {"compression": {"type": "lowrank", "rank": 2}, "synchronous": kind == "lowrank_synchronous"}
    elif kind.startswith("both_ways"):
        options = {"compression": "int8", "synchronous": kind == "both_ways_synchronous"}
    elif kind.startswith("each_its_own"):
        options = {"compression": lambda name, shape: ways.get(name), "synchronous": kind.endswith("synchronous")}
        ways = {"0.weight": {"up": "1bit", "down": "int8"}, "3.weight": {"up": {"type": "topk", "ratio": 0.2}},
                "1.weight": "int8"}  # fmt: skip
    if kind == "cycled":  # sets the optimizer's numbers when it is made, so it must be before they are resumed
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    optimizer = p3.torch.DistributedOptimizer(optimizer, model, **options)
    if kind != "cycled":
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    if state is not None:
        schedule.load_state_dict(state["schedule"])
        assert isinstance(state["tensor"], torch.Tensor) and state["tensor"].dtype == torch.bfloat16
    for number in range(round, int(steps)):
        if kind == "both_ways_exact":
            optimizer.synchronize(exact=True)
        generator = torch.Generator().manual_seed(10 * number + p3.torch.rank())
        optimizer.zero_grad()
        model(torch.randn(6, 4, generator=generator)).square().mean().backward()
        optimizer.step()
        schedule.step()
        tensor = torch.ones(3, dtype=torch.bfloat16)
        p3.torch.snapshot(number + 1, {"schedule": schedule.state_dict(), "tensor": tensor})
        if number + 1 == int(die_at) and round == 0 and p3.torch.rank() == 0:
            this_job.die_once(job.current(), folder)
    content = {**model.state_dict(), **optimizer.state_dict()["state"].get(0, {})}
    digest = 0
    for name in sorted(content, key=str):
        if isinstance(content[name], torch.Tensor):
            digest = zlib.crc32(content[name].numpy().tobytes(), digest)
    print("worker %d began at %d and has %08x" % (p3.torch.rank(), round, digest), flush=True)


def broadcasts_again(folder):
    """Worker 1 asks for the first value when rank 0 has given another, or waits to do so."""
    session, turns = job.current(), Turns(folder)
    if session.rank == 1:
        session.init = turns.behind(session.init, "again")
    model = nn.Linear(3, 2)
    model.weight.data.fill_(1.0)
    optimizer = p3.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    first = model.weight.tolist()
    if session.rank == 0:
        model.weight.data.fill_(2.0)
        session.init, session.barrier = turns.before(session.init, "again"), turns.within(session.barrier, "again")
    optimizer.broadcast()
    assert (first, model.weight.tolist()) == ([[1.0] * 3] * 2, [[2.0] * 3] * 2), (first, model.weight)


def saves_before_it_loads(folder):
    """Worker 1 has still to get the state that it saves when rank 0 has given another, or waits to do so."""
    session, turns = job.current(), Turns(folder)
    optimizer, zeros = _trained_and_zeros()
    if session.rank == 1:
        session.fetch = turns.behind(session.fetch, "load")
    saved = optimizer.state_dict()
    if session.rank == 0:
        session.store, session.barrier = turns.before(session.store, "load"), turns.within(session.barrier, "load")
    optimizer.load_state_dict(zeros)
    assert _have_momentum(saved) == [True, True]


def saves_behind_a_load(folder):
    """Rank 0 has still to give the state when worker 1 has got what it saves, or waits for rank 0."""
    session, turns = job.current(), Turns(folder)
    optimizer, zeros = _trained_and_zeros()
    if session.rank == 0:
        session.store = turns.behind(session.store, "save")
    else:
        session.fetch, enter = turns.before(session.fetch, "save"), session.barrier
        session.barrier = lambda *of: (enter(*of), setattr(session, "barrier", turns.within(enter, "save")))[0]
    optimizer.load_state_dict(zeros)
    assert _have_momentum(optimizer.state_dict()) == [False, False]


def _trained_and_zeros():
    """An optimizer that the servers have, with momentum, and a state for it that has none."""
    model = nn.Linear(400, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    optimizer = p3.torch.DistributedOptimizer(optimizer, model)
    _one_step(model, optimizer)
    zeros = optimizer.state_dict()
    for state in zeros["state"].values():
        state["momentum_buffer"].zero_()
    p3.torch.barrier()
    return optimizer, zeros


def _have_momentum(state):
    return [bool(one["momentum_buffer"].any()) for one in state["state"].values()]


class Late(torch.autograd.Function):
    """Worker 1 is late with what comes behind it in the backward pass."""

    @staticmethod
    def forward(context, x):
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        if p3.torch.rank() == 1:
            time.sleep(0.4)
        return gradient


def traced(steps):
    """Layers made in another order than they run in; of worker 0, "encoder" has to wait for worker 1."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            # The gradient of the head's weight is so large that it leaves at once.
            self.head, self.encoder = nn.Linear(300, 20), nn.Linear(5, 300)

        def forward(self, x):
            return self.head(torch.tanh(Late.apply(self.encoder(x))))

    model = Net()
    optimizer = p3.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for _ in range(int(steps)):
        optimizer.zero_grad()
        model(torch.ones(2, 5)).square().sum().backward()
        optimizer.step()
    optimizer.synchronize()


class Ways(nn.Module):
    """`layers` of 90,000 weights each, of which `way` says which run, and in which order."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(300, 300) for _ in range(layers))
        self.way = []

    def forward(self, x):
        for number in self.way:
            x = torch.tanh(self.layers[number](x))
        return x


def untouched():
    """Worker 0 uses the first layer, worker 1 the second, nobody the third: each pushes what it has used."""
    torch.manual_seed(2)
    model = Ways(3)
    before = [layer.weight.detach().clone() for layer in model.layers]
    optimizer = p3.torch.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1), model)
    model.way = [p3.torch.rank()]
    for step in range(3):
        counters = p3.torch.start.job.current().counters()
        optimizer.zero_grad()
        model(torch.ones(2, 300)).square().sum().backward()
        optimizer.step()
        optimizer.synchronize()
        sent, received = (
            p3.torch.start.job.current().counters()[name] - counters[name] for name in ("bytes_sent", "bytes_received")
        )
        layer_bytes = 300 * 301 * 4
        assert layer_bytes < sent < 1.02 * layer_bytes and 2 * layer_bytes < received < 2.02 * layer_bytes, (
            step, sent, received)  # fmt: skip
    assert [bool((layer.weight == first).all()) for layer, first in zip(model.layers, before)] == [False, False, True]
    print("worker %d sent its own layer alone" % p3.torch.rank())


def warms_up():
    """A learning rate of zero, and mean gradients that are; then a step of which worker 0 has no gradient."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = p3.torch.DistributedOptimizer(optimizer, model, synchronous=True)
    before = model.weight.detach().clone()
    (model(torch.ones(1, 3)) * 0).sum().backward()
    optimizer.synchronize()
    assert model.weight.grad.eq(0).all()
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.1
    for one in model.parameters():
        one.grad = None
    if p3.torch.rank() > 0:
        model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    share = (p3.torch.size() - 1) / p3.torch.size()
    assert torch.allclose(before - model.weight, torch.full_like(before, 0.1 * share))
    optimizer.release()
    print("has warmed up")


def ways(steps):
    """Each worker goes its own ways, of which rank 0's change for good; all follow rank 0's order."""
    model = Ways(5)
    optimizer = p3.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for step in range(int(steps)):
        if p3.torch.rank() == 0:
            model.way = [0, 1, 2, 3, 4] if step < 3 else [4, 2, 0, 3, 1]
        else:
            model.way = torch.randperm(5, generator=torch.Generator().manual_seed(step)).tolist()
        optimizer.zero_grad()
        model(torch.ones(1, 300)).sum().backward()
        optimizer.step()
        p3.torch.barrier()  # behind it, what rank 0 has announced has come
    followed = sorted(optimizer._p3._parameters.values(), key=lambda one: -one.priority)
    names = [one.name for one in followed if one.name.endswith("weight")]
    print("worker %d follows %s" % (p3.torch.rank(), " ".join(name.split(".")[1] for name in names)))


def sleeping(folder):
    """Leaves the processes of its job in FOLDER, and waits to be killed."""
    model = nn.Linear(4, 4)
    optimizer = p3.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    p3.torch.barrier()
    with open(os.path.join(folder, "%d.part" % p3.torch.rank()), "w") as file:
        file.write(str(os.getpid()))
    os.rename(file.name, file.name[:-5])
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:  # the others' end ends this, too
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()


def _one_step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(2, 400)).sum().backward()
    optimizer.step()


def _take_events_from(make):
    staging.Staging.new_event = lambda _self: make()
    staging.staging_of(torch.device("cpu"))._events.clear()


def overlapped():
    """In the second step of a parameter of 8 slices, each piece is copied when those before it have left."""
    model = nn.Linear(400, 1000, bias=False)
    optimizer = p3.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    _one_step(model, optimizer)
    loss = model(torch.ones(2, 400)).sum()
    session, out = p3.torch.start.job.current(), staging.staging_of(model.weight.device)._out
    before = session.counters()["slices_sent"]

    def wait_until_left(slices):
        deadline = time.monotonic() + 30
        while session.counters()["slices_sent"] < before + slices:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    slices = iter([0, 1, 2, 4])

    class Paced(torch.cpu.Event):
        def record(self, stream=None):
            self.slices = next(slices) if stream is out else 0

        def synchronize(self):
            wait_until_left(self.slices)

    _take_events_from(Paced)
    optimizer.zero_grad()
    loss.backward()
    wait_until_left(8)
    optimizer.step()
    model(torch.ones(1, 400))


def copy_fails():
    """A device that fails on one worker, as a broken kernel makes it, while a gradient is copied."""
    model = nn.Linear(400, 10, bias=False)
    optimizer = p3.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    _one_step(model, optimizer)

    class Failing(torch.cpu.Event):
        def synchronize(self):
            raise RuntimeError("illegal memory access")

    if p3.torch.rank() == 1:
        model(torch.ones(1, 400))
        _take_events_from(Failing)
    _one_step(model, optimizer)
    model(torch.ones(1, 400))


if __name__ == "__main__":
    if sys.argv[1] == "--staged":
        arrays.DEVICES.add("cpu")
        del sys.argv[1]
    if sys.argv[1] == "--thread":  # what uses P3 first is a thread that ends
        first = threading.Thread(target=p3.torch.rank)
        first.start()
        first.join()
        del sys.argv[1]
    globals()[sys.argv[1]](*sys.argv[2:])
