"""Jobs that clip by the global norm of the mean gradients, one function for each: torch_clipping.py [--staged] NAME

Each trains the same model in plain torch as well, on the joined batch and with torch.nn.utils.clip_grad_norm_.
"""

import hashlib
import math
import sys

import torch
from torch import nn

import p3.torch
import this_job
from p3.torch.parameters import arrays

RANK, SIZE = p3.torch.rank(), p3.torch.size()
STEPS, ROWS = 6, 4
NORM = 0.5  # some steps are above it, others below


class Model(nn.Module):
    """With a weight that two layers share, one that is frozen, one that is used in every other step, and rows."""

    def __init__(self, sparse=False):
        super().__init__()
        self.words = nn.Embedding(30, 6, sparse=sparse)
        self.body = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.body[2].weight = self.body[0].weight
        self.side, self.frozen, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.frozen.requires_grad_(False)

    def forward(self, ids, takes_side):
        x = self.body(self.words(ids).mean(1))
        if takes_side:
            x = x + self.side(x)
        return self.head(self.frozen(x))


def loss_of(model, worker, step, part=0):
    generator = torch.Generator().manual_seed(1000 * part + 100 * worker + step)
    ids = torch.randint(0, 30, (ROWS, 3), generator=generator)
    scale = (0.1, 3.0)[step % 2]
    return model(ids, step % 2 == 0).square().mean() * scale


