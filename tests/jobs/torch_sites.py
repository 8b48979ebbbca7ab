"""Jobs of sites, a function for each: torch_sites.py NAME ARGUMENT...

Without a launcher of torch's each worker that `p3 run` starts becomes a site here: two processes, which meet in a file,
and end as the first of them that fails. References are those of torch_local_steps.py, of workers with the batches of a
site's members together.
"""

import contextlib
import os
import signal
import sys
import tempfile
import time
import traceback

import torch_steps  # noqa: F401  (one thread)
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import p3.torch
from p3.torch.start import job
from p3.worker import open_sessions

MEMBERS = 2


def begin_site(size=None):
    """The default group, of which every `size` processes are a site; None: all are. Returns the site's group."""
    dist.init_process_group("gloo")
    if size is None:
        return dist.group.WORLD
    return dist.new_subgroups(size)[0]


def start_members(run):
    """`run` in each process of a site that is this process's children; ends as they do."""
    with tempfile.TemporaryDirectory() as folder:
        started = [_fork(run, rank, os.path.join(folder, "store")) for rank in range(MEMBERS)]
        ended = [os.waitstatus_to_exitcode(os.waitpid(one, 0)[1]) for one in started]
    sys.exit(max(ended, key=abs))


def _fork(run, rank, path):
    process = os.fork()
    if process > 0:
        return process
    status = 1
    try:
        dist.init_process_group("gloo", store=dist.FileStore(path, MEMBERS), rank=rank, world_size=MEMBERS)
        run()
        status = 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        open_sessions._close_all()  # as atexit would
        sys.stdout.flush()
        os._exit(status)


# Trainings


def wrapped(model):
    return DistributedDataParallel(model)


def take(model, ddp, optimizer, worker, step):
    """One local step of a site, each of whose members has a part of the batch of that worker."""
    dtype = next(model.parameters()).dtype
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1000 * worker + step), dtype=torch.float64).to(dtype)
    x = x.chunk(MEMBERS)[dist.get_rank() % MEMBERS]  # also where all sites have one default group
    optimizer.zero_grad()
    (ddp(x) - x[:, :3].sin()).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()


def weigh(optimizer, number):
    """A member has a third of a step's samples, and the other one the rest."""
    optimizer.weigh(number // 3 if dist.get_rank() == 0 else number - number // 3)


def enter():
    """As the worker that the site is; what torch_local_steps.py has for one."""
    p3.torch.site(dist.group.WORLD)
    import torch_local_steps

    return torch_local_steps


def say(text):
    """In a write of its own: the members of a site share a pipe, and print() may write the end of a line by itself."""
    os.write(sys.stdout.fileno(), (text + "\n").encode())


def member():
    return "site %d member %d" % (p3.torch.rank(), dist.get_rank())


def follows(kind):
    plain = enter()
    model = plain.made(torch.float64)
    ddp = wrapped(model)
    given = {"outer": {"lr": 0.7, "momentum": 0.9}}
    if kind == "diloco":
        given.update(every=10)
        theta, reference = None, plain.diloco(plain.made(torch.float64), 60, 10, 0.7, 0.9, True)
    else:
        given.update(every=9, fragments=3, delay=4, alpha=0.25)
        reference = plain.Streaming(
            torch.float64, ("0", "2", "4"), 9, 4, 0.25, 0.7, 0.9,
            **({"weighs": plain.samples} if kind == "weighed" else {}),
        )  # fmt: skip
    optimizer = p3.torch.LocalSteps(plain.OPTIMIZERS["adamw"](ddp.parameters()), ddp, **given)
    for step in range(60):
        if kind == "weighed":
            weigh(optimizer, plain.samples(plain.RANK, step))
        take(model, ddp, optimizer, plain.RANK, step)
        if kind == "diloco":
            if (step + 1) % 10 == 0:
                _, theta = next(reference)
                assert plain.distance(model, theta) < 1e-6, (step, plain.distance(model, theta))
            continue
        reference.step(step + 1)
        assert plain.distance(model, reference.locals[plain.RANK]) < 1e-6, step
    if kind != "diloco":
        with optimizer.global_weights():
            assert plain.distance(model, reference.theta) < 1e-6
        assert plain.distance(model, reference.locals[plain.RANK]) < 1e-6
    assert plain.distance(model, plain.made(torch.float64)) > 0.05  # it has trained
    stats = optimizer.stats()
    assert stats["step"] == 60 and stats["merges"] > 0, stats
    say("%s follows" % member())


def has_same_bits(codec):
    """Members begin with other weights, buffers and frozen weights, and have the first leader's."""
    plain = enter()
    torch.manual_seed(10 * p3.torch.rank() + dist.get_rank())
    model = nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))
    model[2].weight.requires_grad_(False)
    if dist.get_rank() > 0:
        model[1].running_mean.fill_(7.0)
    optimizer = p3.torch.LocalSteps(
        torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.01), model,
        every=6, fragments=2, delay=2, codec=None if codec == "none" else codec,
    )  # fmt: skip
    first = plain.digest([*model.parameters(), *model.buffers()])
    optimizer.release()
    ddp = wrapped(model)
    optimizer = p3.torch.LocalSteps(
        torch.optim.AdamW([one for one in ddp.parameters() if one.requires_grad], lr=0.01), ddp,
        every=6, fragments=2, delay=2, codec=None if codec == "none" else codec,
    )  # fmt: skip
    for step in range(20):
        take(model, ddp, optimizer, plain.RANK, step)
    local = plain.digest(model.parameters())
    with optimizer.global_weights():
        of_all = plain.digest(model.parameters())
    assert plain.digest(model.parameters()) == local
    optimizer.take_global()
    assert plain.digest(model.parameters()) == of_all
    if dist.get_rank() == 1:
        with torch.no_grad():
            model[0].weight.fill_(3.0)
    optimizer.broadcast()
    again = plain.digest(model.parameters())
    say("%s: first %s local %s global %s again %s" % (member(), first, local, of_all, again))


