"""Trainings by a loop with Accelerate, with P3 or DDP: python on_accelerate.py p3|ddp FOLDER NAME ...

Each worker writes what it has seen of every training to FOLDER/NAME.RANK.json.
"""

import contextlib
import os
import shutil
import sys
from datetime import timedelta

os.environ.setdefault("OMP_NUM_THREADS", "1")
import this_job
import torch
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import GradientAccumulationPlugin, InitProcessGroupKwargs, set_seed
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from trainer_jobs import error, main

if sys.argv[1] == "p3":
    import p3.torch
    import struck
    from former_ones import released
    from local_loop import LR, MEAN, OPTIONS, UNDER_WAY, in_a_loop, in_one_process, weights

    from p3.accelerate import Accelerator
    from p3.worker.session import current
else:
    from accelerate import Accelerator

SAMPLES = 13


def model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))


def data(count=SAMPLES, shuffle=True):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(count, 4, generator=generator)
    return DataLoader(TensorDataset(torch.arange(count), x, x[:, :3].argmax(1)), 2, shuffle=shuffle)


def trained(folder, steps=None, clip=1.0, resume=None, save=None, apart=False, epochs=2, before=None, **options):
    """Epochs, or so many steps, of which the checkpoint `save` is taken after the third."""
    set_seed(3)
    accelerator = Accelerator(cpu=True, **options)
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    if apart:
        net = accelerator.prepare(net)
        optimizer, batches, scheduler = accelerator.prepare(optimizer, data(), scheduler)
    else:
        optimizer, batches, net, scheduler = accelerator.prepare(optimizer, data(), net, scheduler)
    if resume is not None:
        accelerator.load_state(str(resume))
    losses, norms, seen, taken = [], [], [], 0
    for epoch in range(epochs):
        if before is not None:
            before(epoch)
        for index, x, y in batches:
            with accelerator.accumulate(net):
                loss = nn.functional.cross_entropy(net(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients and clip is not None:
                    norms.append(accelerator.clip_grad_norm_(net.parameters(), clip).item())
                elif accelerator.sync_gradients:
                    accelerator.clip_grad_value_(net.parameters(), 0.01)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            seen += index.tolist()
            losses.append(accelerator.gather(loss.detach()).tolist())
            taken += 1
            if taken == 3 and save is not None:
                accelerator.save_state(str(save))
            if taken == steps:
                break
        if taken == steps:
            break
    right, counted = 0, 0
    heldout = accelerator.prepare(data(7, shuffle=False))
    net.eval()
    for _, x, y in heldout:
        with torch.no_grad():
            guessed, wanted = accelerator.gather_for_metrics((net(x).argmax(1), y))
        right, counted = right + int((guessed == wanted).sum()), counted + len(wanted)
    return {
        "world": [accelerator.num_processes, accelerator.process_index],
        "losses": losses,
        "norms": norms,
        "seen": seen,
        "evaluated": [right, counted],
        "lr": scheduler.get_last_lr(),
        "weights": sum(one.detach().double().abs().sum().item() for one in net.parameters()),
    }


def plain(folder):
    return trained(folder)


def apart(folder):
    return trained(folder, apart=True)


def value_clipped(folder):
    return trained(folder, clip=None)


def accumulated(folder):
    return trained(folder, gradient_accumulation_steps=3)


def accumulated_each(folder):
    plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=True)
    return trained(folder, gradient_accumulation_plugin=plugin)


def halved(folder):
    return trained(folder, mixed_precision="bf16")


def compiled(folder):
    return trained(folder, dynamo_backend="eager")


class Sharpness(torch.optim.SGD):
    """As SAM: the gradient behind a step up is that of the step down, and step() is never called."""

    @torch.no_grad()
    def first_step(self):
        self.up = [0.05 * one.grad for one in self.param_groups[0]["params"]]
        torch._foreach_add_(self.param_groups[0]["params"], self.up)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        weights = self.param_groups[0]["params"]
        torch._foreach_sub_(weights, self.up)
        torch._foreach_sub_(weights, [0.1 * one.grad for one in weights])
        self.zero_grad()


def sharpness(folder):
    set_seed(3)
    accelerator = Accelerator(cpu=True)
    net = model()
    optimizer, batches, net = accelerator.prepare(Sharpness(net.parameters()), data(), net)
    losses = []
    for _ in range(2):
        for _, x, y in batches:
            for take in (optimizer.optimizer.first_step, optimizer.optimizer.second_step):
                loss = nn.functional.cross_entropy(net(x), y)
                accelerator.backward(loss)
                take()
                losses.append(accelerator.gather(loss.detach()).tolist())
    return {"losses": losses, "weights": sum(one.detach().double().abs().sum().item() for one in net.parameters())}


def begun(folder):
    told = trained(folder, steps=5, save=folder)
    return {**told, "files": sorted(path.name for path in folder.iterdir())}


def resumed(folder):
    return trained(folder, steps=2, resume=folder.parent / "begun")


def taken_over(folder):
    return trained(folder, steps=2, resume=folder.parents[1] / "p3" / "begun")


def two_models(folder):
    """As a GAN: two optimizers of their own, one of which trains through the other's model."""
    accelerator = Accelerator(cpu=True)
    one, other = model(), nn.Linear(3, 1)
    pair = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (one, other)]
    one, other, *pair = accelerator.prepare(one, other, *pair)
    rank, told = accelerator.process_index, []
    for step in range(4):
        x = torch.full((2, 4), 0.1 * (step + rank))
        for net, optimizer in zip((one, other), pair):
            for parameter in (*one.parameters(), *other.parameters()):
                parameter.requires_grad_(any(parameter is own for own in net.parameters()))
            loss = other(one(x)).square().mean()
            optimizer.zero_grad()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            told.append(loss.item())
    return {"losses": told}


