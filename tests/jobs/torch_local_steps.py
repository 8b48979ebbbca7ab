"""Jobs with local steps, a function for each: torch_local_steps.py NAME ARGUMENT...

References train all workers' models here, in one process of plain torch, as the papers' algorithms say.
"""

import copy
import gc
import os
import signal
import sys
import time
import zlib

import numpy as np
import this_job
import torch_steps  # noqa: F401  (one thread)
import torch
from torch import nn
from turns import Turns

import p3.torch
from p3.frontend import waiting
from p3.frontend.local_steps.value import Global
from p3.frontend.weights import Weights
from p3.placement import FRAME_BYTES
from p3.torch.start import job

RANK, SIZE = p3.torch.rank(), p3.torch.size()
PLAIN = {"lr": 1.0, "momentum": 0.0}
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.005),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.02),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3),
}
CODECS = {
    "none": None,
    "weighed": None,
    "quorum": None,
    "bf16 up": {"up": "bf16"},
    "int4 up": {"up": "int4"},
    "largest": {"up": {"type": "topk", "ratio": 0.2}, "down": "int8"},
}  # and others by their names
PATIENT = {"quorum": 1, "grace": 1e6}  # in whose rounds all are


def made(dtype=torch.float32, width=12):
    torch.manual_seed(5)
    layers = (nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3))
    return nn.Sequential(*layers).to(dtype)


def wide():
    return made(width=40)


def loss_of(model, worker, step):
    dtype = next(model.parameters()).dtype
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1000 * worker + step), dtype=torch.float64).to(dtype)
    return (model(x) - x[:, :3].sin()).square().mean()


def take(model, optimizer, worker, step, clips=True):
    """One local step."""

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, worker, step)
        loss.backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        return loss

    optimizer.step(closure)


def samples(worker, step):
    """What a worker weighs in a step: also nothing for a while."""
    return 0 if worker == 1 and step // 20 % 3 == 1 else (5 * step + 3 * worker) % 7 * (worker + 1)


def weigh(optimizer, codec, step):
    if codec == "weighed":
        optimizer.weigh(torch.tensor(samples(RANK, step)))


def distance(model, other):
    return max((one - two).abs().max().item() for one, two in zip(model.parameters(), other.parameters()))


def has_bits_of(model, other):
    return all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters()))


def digest(tensors):
    made = 0
    for tensor in tensors:
        made = zlib.crc32(tensor.detach().contiguous().numpy().tobytes(), made)
    return "%08x" % made


# Exactness


def averaged(kind):
    """An exchange behind each step, a mean: all workers train as those of a process that averages their weights."""
    model, models = made(), [made() for _ in range(SIZE)]
    optimizer = p3.torch.LocalSteps(OPTIMIZERS[kind](model.parameters()), model, every=1, outer=PLAIN)
    optimizers = [OPTIMIZERS[kind](one.parameters()) for one in models]
    schedules = [torch.optim.lr_scheduler.StepLR(one, 5, 0.7) for one in (optimizer, *optimizers)]
    for step in range(25):
        take(model, optimizer, RANK, step)
        for worker, (one, its) in enumerate(zip(models, optimizers)):
            take(one, its, worker, step)
        with torch.no_grad():
            for same in zip(*(one.parameters() for one in models)):
                mean = torch.stack(same).mean(0)
                for one in same:
                    one.copy_(mean)
        for schedule in schedules:
            schedule.step()
        assert distance(model, models[RANK]) < 1e-6, (step, distance(model, models[RANK]))
    print("worker %d averages" % RANK)


def alone(kind, every, fragments):
    """One worker, whose weights come back as they were sent, whatever the global ones were before: to the bit."""
    model, plain = made(), made()
    for one in (model, plain):
        with torch.no_grad():  # elements of all magnitudes, where differences lose digits
            one[0].weight.mul_(10.0 ** torch.linspace(-9, 1, 72).view(12, 6))
    optimizer = p3.torch.LocalSteps(
        OPTIMIZERS[kind](model.parameters()), model, every=int(every), fragments=int(fragments), outer=PLAIN
    )
    reference = OPTIMIZERS[kind](plain.parameters())
    for step in range(30):
        take(model, optimizer, RANK, step)
        take(plain, reference, RANK, step)
        assert has_bits_of(model, plain), (step, distance(model, plain))
    assert optimizer.stats()["merges"] == sum(step % int(every) in {place * int(every) // int(fragments)
                                                                     for place in range(int(fragments))}
                                              for step in range(1, 31))  # fmt: skip
    print("worker %d is alone" % RANK)