def optimizers():
    """By name, what makes it of a model."""
    made = {"SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9)}
    for kind in ("Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop",
                 "Adafactor"):  # fmt: skip
        made[kind] = lambda ps, kind=kind: getattr(torch.optim, kind)(ps, lr=0.01)
    return made


def groups_of(model):
    weights = [one for one in model.parameters() if one.dim() > 1]
    others = [one for one in model.parameters() if one.dim() == 1]
    return [{"params": weights}, {"params": others, "lr": 0.02}]


class Pair:
    """A model that P3 trains and one of plain torch's, step by step."""

    def __init__(self, make=optimizers()["AdamW"], sparse=False, dtype=torch.float32, **options):
        torch.manual_seed(3)
        self.model, self.plain = Model(sparse).to(dtype), Model(False).to(dtype)
        self.plain.load_state_dict(self.model.state_dict())
        self.optimizer = p3.torch.DistributedOptimizer(make(groups_of(self.model)), self.model, **options)
        self.reference = make(groups_of(self.plain))

    def step_plain(self, step, norm, kind=2.0, workers=range(SIZE), parts=(0,)):
        """The norm before it is clipped."""
        self.reference.zero_grad()
        sum(loss_of(self.plain, worker, step, part) for worker in workers for part in parts).div(SIZE).backward()
        told = nn.utils.clip_grad_norm_(self.plain.parameters(), norm, kind)
        self.reference.step()
        return told

    def backward(self, step, parts=(0,)):
        self.optimizer.zero_grad()
        with self.optimizer.no_sync():
            for part in parts[:-1]:
                loss_of(self.model, RANK, step, part).backward()
        loss_of(self.model, RANK, step, parts[-1]).backward()

    def compare(self, where, tolerance=1e-6):
        self.optimizer.synchronize()
        for (name, value), expected in zip(self.model.named_parameters(), self.plain.parameters()):
            difference = (value - expected).abs().max().item()
            assert difference < tolerance, (where, name, difference)

    def train(self, step, where, tolerance=1e-6, parts=(0,)):
        """Both, and compares them."""
        self.backward(step, parts)
        self.optimizer.step()
        self.step_plain(step, NORM, parts=parts)
        self.compare(where, tolerance)

    def digest(self):
        self.optimizer.synchronize()
        digest = hashlib.sha256()
        for value in self.model.parameters():
            digest.update(value.detach().float().numpy().tobytes())
        return digest.hexdigest()[:16]


def every_optimizer():
    """Equal to plain torch after each step; the bits that all workers end with are printed."""
    for kind, make in optimizers().items():
        pair = Pair(make, dtype=torch.float64, max_grad_norm=NORM)  # some follow the sign of a gradient near zero
        for step in range(STEPS):
            pair.train(step, (kind, step))
        print("worker %d: %s ends with %s" % (RANK, kind, pair.digest()))


def told():
    """clip_grad_norm_() tells the norm, read before step(), after it or never; and may have another one each time."""
    pair = Pair(optimizers()["SGD"], max_grad_norm=math.inf)
    for step in range(3 * STEPS):
        norm, kind = (0.3, 0.5, math.inf, 2.0)[step % 4], (2.0, math.inf)[step // 4 % 2]
        pair.backward(step)
        told = pair.optimizer.clip_grad_norm_(norm, kind)
        if step % 3 == 0:
            before = told.item()
        pair.optimizer.step()
        expected = pair.step_plain(step, norm, kind)
        if step % 3 == 1:
            before = float(told)
        if step % 3 < 2:
            assert abs(before - expected) <= 1e-6 * max(1, expected), (step, before, expected)
            assert isinstance(told, torch.Tensor) and told + 0 == told.clone(), "an ordinary tensor by now"
        pair.compare(step)
    print("worker %d was told of every norm" % RANK)


def never_waits():
    """Neither clip_grad_norm_() nor step() waits for the network; reading the norm does."""
    model = nn.Linear(500, 300)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer = p3.torch.DistributedOptimizer(optimizer, model, max_grad_norm=math.inf)

    def step():
        optimizer.zero_grad()
        model(torch.ones(2, 500)).sum().backward()
        norm = optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        return norm

    step(), step()
    model(torch.ones(1, 500))
    with this_job.frozen_server():
        norm = step()
        print("the step returned while the server was frozen")
    expected = math.sqrt(300 * 500 * 4 + 300 * 4)
    assert abs(norm.item() - expected) < 1e-3 * expected
    print("and its norm came afterwards")


def not_finite():
    """A step whose norm is not finite changes nothing on any worker, whoever has the bad element."""
    for bad in (math.inf, math.nan):
        pair = Pair(max_grad_norm=NORM)
        for step in range(STEPS):
            pair.optimizer.zero_grad()
            loss = loss_of(pair.model, RANK, step)
            if step % 3 == 1:
                loss = loss * (bad if RANK == step % SIZE else 1.0)
            loss.backward()
            pair.optimizer.step()
            if step % 3 != 1:
                pair.step_plain(step, NORM)
            pair.compare((bad, step))
    pair.optimizer.zero_grad()
    (loss_of(pair.model, RANK, 0) * math.inf).backward()
    pair.optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
    pair.optimizer.step()
    try:
        loss_of(pair.model, RANK, 1)
    except RuntimeError as error:
        assert "is nan, so they cannot be clipped" in str(error), error
    else:
        raise AssertionError("no error")
    pair.compare("behind the error")
    print("worker %d left out what was not finite" % RANK)


def accumulated():
    """no_sync(): the norm is of what all backward passes of a step have added up."""
    pair = Pair(max_grad_norm=NORM)
    for step in range(STEPS):
        pair.train(step, step, parts=(0, 1, 2))
    print("worker %d clipped what was added up" % RANK)


def uneven():
    """A worker in join() clips as the others do, whatever they clip by."""
    pair = Pair(max_grad_norm=math.inf)
    mine = STEPS - 2 * RANK
    for step in range(mine):
        pair.backward(step)
        pair.optimizer.clip_grad_norm_(0.1 * (step + 1), (2.0, math.inf)[step % 2])
        pair.optimizer.step()
    pair.optimizer.join()
    for step in range(STEPS):
        there = [one for one in range(SIZE) if step < STEPS - 2 * one]
        pair.step_plain(step, 0.1 * (step + 1), (2.0, math.inf)[step % 2], workers=there)
    pair.compare("joined")
    print("worker %d follows" % RANK)


def differing():
    """Workers that clip by different norms are told so."""
    pair = Pair(max_grad_norm=math.inf)
    for step in range(2):
        pair.backward(step)
        pair.optimizer.clip_grad_norm_(0.5 + 0.1 * RANK)
        pair.optimizer.step()
    pair.optimizer.synchronize()
    pair.optimizer.state_dict()
    p3.torch.barrier()


def on_one_alone(rank, optimizer):
    """Clips on that worker; on the others not."""
    options = {"max_grad_norm": NORM} if RANK == int(rank) else {}
    pair = Pair(optimizers()[optimizer], **options)
    for step in range(2):
        pair.backward(step)
        pair.optimizer.step()
    pair.optimizer.synchronize()
    p3.torch.barrier()


def options():
    """Rows, half precision, compression: as without clipping, times the factor."""
    tolerance = {"fp16": 2e-3, "bf16": 2e-2, "int8": 2e-2}
    for sparse, momentum in ((False, 0.9), (True, 0)):
        pair = Pair(lambda ps, m=momentum: torch.optim.SGD(ps, lr=0.1, momentum=m), sparse, max_grad_norm=NORM)
        for step in range(STEPS):
            pair.train(step, (sparse, step))
    for kind, within in tolerance.items():
        pair = Pair(optimizers()["SGD"], max_grad_norm=NORM, compression={"type": kind})
        for step in range(STEPS):
            pair.train(step, (kind, step), within)
        print("worker %d: %s ends with %s" % (RANK, kind, pair.digest()))
    for dtype, within in ((torch.float64, 1e-9), (torch.bfloat16, 0.1)):
        pair = Pair(optimizers()["SGD"], dtype=dtype, max_grad_norm=NORM)
        for step in range(STEPS):
            pair.train(step, (dtype, step), within)
    print("worker %d clipped all of them" % RANK)


def scaled():
    """p3.torch.GradScaler: losses, scales and weights as with torch's, with clipping and without; steps that it leaves
    out are left out on all workers; and nothing of it waits for the step."""
    for clips in (False, True):
        pair = Pair(grad_scaler=p3.torch.GradScaler("cpu", init_scale=2.0**10, growth_interval=2))
        ours = p3.torch.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        plain = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        for step in range(3 * STEPS):
            assert ours.get_scale() == plain.get_scale(), step
            bad = math.inf if step in (4, 9, 10) else 1.0
            pair.optimizer.zero_grad()
            ours.scale(loss_of(pair.model, RANK, step) * (bad if RANK == step % SIZE else 1.0)).backward()
            if clips:
                ours.unscale_(pair.optimizer)
                norm = pair.optimizer.clip_grad_norm_(NORM)
            ours.step(pair.optimizer)
            ours.update()
            pair.reference.zero_grad()
            losses = [loss_of(pair.plain, worker, step) for worker in range(SIZE)]
            plain.scale(sum(losses) / SIZE * bad).backward()
            plain.unscale_(pair.reference)
            expected = nn.utils.clip_grad_norm_(pair.plain.parameters(), NORM if clips else math.inf)
            plain.step(pair.reference)
            plain.update()
            if clips and bad == 1:
                assert abs(norm - expected) < 1e-6, (step, norm, expected)
            pair.compare(("scaled", clips, step))
        assert ours.state_dict() == plain.state_dict()
    print("worker %d scales as torch does" % RANK)


def frozen_and_scaled():
    """Neither unscale_(), step() nor update() waits for the network."""
    model = nn.Linear(500, 300)
    scaler = p3.torch.GradScaler("cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer = p3.torch.DistributedOptimizer(optimizer, model, grad_scaler=scaler)

    def step():
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 500)).sum()).backward()
        scaler.unscale_(optimizer)
        optimizer.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()

    step(), step()
    model(torch.ones(1, 500))
    with this_job.frozen_server():
        step()
        print("the step returned while the server was frozen")
    assert scaler.get_scale() == 2.0**16