def by_hand(between, steps=6, before=lambda net, step: None):
    """`before(net, step)` comes ahead of each forward pass, `between(accelerator, net, step)` between backward() and
    step(), which it leaves out by returning False."""
    accelerator = Accelerator(cpu=True)
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    net, optimizer = accelerator.prepare(net, optimizer)
    rank, told = accelerator.process_index, []
    for step in range(steps):
        before(net, step)
        x = torch.linspace(-1, 1, 8).view(2, 4) * (step + 1 + rank)
        loss = net(x).square().mean()
        optimizer.zero_grad()
        accelerator.backward(loss)
        if between(accelerator, net, step) is not False:
            optimizer.step()
        told.append(loss.item())
    return {"losses": told, "weights": sum(one.detach().double().abs().sum().item() for one in net.parameters())}


def looked_at(folder):
    """Before clipping and behind it, by rank 0 in every step and by others in every other one; and who clips again sees
    the norm of what is clipped."""
    found = []

    def between(accelerator, net, step):
        looks = step % 2 == 0 or accelerator.process_index == 0
        for _ in range(2):
            if looks:
                found.append([one.grad.double().norm().item() for one in net.parameters()])
            if step != 4:
                found.append(accelerator.clip_grad_norm_(net.parameters(), 0.5 if step % 3 else 1e9).item())

    return {**by_hand(between), "found": found}


def changed(folder):
    """In place, also past torch's notice, by others or by none; and clipped behind that."""

    def between(accelerator, net, step):
        first, *others = net.parameters()
        if step == 1:
            first.grad.data.mul_(3)
        elif step == 2:
            first.grad = None
        elif step == 3:
            others[0].grad = others[0].grad * 2
        if step % 2:
            accelerator.clip_grad_norm_(net.parameters(), 0.5)
        if step == 4:
            for one in others:
                one.grad += 0.1

    return by_hand(between)