def diloco(theta, steps, every, lr, momentum, nesterov):
    """DiLoCo, Algorithm 1: yields how many steps all workers have taken, and the global model."""
    outer = torch.optim.SGD(theta.parameters(), lr=lr, momentum=momentum, nesterov=nesterov)
    states = [None] * SIZE  # of the inner optimizers, which go on
    for begin in range(0, steps, every):
        deltas = [torch.zeros_like(one) for one in theta.parameters()]
        for worker in range(SIZE):
            local = copy.deepcopy(theta)
            inner = OPTIMIZERS["adamw"](local.parameters())
            if states[worker] is not None:
                inner.load_state_dict(states[worker])
            for step in range(begin, begin + every):
                take(local, inner, worker, step)
            states[worker] = copy.deepcopy(inner.state_dict())
            for delta, before, after in zip(deltas, theta.parameters(), local.parameters()):
                delta += (before - after).detach() / SIZE
        for one, delta in zip(theta.parameters(), deltas):
            one.grad = delta
        outer.step()
        yield begin + every, theta


def follows_diloco(steps, momentum, nesterov):
    model = made(torch.float64)
    given = {"lr": 0.7, "momentum": float(momentum), "nesterov": nesterov == "1"}
    optimizer = p3.torch.LocalSteps(OPTIMIZERS["adamw"](model.parameters()), model, every=10, outer=given)
    reference = diloco(made(torch.float64), int(steps), 10, **given)
    for step in range(int(steps)):
        take(model, optimizer, RANK, step)
        if (step + 1) % 10 == 0:
            taken, theta = next(reference)
            assert taken == step + 1 and distance(model, theta) < 1e-6, (step, distance(model, theta))
    assert distance(model, made(torch.float64)) > 0.05  # it has trained
    print("worker %d follows" % RANK)


class Streaming:
    """Streaming DiLoCo, Algorithm 2, of all workers: each fragment has its own t mod every, and is merged later."""

    def __init__(self, dtype, layers, every, delay, alpha, lr, momentum, weighs=lambda worker, step: 1):
        self.weighs, self.weights = weighs, torch.zeros(len(layers), SIZE, dtype=torch.float64)
        self.locals = [made(dtype) for _ in range(SIZE)]
        self.inner = [OPTIMIZERS["adamw"](one.parameters()) for one in self.locals]
        self.theta = made(dtype)
        self.every, self.delay, self.alpha = every, delay, alpha
        self.fragments = [
            [name for name, _ in self.theta.named_parameters() if name.partition(".")[0] in one] for one in layers
        ]
        parameters = dict(self.theta.named_parameters())
        self.outer = [torch.optim.SGD([parameters[name] for name in one], lr=lr, momentum=momentum, nesterov=True)
                      for one in self.fragments]  # fmt: skip
        self.coming = {}  # fragments by when they are merged

    def step(self, t):
        """t: from 1 on."""
        for worker, (local, inner) in enumerate(zip(self.locals, self.inner)):
            take(local, inner, worker, t - 1)
        self.weights += torch.tensor([self.weighs(worker, t - 1) for worker in range(SIZE)])
        for p, names in enumerate(self.fragments):
            if t % self.every == p * self.every // len(self.fragments):
                shares = self.weights[p] / (self.weights[p].sum() or 1)
                self.weights[p] = 0
                for name in names:
                    theta = self.theta.get_parameter(name)
                    sent = [theta.detach() - one.get_parameter(name).detach() for one in self.locals]
                    theta.grad = sum(share * one for share, one in zip(shares, sent))
                self.outer[p].step()
                values = [self.theta.get_parameter(name).detach().clone() for name in names]
                self.coming[t + self.delay] = list(zip(names, values))
        with torch.no_grad():
            for name, value in self.coming.pop(t, ()):
                for local in self.locals:
                    one = local.get_parameter(name)
                    one.copy_(self.alpha * one + (1 - self.alpha) * value)