def loads(folder):
    """From what the leaders have saved, another model and optimizer take the same steps, to the bit."""
    plain = enter()
    path = os.path.join(folder, "saved %d" % plain.RANK)

    def made():
        model = plain.wide()
        ddp = wrapped(model)
        given = {"every": 6, "fragments": 3, "delay": 3, "codec": "bf16"}
        return model, ddp, p3.torch.LocalSteps(plain.OPTIMIZERS["adamw"](ddp.parameters()), ddp, **given)

    model, ddp, optimizer = made()
    for step in range(15):
        if step == 8 and dist.get_rank() == 0:
            torch.save([model.state_dict(), optimizer.state_dict()], path)
        take(model, ddp, optimizer, plain.RANK, step)
    expected = plain.digest(model.parameters())
    optimizer.release()
    model, ddp, optimizer = made()
    states = torch.load(path, weights_only=True)
    model.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    assert optimizer.stats()["step"] == 8
    for step in range(8, 15):
        take(model, ddp, optimizer, plain.RANK, step)
    assert plain.digest(model.parameters()) == expected
    say("%s goes on" % member())


def resumed(folder, steps, die_at):
    """With snapshots; the first site's leader is killed behind step `die_at` the first time."""
    plain = enter()
    import this_job

    round, state = p3.torch.resume()
    assert (state is None) == (round == 0) and (state is None or state["place"].tolist() == [round])
    model = plain.wide()
    if round > 0:  # whose weights are the snapshot's
        with torch.no_grad():
            model[0].weight.fill_(dist.get_rank())
    ddp = wrapped(model)
    optimizer = p3.torch.LocalSteps(plain.OPTIMIZERS["adamw"](ddp.parameters()), ddp, every=6, fragments=3, delay=3)
    for step in range(round, int(steps)):
        take(model, ddp, optimizer, plain.RANK, step)
        p3.torch.snapshot(step + 1, {"place": torch.tensor([step + 1])})
        if step + 1 == int(die_at) and round == 0 and (plain.RANK, dist.get_rank()) == (0, 0):
            this_job.die_once(job.current(), folder)
    say("%s began at %d and has %s" % (member(), round, plain.digest(model.parameters())))


# Errors


@contextlib.contextmanager
def said(folder):
    """Whatever ends this process is told in the folder, also if its output is lost."""
    try:
        yield
    except BaseException as error:
        with open(os.path.join(folder, member()), "w") as file:
            file.write("%s: %s" % (type(error).__name__, error))
        raise