def left_out(folder):
    """A step, by its norm."""

    def between(accelerator, net, step):
        return accelerator.clip_grad_norm_(net.parameters(), 1.0).item() < (0.0 if step in (0, 3) else 1e9)

    return by_hand(between)


def written(folder):
    """Weights, between two steps."""

    def clamp(net, step):
        for one in net.parameters():
            one.data.clamp_(-0.3, 0.3)

    return by_hand(lambda accelerator, net, step: accelerator.clip_grad_norm_(net.parameters(), 1.0), before=clamp)


def never_waits(folder):
    """In the third step the server stands still from before the forward pass on."""
    with contextlib.ExitStack() as frozen:
        ended = []

        def freeze(net, step):
            frozen.close()
            ended.append(step - 1)
            if step == 2:
                net(torch.ones(1, 4))  # all weights have come
                frozen.enter_context(this_job.frozen_server())

        by_hand(lambda accelerator, net, step: accelerator.clip_grad_norm_(net.parameters(), 1.0), 4, freeze)
    return {"ended": ended[-1] + 1}


def uneven(folder):
    """The first worker has one batch more; DDP joins on GPUs alone, so that P3's weights are compared with its own."""
    accelerator = Accelerator(cpu=True)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net, optimizer, batches = accelerator.prepare(net, optimizer, data(6))
    steps = 0
    with accelerator.join_uneven_inputs([net], even_batches=False):
        for _, x, y in batches:
            loss = nn.functional.cross_entropy(net(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    weights = [one.detach().flatten() for one in net.parameters()]
    return {"steps": steps, "weights": accelerator.gather(torch.cat(weights).unsqueeze(0)).tolist()}


def locally(steps=8, save=None, resume=None, evaluate_at=(3, 4), local_steps=None):
    """Local steps, of two batches each. Those of a resumed training begin behind the fourth."""
    set_seed(3)
    accelerator = Accelerator(cpu=True, local_steps=local_steps or OPTIONS, gradient_accumulation_steps=2)
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    net, optimizer, batches, scheduler = accelerator.prepare(net, optimizer, data(shuffle=False), scheduler)
    told, taken = {"losses": [], "norms": [], "evaluated": []}, 0
    if resume is not None:
        accelerator.load_state(str(resume))
        taken = UNDER_WAY
        told["loaded"] = weights(net)
        with accelerator.global_weights():
            told["global"] = weights(net)
    seen = []
    while taken < steps:
        for index, x, y in batches:
            with accelerator.accumulate(net):
                loss = nn.functional.cross_entropy(net(x), y)
                accelerator.backward(loss)
                told["losses"].append(loss.item() / 2)
                seen.append(index.tolist())
                if accelerator.sync_gradients:
                    told["norms"].append(accelerator.clip_grad_norm_(net.parameters(), 0.5).item())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            taken += 1
            if taken in evaluate_at:
                with accelerator.global_weights(), torch.no_grad():
                    told["evaluated"].append(held_out(net))
            if save is not None and taken == UNDER_WAY:
                accelerator.save_state(str(save))
    accelerator.take_global()
    return {**told, "weights": weights(net)}, seen


def held_out(net):
    _, x, y = next(iter(DataLoader(data(7).dataset, 7)))
    return nn.functional.cross_entropy(net(x), y).item()


def local(folder):
    told, seen = locally()
    _, x, y = data().dataset.tensors
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    # Accelerate has a scheduler take as many steps as there are workers.
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    plain = in_a_loop(
        net, optimizer, scheduler, list(zip(seen[::2], seen[1::2])),
        lambda net, batch, batches: nn.functional.cross_entropy(net(x[batch]), y[batch]) / len(batches),
        held_out, (3, UNDER_WAY), 0.5,
    )  # fmt: skip
    return {"trained": told, "plain": plain}


def local_begun(folder):
    told, _ = locally(save=folder, evaluate_at=[UNDER_WAY])
    net = model()
    net.load_state_dict(load_file(str(folder / "model.safetensors")))
    with torch.no_grad():
        told.update({"saved": held_out(net), "global": weights(net)})
    return {**told, "files": sorted(path.name for path in folder.iterdir() if path.name.startswith("p3"))}


def local_resumed(folder):
    return locally(resume=folder.parent / "local_begun")[0]


def local_lost(folder):
    """Worker 1 has no part of its own any more, and begins with the global weights."""
    own = folder / ("of_%s" % os.environ.get("RANK", "0"))
    shutil.copytree(folder.parent / "local_begun", own)
    (own / "p3_local_1.pt").unlink()
    return locally(resume=own)[0]


def local_of_other(folder):
    """From a checkpoint of a training that has no local steps."""
    told, _ = locally(steps=6, resume=folder.parent / "begun")
    net = model()
    net.load_state_dict(load_file(str(folder.parent / "begun" / "model.safetensors")))
    return {**told, "saved": weights(net)}


# The samples of each worker's batches, of which two are a step.
UNEVEN = [[[0, 1, 2], [3], [4, 5], [6], [0, 4], [1, 2, 3], [5], [6]],
          [[7], [8], [9, 10, 11, 12], [7, 8], [10], [9], [11], [12]]]  # fmt: skip


def local_weighed(folder):
    accelerator = Accelerator(cpu=True, local_steps=MEAN, gradient_accumulation_steps=2)
    net = model()
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), LR))
    _, x, y = data().dataset.tensors
    for batch in UNEVEN[accelerator.process_index]:
        with accelerator.accumulate(net):
            accelerator.weigh(torch.tensor(len(batch)))
            accelerator.backward(nn.functional.cross_entropy(net(x[batch]), y[batch]))
            optimizer.step()
            optimizer.zero_grad()
    accelerator.take_global()
    steps = [list(zip(one[::2], one[1::2])) for one in UNEVEN]

    def loss_of(net, batch, batches):
        return nn.functional.cross_entropy(net(x[batch]), y[batch]) / len(batches)

    return {"samples": [weights(net), *(in_one_process(model(), steps, loss_of, count) for count in (len, bool))]}