def follows_streaming(steps, delay, alpha, weighed="none"):
    """In three fragments, of one layer each; or strided, of which the first has two."""
    weights = {"weighs": samples} if weighed == "weighed" else {}
    for strided, layers in ((False, ("0", "2", "4")), (True, ("04", "2"))):
        given = {"every": 9, "delay": int(delay)}
        model = made(torch.float64)
        optimizer = p3.torch.LocalSteps(
            OPTIMIZERS["adamw"](model.parameters()), model, fragments=len(layers), strided=strided, alpha=float(alpha),
            outer={"lr": 0.7, "momentum": 0.9}, **given,
        )  # fmt: skip
        reference = Streaming(torch.float64, layers, alpha=float(alpha), lr=0.7, momentum=0.9, **given, **weights)
        most = 0
        for step in range(int(steps)):
            weigh(optimizer, weighed, step)
            take(model, optimizer, RANK, step)
            reference.step(step + 1)
            assert distance(model, reference.locals[RANK]) < 1e-6, (step, distance(model, reference.locals[RANK]))
            most = max(most, optimizer.stats()["under_way"])
        assert most == -(-int(delay) * len(layers) // 9), most  # so many at once
        with optimizer.global_weights():
            assert distance(model, reference.theta) < 1e-6
        assert distance(model, reference.locals[RANK]) < 1e-6
        optimizer.release()
    print("worker %d follows" % RANK)


# Bytes


def bytes_of(model):
    """A parameter is a slice here."""
    return sum(4 * one.numel() + FRAME_BYTES for one in model.parameters())


def counts_bytes():
    """How many leave and come in three periods, whatever the schedule."""
    session, periods, every = job.current(), 3, 8
    pushpull, times = session.pushpull, []

    def noted(key, sent, *arguments, **keywords):
        if key.name != "samples":
            times[-1].append((step, sent.nbytes))
        return pushpull(key, sent, *arguments, **keywords)

    for fragments, delay, strided in ((1, 0, False), (3, 0, False), (3, 5, False), (3, 7, True), (2, 3, True)):
        model = wide()
        optimizer = p3.torch.LocalSteps(
            OPTIMIZERS["sgd"](model.parameters()), model, every=every, fragments=fragments, delay=delay, strided=strided
        )
        optimizer.state_dict()  # behind the last word of its first values
        before = session.counters()
        times.append([])
        session.pushpull = noted
        for step in range(periods * every):
            take(model, optimizer, RANK, step)
        optimizer.synchronize()
        session.pushpull = pushpull
        counts = periods * fragments  # of who takes part, and their samples
        expected = periods * bytes_of(wide()) + counts * 3 * 8
        deadline, of_step = time.monotonic() + 10, (fragments, delay, strided)
        for way in ("sent", "received"):
            slices, moved = f"slices_{way}", f"bytes_{way}"
            many = before[slices] + periods * len(list(model.parameters())) + counts
            # What has left is counted a moment later, and nobody waits for the counts of workers.
            while (now := session.counters())[slices] < many or now[moved] - before[moved] < expected:
                assert time.monotonic() < deadline, of_step
            heartbeats = (now[moved] - before[moved] - expected) / FRAME_BYTES
            assert heartbeats in range(50), (*of_step, way, heartbeats)
            assert now[slices] == many, (*of_step, way)
        optimizer.release()
    assert len({sum(sent for _, sent in one) for one in times}) == 1
    assert len({tuple(one) for one in times}) == 3  # the model has three layers, so strided fragments are the same
    print("worker %d has counted" % RANK)


# Bits


def has_same_bits(codec, delay, quorum="", grace="0"):
    """P3_CHECK=1 compares the global weights at each merge; their digests are printed."""
    model = wide()
    given = {"quorum": int(quorum), "grace": float(grace)} if quorum else {}
    optimizer = p3.torch.LocalSteps(
        OPTIMIZERS["adamw"](model.parameters()), model, every=6, fragments=3, delay=int(delay),
        codec=CODECS.get(codec, codec), **given,
    )  # fmt: skip
    for step in range(30):
        take(model, optimizer, RANK, step)
    local = digest(model.parameters())
    with optimizer.global_weights():
        of_all = digest(model.parameters())
    assert digest(model.parameters()) == local
    print("worker %d: local %s global %s" % (RANK, local, of_all))
    optimizer.take_global()
    assert digest(model.parameters()) == of_all


def at_own_speed(codec, steps, *deaths):
    """Each worker takes other numbers of steps, and meets the others now and then. `deaths`: "RANK:STEP" of each."""
    deaths = {int(rank): int(step) for rank, step in (one.split(":") for one in deaths)}
    model = wide()
    optimizer = p3.torch.LocalSteps(
        OPTIMIZERS["adamw"](model.parameters()), model, every=6, fragments=3, delay=2,
        codec=CODECS.get(codec, codec), quorum=2, grace=0.01,
    )  # fmt: skip
    taken = 0
    for meeting in range(3):
        for _ in range(int(steps) + 7 * ((RANK + meeting) % SIZE)):
            if deaths.get(RANK) == taken:
                os.kill(os.getpid(), signal.SIGKILL)
            take(model, optimizer, RANK, taken)
            taken += 1
        optimizer.take_global()
        stats = optimizer.stats()
        print("worker %d: meeting %d, step %d: %s" % (RANK, meeting, stats["step"], digest(model.parameters())))
    assert distance(model, wide()) > 0.05 and 0 <= stats["late"] <= stats["merges"], stats


def broadcasts_what_it_loads(*quorum):
    """Other weights, while a fragment is under way. Without dimensions, too. Worker 1 asks for them late, when the
    other one, which waits for nobody, may have trained on."""
    model, other = made(), made(width=12)
    for one in (model, other):
        one.register_parameter("scale", nn.Parameter(torch.tensor(1.0)))
    first = copy.deepcopy(model)
    with torch.no_grad():
        for weights in other.parameters():
            weights.add_(3.0)
    given = dict(zip(("quorum", "grace"), (int(quorum[0]), float(quorum[1])))) if quorum else {}
    if RANK == 1:
        Global.init = _slow(Global.init)
    optimizer = p3.torch.LocalSteps(OPTIMIZERS["sgd"](model.parameters()), model, every=2, delay=1, **given)
    assert has_bits_of(model, first)
    for step in range(2):
        take(model, optimizer, RANK, step)
    assert optimizer.stats()["under_way"] == 1
    model.load_state_dict(other.state_dict())
    optimizer.broadcast()
    assert has_bits_of(model, other)
    with optimizer.global_weights():
        assert has_bits_of(model, other)
    for step in range(2, 6):
        take(model, optimizer, RANK, step)
    optimizer.take_global()
    print("worker %d has what was loaded" % RANK)


def _slow(call):
    def slow(*arguments):
        time.sleep(0.05)
        return call(*arguments)

    return slow


def takes_the_global_weights():
    """Without a delay and with an alpha of 0 a merged fragment is the global one, to the bit, on all workers."""
    model = made()
    optimizer = p3.torch.LocalSteps(OPTIMIZERS["adamw"](model.parameters()), model, every=4)
    for step in range(12):
        take(model, optimizer, RANK, step)
        local = copy.deepcopy(model)
        with optimizer.global_weights():
            assert has_bits_of(model, local) == ((step + 1) % 4 == 0), step
    print("worker %d: %s" % (RANK, digest(model.parameters())))


def normalized():
    """Weights and BatchNorm's statistics are rank 0's at the start; the statistics each worker's own from there on."""
    torch.manual_seed(RANK)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    model[1].running_mean.fill_(RANK + 1.0)
    optimizer = p3.torch.LocalSteps(OPTIMIZERS["sgd"](model.parameters()), model, every=2)
    assert model[1].running_mean.tolist() == [1.0] * 5
    print("worker %d: first %s" % (RANK, digest(model.parameters())))
    for step in range(4):
        take(model, optimizer, RANK, step)
    print("worker %d: weights %s, statistics %s"
          % (RANK, digest(model.parameters()), digest([model[1].running_mean])))  # fmt: skip


def untrained(nesterov):
    """Gradients of zero: all workers send the weights that they have been given."""
    model, first = made(), made()
    given = {"momentum": 0.9, "nesterov": nesterov == "1"}
    optimizer = p3.torch.LocalSteps(torch.optim.SGD(model.parameters(), lr=0.1), model, every=1, outer=given)
    for step in range(200):
        optimizer.step()
        assert has_bits_of(model, first), step
    print("worker %d has not moved" % RANK)


def dropped():
    """Rank 0 collects garbage behind the first of two, which nobody has released."""
    gc.disable()
    model = made()
    for _ in range(2):
        optimizer = p3.torch.LocalSteps(OPTIMIZERS["sgd"](model.parameters()), model, every=4)
        for step in range(8):
            take(model, optimizer, RANK, step)
        optimizer.take_global()
        del optimizer
        if RANK == 0:
            gc.collect()
    print("worker %d has gone on" % RANK)


def mixed():
    """Weights and local steps of arrays in one process with torch's optimizers, each of which takes over the model."""
    session, model, ones = job.current(), made(), np.ones(3, np.float32)
    rule = {"name": "torch_sgd", "momentum": 0.0, "dampening": 0.0, "nesterov": False, "maximize": False,
            "multi_precision": False}  # fmt: skip
    weights, steps = Weights(session, {"w": ones}, rule), p3.LocalSteps(session, {"w": ones}, every=1, outer=PLAIN)
    for number, wrapper in enumerate(("LocalSteps", "DistributedOptimizer", "DistributedOptimizer", "LocalSteps")):
        given = {"every": 2} if wrapper == "LocalSteps" else {}
        optimizer = getattr(p3.torch, wrapper)(OPTIMIZERS["sgd"](model.parameters()), model, **given)
        before = digest(model.parameters())
        take(model, optimizer, RANK, number, clips=wrapper == "LocalSteps")
        weights.push("w", ones, 0.25)
        weights.end_step(0.25)
        steps.step({"w": steps.arrays["w"] + RANK})
        if wrapper == "DistributedOptimizer":
            optimizer.synchronize()
        assert digest(model.parameters()) != before
    assert weights["w"].tolist() == [0.0] * 3
    assert steps.take_global()["w"].tolist() == [1 + 4 * (SIZE - 1) / 2] * 3
    print("worker %d has trained all" % RANK)


def uneven(folder, of):
    """Worker 1 leaves out a step, as a scaler does; then `of`."""
    model = made()
    optimizer = p3.torch.LocalSteps(OPTIMIZERS["sgd"](model.parameters()), model, every=4, delay=2)
    for step in range(8 - RANK):
        take(model, optimizer, RANK, step)
    try:
        p3.torch.snapshot(8) if of == "snapshot" else getattr(optimizer, of)()
    except RuntimeError as error:
        print(error, flush=True)
    else:
        raise AssertionError("%s() has said nothing" % of)
    open(os.path.join(folder, "told %d" % RANK), "w").close()
    while not all(os.path.exists(os.path.join(folder, "told %d" % one)) for one in range(SIZE)):
        time.sleep(0.01)  # or the job would end before the other has been told


def ends_early():
    """Worker 1 takes a step less, and worker 0 waits for its weights in the last one."""
    model = made()
    optimizer = p3.torch.LocalSteps(OPTIMIZERS["sgd"](model.parameters()), model, every=4)
    session = job.current()
    for step in range(8 - RANK):
        if step == 7:
            session.wait_timeout_s = 4.0
        take(model, optimizer, RANK, step)
    while RANK == 1 and not session.has_ended:  # until worker 0 has waited long enough
        time.sleep(0.01)


def scaled():
    """As docs/local-steps.md has it, worker 1 has a step that its scaler leaves out, and no worker takes it."""
    model, scaler = made(), torch.amp.GradScaler("cpu", init_scale=16.0)
    optimizer = p3.torch.LocalSteps(OPTIMIZERS["sgd"](model.parameters()), model, every=4)
    for step in range(8):
        optimizer.zero_grad()
        optimizer.weigh(1 + RANK)  # anew where a step is left out
        scaler.scale(loss_of(model, RANK, step)).backward()
        if step == 2 and RANK == 1:
            model[0].weight.grad[0, 0] = float("inf")
        scaler.unscale_(optimizer)
        finite = all(one.grad.isfinite().all() for one in model.parameters() if one.grad is not None)
        left_out = p3.torch.all_reduce(torch.tensor([0.0 if finite else 1.0]))
        if left_out.item() == 0:
            scaler.step(optimizer)
        scaler.update()
    optimizer.take_global()
    print("worker %d has taken %d steps, %s" % (RANK, optimizer.stats()["step"], digest(model.parameters())))


# Saved and loaded


def saves(wrapper):
    """Four steps, with snapshots."""
    p3.torch.resume()
    model, given = made(), {"every": 4} if wrapper == "LocalSteps" else {}
    optimizer = getattr(p3.torch, wrapper)(OPTIMIZERS["sgd"](model.parameters()), model, **given)
    for step in range(4):
        take(model, optimizer, RANK, step, clips=wrapper == "LocalSteps")
        p3.torch.snapshot(step + 1)


def _optimizer_of(model, codec, kind="adamw"):
    return p3.torch.LocalSteps(
        OPTIMIZERS[kind](model.parameters()), model, every=6, fragments=3, delay=3,
        codec=CODECS.get(codec, codec), **(PATIENT if codec == "quorum" else {}),
    )  # fmt: skip


def loads(codec, saved_at):
    """From the state_dicts of a step on, another model and optimizer take the same steps, to the bit."""
    saved_at, model = int(saved_at), wide()
    optimizer = _optimizer_of(model, codec)
    for step in range(21):
        if step == saved_at:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        weigh(optimizer, codec, step)
        take(model, optimizer, RANK, step)
    expected, state = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
    optimizer.release()
    torch.manual_seed(RANK)
    model = wide()
    plain = OPTIMIZERS["adamw"](wide().parameters())
    plain.load_state_dict(saved[1])  # torch's own layout
    for number, one in saved[1]["state"].items():
        assert torch.equal(plain.state_dict()["state"][number]["exp_avg"], one["exp_avg"])
    optimizer = _optimizer_of(model, codec)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    for step in range(saved_at, 21):
        weigh(optimizer, codec, step)
        take(model, optimizer, RANK, step)
    assert has_bits_of(model, expected), distance(model, expected)
    again = optimizer.state_dict()["local_steps"]
    for part in ("global", "exact", "momentum"):
        assert again[part].keys() == state["local_steps"][part].keys()
        for name, array in again[part].items():
            assert torch.equal(array, state["local_steps"][part][name]), (part, name)
    print("worker %d goes on" % RANK)


def resumed(folder, codec, steps, die_at):
    """With snapshots; rank 0 is killed behind step `die_at` the first time. Prints a digest of all weights."""
    round, state = p3.torch.resume()
    model = wide()
    optimizer = _optimizer_of(model, codec)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.7)
    if state is not None:
        schedule.load_state_dict(state["schedule"])
    for step in range(round, int(steps)):
        weigh(optimizer, codec, step)
        take(model, optimizer, RANK, step)
        schedule.step()
        p3.torch.snapshot(step + 1, {"schedule": schedule.state_dict()})
        if step + 1 == int(die_at) and round == 0 and RANK == 0:
            this_job.die_once(job.current(), folder)
    local = digest(model.parameters())
    optimizer.take_global()
    print("worker %d began at %d and has %s of %s" % (RANK, round, digest(model.parameters()), local), flush=True)