def _trains(plain, every=2, **given):
    model = plain.made()
    ddp = wrapped(model)
    optimizer = p3.torch.LocalSteps(plain.OPTIMIZERS["sgd"](ddp.parameters()), ddp, every=every, **given)
    return model, ddp, optimizer


def fails(folder, how):
    plain = enter()
    with said(folder):
        model, ddp, optimizer = _trains(plain)
        for step in range(1000):
            take(model, ddp, optimizer, plain.RANK, step)
            if step == 4 and (plain.RANK, dist.get_rank()) == (0, 0):
                if how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                if how == "raises":
                    raise ValueError("the leader's script has a fault")
                if how == "server":
                    import this_job

                    os.kill(this_job.server(), signal.SIGKILL)
            if step == 4 and how == "other call" and plain.RANK == 0:
                optimizer.take_global() if dist.get_rank() == 0 else optimizer.broadcast()
            if step == 4 and how == "silent" and plain.RANK == 1:
                time.sleep(60)  # longer than the others wait
            if how == "server":
                time.sleep(0.01)


def differs(folder, how):
    """In what LocalSteps is given."""
    plain = enter()
    with said(folder):
        if how == "every":
            _trains(plain, every=2 + p3.torch.rank())
        if how == "model":
            made = plain.made if (p3.torch.rank(), dist.get_rank()) != (0, 1) else plain.wide
            model = made()
            p3.torch.LocalSteps(plain.OPTIMIZERS["sgd"](model.parameters()), model, every=2)


def refused():
    """What a site cannot have, and what its other members cannot."""
    plain = enter()
    p3.torch.site(dist.group.WORLD)  # again
    model, ddp, optimizer = _trains(plain)
    plainly = plain.made()
    calls = {
        "DistributedOptimizer": lambda: p3.torch.DistributedOptimizer(plain.OPTIMIZERS["sgd"](plainly.parameters()),
                                                                      plainly),
        "process_group": p3.torch.process_group,
        "DDP after": lambda: wrapped(model),
        "again": lambda: p3.torch.LocalSteps(plain.OPTIMIZERS["sgd"](model.parameters()), model, every=2),
        "of others": lambda: p3.torch.LocalSteps(
            plain.OPTIMIZERS["sgd"](plainly.parameters()),
            DistributedDataParallel(plainly, process_group=dist.new_group([dist.get_rank()],
                                                                          use_local_synchronization=True)), every=2),
        "other site": lambda: p3.torch.site(dist.new_group([dist.get_rank()], use_local_synchronization=True)),
    }  # fmt: skip
    if dist.get_rank() > 0:
        calls["all_reduce"] = lambda: p3.torch.all_reduce(torch.zeros(1))
    for name, call in calls.items():
        try:
            call()
        except (RuntimeError, ValueError) as error:
            say("%s: %s is refused: %s" % (member(), name, error))
        else:
            raise AssertionError("%s is not refused" % name)
    take(model, ddp, optimizer, plain.RANK, 0)


def several_workers(folder):
    """Each worker of `p3 run` is a process of one site, which it must not be."""
    dist.init_process_group("gloo", store=dist.FileStore(os.path.join(folder, "store"), 2),
                            rank=int(os.environ["P3_RANK"]), world_size=2)  # fmt: skip
    p3.torch.site(dist.group.WORLD)


# Under torchrun


def launched(size):
    """`size`: of a site; 0: a torchrun for each."""
    group = begin_site(int(size) or None)
    p3.torch.site(group)
    import torch_local_steps as plain

    model = plain.made()
    ddp = DistributedDataParallel(model, process_group=group)
    optimizer = p3.torch.LocalSteps(plain.OPTIMIZERS["sgd"](ddp.parameters()), ddp, every=3, codec="int8")
    for step in range(7):
        take(model, ddp, optimizer, plain.RANK, step)
    local = plain.digest(model.parameters())
    optimizer.take_global()
    place = p3.torch.rank(), p3.torch.size(), dist.get_rank(group)
    say("site %d of %d member %d: local %s global %s" % (*place, local, plain.digest(model.parameters())))


if __name__ == "__main__":
    run = globals()[sys.argv[1]]
    if run in (launched, several_workers):
        run(*sys.argv[2:])
    else:
        try:
            start_members(lambda: run(*sys.argv[2:]))
        except Exception:
            traceback.print_exc()
            raise