def local_lossy(folder):
    """In a job that is to go on without lost workers."""
    return {"refused": error(locally)}


def sweep(folder):
    """Trainings of new models, one behind the other, of which the last is prepared again and goes on."""

    def steps(accelerator, net, optimizer):
        for _, x, y in data(8, shuffle=False):
            with accelerator.accumulate(net):
                if accelerator.weighs:
                    accelerator.weigh(len(x))
                accelerator.backward(nn.functional.cross_entropy(net(x), y))
                optimizer.step()
                optimizer.zero_grad()
        accelerator.take_global()
        return weights(net)

    def of(local_steps):
        accelerator, optimizers = Accelerator(cpu=True, local_steps=local_steps), []
        accelerator.weighs, found = local_steps is not None, {"weights": [], "released": []}
        for _ in range(3):
            net = model()
            net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.05))
            optimizers.append(optimizer.optimizer)
            found["weights"].append(steps(accelerator, net, optimizer))
            found["released"].append(released(optimizers))
            accelerator.free_memory()
        net, optimizer = accelerator.prepare(net, optimizer)
        found["weights"].append(steps(accelerator, net, optimizer))
        found["released"].append(released(optimizers))
        return found

    return {"shared": of(None), "local": of(OPTIONS)}


def losing(folder):
    """Servers die, and may come back before each epoch."""

    def mark(epoch):
        if epoch == 0:
            struck.begin(current())
        struck.pace(current())
        p3.torch.members(epoch)

    return {**trained(folder, epochs=100, before=mark), "changes": current().servers.changes}


def waiting(folder):
    """How many seconds a barrier has, before and behind what the script says of the group."""
    Accelerator()
    group = torch.distributed.group.WORLD._get_backend(torch.device("cpu"))
    found = [group.options._timeout.total_seconds()]
    Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(hours=2))])
    return [*found, group.options._timeout.total_seconds()]