def kept_and_scaled():
    """Compression that keeps what it leaves out would have to know of a step that is left out."""
    pair = Pair(max_grad_norm=NORM, compression={"type": "2bit", "threshold": 0.01})
    scaler = p3.torch.GradScaler("cpu")
    scaler.scale(loss_of(pair.model, RANK, 0)).backward()
    scaler.step(pair.optimizer)


def one_looks():
    """As in a trainer, one worker reads a gradient that nothing clips; then all have a collective before step()."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = p3.torch.DistributedOptimizer(optimizer, model, max_grad_norm=math.inf)
    optimizer._p3.act_as_ddp()
    for step in range(3):
        model(torch.ones(1, 3) * (RANK + 1)).sum().backward()
        optimizer._p3.watch_gradients()
        if step > 0 and RANK == 0:  # in the first one gradients leave in step()
            assert model.weight.grad.eq((1 + SIZE) / 2).all(), model.weight.grad
        p3.torch.all_reduce(torch.ones(1))
        optimizer.step()
    optimizer.release()
    print("looked alone")


def others_use_and_wait():
    others_use(synchronous=True)


def others_use(synchronous=False):
    """Each worker uses one layer of two, and has the mean gradients of both, in whatever order it reads them."""
    layers = nn.ModuleList(nn.Linear(3, 2) for _ in range(SIZE))
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    optimizer = p3.torch.DistributedOptimizer(optimizer, layers, max_grad_norm=math.inf, synchronous=synchronous)
    optimizer._p3.act_as_ddp()
    first = [one.weight.detach().clone() for one in layers]
    steps = 6
    for step in range(steps):
        (layers[RANK](torch.ones(1, 3)) * (RANK + 1)).sum().backward()
        optimizer._p3.watch_gradients()
        if step % 3 == 0 or RANK == 0:
            for at in sorted(range(SIZE), reverse=step % 2):
                gradient = layers[at].weight.grad
                assert gradient is not None and gradient.eq((at + 1) / SIZE).all(), (step, at, gradient)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    for at, (was, now) in enumerate(zip(first, layers)):
        assert torch.allclose(was - now.weight, torch.tensor(0.1 * steps * (at + 1) / SIZE)), at
    optimizer.release()
    print("saw what others use")


def leave_out_and_wait():
    leave_out(synchronous=True)


def leave_out(synchronous=False):
    """All workers leave out the same steps by zero_grad(), of which gradients have left by then on some, and on others
    have not: as one alone has looked at one, in the first step, or has used that layer before."""
    layers = nn.ModuleList(nn.Linear(3, 2) for _ in range(SIZE))
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    optimizer = p3.torch.DistributedOptimizer(optimizer, layers, max_grad_norm=math.inf, synchronous=synchronous)
    optimizer._p3.act_as_ddp()
    wanted = [one.weight.detach().clone() for one in layers]
    own, seconds = list(range(SIZE)), [1] * SIZE  # which layer each worker uses
    for step, (used, passes, ending) in enumerate([
        ([0] * SIZE, 2, "look"), (seconds, 1, "drop"), (own, 2, "step"), ([0] * SIZE, 1, "drop"), (seconds, 2, "clip"),
        (own, 2, "step"), (own[::-1], 2, "drop"), (own, 2, "step"), (seconds, 2, "step"),
    ]):  # fmt: skip
        for _ in range(passes):
            (layers[used[RANK]](torch.ones(1, 3)) * (RANK + 1)).sum().backward()
            optimizer._p3.watch_gradients()
        means = [passes * sum(rank + 1 for rank in range(SIZE) if used[rank] == at) / SIZE for at in range(SIZE)]
        if ending == "look" and RANK == 0:
            assert layers[0].weight.grad.eq(means[0]).all(), layers[0].weight.grad
        if ending == "clip":
            optimizer.clip_grad_norm_(1e9)
        if ending == "step":
            optimizer.step()
            optimizer.synchronize() if not synchronous else None
            wanted = [weight - 0.1 * mean for weight, mean in zip(wanted, means)]
        optimizer.zero_grad()
        for at, layer in enumerate(layers):
            assert torch.allclose(layer.weight, wanted[at]), (step, at, layer.weight, wanted[at])
    optimizer.release()
    print("left out alike")


def leave_out_alone_and_wait():
    leave_out_alone(synchronous=True)


def leave_out_alone(synchronous=False):
    """In one step a worker's backward pass reaches no parameter, so that zero_grad() leaves out that step on others."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = p3.torch.DistributedOptimizer(optimizer, model, max_grad_norm=math.inf, synchronous=synchronous)
    optimizer._p3.act_as_ddp()
    for step in range(10):
        if step != 3 or RANK != 0:
            model(torch.ones(1, 3)).sum().backward()
            optimizer._p3.watch_gradients()
        optimizer.step() if step != 3 else optimizer.zero_grad()
        model(torch.ones(1, 3))  # waits for the step


if __name__ == "__main__":
    if sys.argv[1] == "--staged":
        arrays.DEVICES.add("cpu")
        del sys.argv[1]
    globals()[sys.argv[1]](*sys.argv[2:])