# Codecs


def published(codec, share):
    """The exact global weight is no further from the one that all have than the last encoding was off."""
    model = wide()
    optimizer = p3.torch.LocalSteps(OPTIMIZERS["adamw"](model.parameters()), model, every=5, codec=codec)
    before, differs = None, False
    for step in range(40):
        take(model, optimizer, RANK, step)
        if (step + 1) % 5:
            continue
        state = optimizer.state_dict()["local_steps"]
        assert state["exact"].keys() == {"0.weight", "2.weight", "4.weight"}
        for name, exact in state["exact"].items():
            off = (exact - state["global"][name]).abs().max()
            if before is not None:
                assert off <= float(share) * (exact - before[name]).abs().max(), (step, name)
            differs |= bool(off > 0)
        before = state["global"]
    assert differs
    print("worker %d is near" % RANK)


def learns(codec, momentum):
    """What is lost after many steps is close to what exact exchanges have."""
    losses = []
    for given in (None, CODECS.get(codec, codec)):
        model = wide()
        optimizer = p3.torch.LocalSteps(
            OPTIMIZERS["adamw"](model.parameters()), model, every=10, fragments=3, delay=2, codec=given,
            outer={"lr": 0.7, "momentum": float(momentum)},
        )  # fmt: skip
        for step in range(300):
            take(model, optimizer, RANK, step)
        with optimizer.global_weights(), torch.no_grad():
            losses.append(sum(loss_of(model, 50, step) for step in range(50)).item() / 50)
        optimizer.release()
    with torch.no_grad():
        first = sum(loss_of(wide(), 50, step) for step in range(50)).item() / 50
    print("worker %d: %.5f of %.5f, %s %.5f" % (RANK, losses[0], first, codec, losses[1]))
    assert losses[0] < first / 10 and losses[1] < 1.1 * losses[0], (first, losses)
    print("worker %d has learned as much" % RANK)