def refused(folder):
    import accelerate
    from torch.nn.parallel import DistributedDataParallel

    def wrapped_by_p3():
        net = model()
        return p3.torch.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net), net

    def wrapped_by_local_steps():
        net = model()
        return p3.torch.LocalSteps(torch.optim.SGD(net.parameters(), lr=0.1), net, every=2), net

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = model()
    prepared = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))[0]

    def clip():
        with accelerator.accumulate(prepared):
            accelerator.clip_grad_norm_(prepared.parameters(), 1.0)

    def clip_uneven():
        accelerator.sync_gradients = True
        with accelerator.join_uneven_inputs([net], even_batches=False):
            accelerator.clip_grad_norm_(prepared.parameters(), 1.0)

    def leave_out_uneven():
        one, net = Accelerator(cpu=True), model()
        net, optimizer = one.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        with one.join_uneven_inputs([net], even_batches=False):
            one.backward(net(torch.ones(1, 4)).sum())
            optimizer.zero_grad()

    def join_two():
        two, nets = Accelerator(cpu=True), [model(), model()]
        two.prepare(*nets, *(torch.optim.SGD(one.parameters(), lr=0.1) for one in nets))
        with two.join_uneven_inputs(nets, even_batches=False):
            pass

    def join_locally():
        with Accelerator(cpu=True, local_steps=OPTIONS).join_uneven_inputs([], even_batches=False):
            pass

    def compress_locally():
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        optimizer.param_groups[0]["compression"] = "int8"
        Accelerator(cpu=True, local_steps=OPTIONS).prepare(net, optimizer)

    def quorum_locally():
        net = model()
        Accelerator(cpu=True, local_steps={**OPTIONS, "quorum": 1, "grace": 0}).prepare(
            net, torch.optim.SGD(net.parameters(), lr=0.1)
        )

    def prepared_locally():
        one = Accelerator(cpu=True, local_steps=MEAN)
        net = model()
        one.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        return one

    def weigh_twice():
        one = prepared_locally()
        one.weigh(2)
        one.weigh(2)

    plain = model()
    return {
        "fsdp": error(lambda: Accelerator(fsdp_plugin=accelerate.FullyShardedDataParallelPlugin())),
        "parallelism": error(lambda: Accelerator(parallelism_config=accelerate.ParallelismConfig())),
        "fp16": error(lambda: Accelerator(mixed_precision="fp16")),
        "P3's optimizer": error(lambda: accelerator.prepare(*wrapped_by_p3())),
        "DDP before P3": error(lambda: accelerator.prepare(DistributedDataParallel(model()))),
        "DDP after P3": error(lambda: DistributedDataParallel(prepared)),
        "no model": error(lambda: accelerator.prepare(torch.optim.SGD(plain.parameters(), lr=0.1))),
        "clip": error(clip),
        "clip uneven": error(clip_uneven),
        "leave out uneven": error(leave_out_uneven),
        "two optimizers uneven": error(join_two),
        "local uneven": error(join_locally),
        "local options": error(lambda: locally(local_steps=3)),
        "local every": error(lambda: locally(local_steps={"every": 0})),
        "local compression": error(compress_locally),
        "local quorum": error(quorum_locally),
        "local given": error(lambda: accelerator.prepare(*wrapped_by_local_steps())),
        "weigh": error(lambda: prepared_locally().weigh(float("nan"))),
        "weigh twice": error(weigh_twice),
        "weigh alone": error(lambda: accelerator.weigh(2)),
        "weigh early": error(lambda: Accelerator(cpu=True, local_steps=MEAN).weigh(2)),
        "weigh option": error(lambda: Accelerator(cpu=True, local_steps={**MEAN, "weigh": True})),
    }


def reset():
    """Or all trainings had the precision of the first."""
    AcceleratorState._reset_state()
    GradientState._reset_state()


if __name__ == "__main__":
    main(globals(), reset)