# Time, and errors


def waits_at_the_deadline(folder):
    """Worker 1 sends a fragment when worker 0, which has gone on for `delay` steps, has begun to wait."""
    session, turns, model = job.current(), Turns(folder), made()
    optimizer = p3.torch.LocalSteps(OPTIMIZERS["sgd"](model.parameters()), model, every=4, delay=2)
    taken = []
    if RANK == 1:
        session.pushpull = turns.behind(session.pushpull, "waits")
    else:
        or_time_out = waiting.or_time_out

        def announced(*arguments):
            taken.append(optimizer.stats()["step"])
            turns.come("waits")
            or_time_out(*arguments)

        waiting.or_time_out = announced
    for step in range(7):
        take(model, optimizer, RANK, step)
    if RANK == 0:
        stats = optimizer.stats()
        assert taken and set(taken) == {6}, taken
        assert (stats["waits"], stats["merges"]) == (1, 1) and stats["waited_s"] > 0, stats
    print("worker %d has waited" % RANK)


def differs(what):
    """Worker 1 is given another schedule, or rate; then all are told, and begin again."""
    session, model = job.current(), made()
    former = p3.torch.LocalSteps(OPTIMIZERS["adamw"](model.parameters()), model, every=3)
    plain = OPTIMIZERS["sgd"](model.parameters())
    try:
        given = {"every": 4 + RANK} if what == "every" else {"every": 4, "outer": {"lr": 0.75 - 0.25 * RANK}}
        p3.torch.LocalSteps(plain, model, **given)
    except ValueError as error:
        print(error, flush=True)
    take(model, former, RANK, 0)
    former.release()
    stores = [session.new_store() for _ in range(5)]
    assert stores == list(range(5)), stores  # all that there were are free
    for store in stores:
        session.release(store)
    optimizer = p3.torch.LocalSteps(plain, model, every=4)
    for step in range(4):
        take(model, optimizer, RANK, step)
    print("worker %d: %s" % (RANK, digest(model.parameters())))


def loads_wrong(how):
    """Worker 1 is given a state that does not fit; nothing is loaded on any worker, and all go on."""
    model, other = made(), wide()
    optimizer = p3.torch.LocalSteps(OPTIMIZERS["adamw"](model.parameters()), model, every=4)
    for step in range(6):
        take(model, optimizer, RANK, step)
    saved, of_torch = optimizer.state_dict(), torch.optim.Optimizer.state_dict(optimizer)
    wrong = {
        "plain": of_torch,
        "step": {**saved, "local_steps": {**saved["local_steps"], "step": 5}},
        "shape": {**saved, "local_steps": {
            **saved["local_steps"], "global": {name: one.detach() for name, one in other.named_parameters()}}},
        "broken": {**saved, "local_steps": {}},
        "groups": {**saved, "param_groups": saved["param_groups"] * 2},
    }  # fmt: skip
    take(model, optimizer, RANK, 6)
    try:
        optimizer.load_state_dict(wrong[how] if RANK == 1 else saved)
    except (ValueError, KeyError) as error:
        print("refused: %r" % error, flush=True)
    assert optimizer.stats()["step"] == 7
    take(model, optimizer, RANK, 7)
    print("worker %d: %s" % (RANK, digest(model.parameters())))


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
