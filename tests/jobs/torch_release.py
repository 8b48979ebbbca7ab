"""Jobs of p3.torch whose optimizers are released: torch_release.py NAME ARGUMENT..., one function for each."""

import copy
import math
import os
import signal
import sys

import numpy as np
import this_job
import torch
from torch import nn

import p3.torch
from p3.frontend import waiting
from p3.torch.start import job


class Net(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        self.table = nn.Embedding(30, 6, sparse=sparse)
        self.layers = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 5))

    def forward(self, x):
        return self.layers(self.table(x))


def batch(trial, step, rank):
    return torch.randint(0, 30, (8,), generator=torch.Generator().manual_seed(1000 * trial + 10 * step + rank))


def loss_of(model, x):
    return model(x).square().mean()


# Ten trials: how each makes its optimizer, and what it asks of P3.
TRIALS = [
    (lambda ps: torch.optim.SGD(ps, lr=0.2, momentum=0.9), {}),
    (lambda ps: torch.optim.Adam(ps, lr=0.01), {}),
    (lambda ps: torch.optim.Adamax(ps, lr=0.01), {}),
    (lambda ps: torch.optim.AdamW(ps, lr=0.01), {"synchronous": True}),
    (lambda ps: torch.optim.Adagrad(ps, lr=0.1), {}),
    (lambda ps: torch.optim.SGD(ps, lr=0.1), {"max_grad_norm": 1e6}),
    (lambda ps: torch.optim.Adam(ps, lr=0.02, betas=(0.5, 0.9)), {}),
    (lambda ps: torch.optim.RMSprop(ps, lr=0.01), {}),
    (lambda ps: torch.optim.SGD(ps, lr=0.3), {"staleness": 0}),
    (lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.5, nesterov=True), {}),
]
STEPS = 4


def kept():
    """What the servers have: keys, and bytes of values and states."""
    p3.torch.barrier()  # nobody is in the next trial yet
    found = [(one["keys"], one["value_bytes"]) for one in job.current().server_counters()]
    p3.torch.barrier()
    return found


def is_plain(model):
    """Nothing of P3 is left on it."""
    hooks = [name for module in model.modules() for name, kept in vars(module).items() if "hook" in name and kept]
    of_tensors = [one for one in model.parameters() if one._post_accumulate_grad_hooks or vars(one)]
    return not hooks and not of_tensors and "zero_grad" not in vars(model)


def trials(releases):
    """On one model, one after the other: each as plain torch on the joined batch. Every other one is released only by
    the next, unless all `releases`."""
    rank, size = p3.torch.rank(), p3.torch.size()
    torch.manual_seed(rank)  # rank 0's weights count
    model = Net(sparse=False)
    first = copy.deepcopy(model.state_dict())
    before, former = kept(), None
    for trial, (make, options) in enumerate(TRIALS):
        model.load_state_dict(first)
        optimizer = p3.torch.DistributedOptimizer(make(model.parameters()), model, **options)
        if former is not None:
            try:
                former.step()
                raise AssertionError("a former optimizer has taken a step")
            except RuntimeError as error:
                assert "another DistributedOptimizer has taken over table.weight" in str(error), error
        reference = Net(sparse=False)
        reference.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
        plain = make(reference.parameters())
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, batch(trial, step, rank)).backward()
            optimizer.step()
            plain.zero_grad()
            (sum(loss_of(reference, batch(trial, step, other)) for other in range(size)) / size).backward()
            plain.step()
        assert kept() != before
        if int(releases) or trial % 2 or trial == len(TRIALS) - 1:
            optimizer.release()
            assert is_plain(model), trial
            assert kept() == before, (trial, kept(), before)
            former = None
            model.zero_grad()
            loss_of(model, batch(trial, 9, 0)).backward()  # and goes on as plain torch, with the states that it has
            again = make(model.parameters())
            again.load_state_dict(optimizer.state_dict())
            plain.zero_grad()
            loss_of(reference, batch(trial, 9, 0)).backward()
            again.step()
            plain.step()
        else:
            optimizer.synchronize()
            former = optimizer
        for (name, weight), expected in zip(model.named_parameters(), reference.parameters()):
            torch.testing.assert_close(weight, expected, rtol=2e-4, atol=2e-5, msg="%d %s" % (trial, name))
    print("worker %d: all trials are as plain torch" % rank, flush=True)


def kinds():
    """What else a store's keys may be: rows, that move; factors; compressed; apart; and a step that was broken off."""
    rank = p3.torch.rank()
    before = kept()

    def train(model, optimizer, steps=3):
        for step in range(steps):
            optimizer.zero_grad()
            loss_of(model, batch(0, step, rank)).backward()
            optimizer.step()

    for options, has_rows, has_factors in (
        ({}, True, False), ({"staleness": 2}, True, False), ({"staleness": math.inf}, False, False),
        ({"compression": {"type": "2bit", "threshold": 0.01}}, False, False),
        ({"compression": {"type": "dgc", "ratio": 0.1}}, False, False), ({}, False, True), ({}, False, True),
    ):  # fmt: skip
        torch.manual_seed(1)
        model = Net(has_rows)
        if has_factors:
            p3.torch.factors(model, route="factors")
        optimizer = p3.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, **options)
        train(model, optimizer)
        if has_rows and not options:
            session = job.current()
            key = next(one for one in session.keys._declared.values() if one.sparse)
            if rank == 0:
                session.repartition(key, 5)
            p3.torch.barrier()
            train(model, optimizer, 1)  # perhaps behind it the rows move
            if rank == 0 and not session.is_moving(key):
                session.repartition(key, 7)  # and that no round will ever begin
        if not has_factors:  # a step without its step()
            optimizer.zero_grad()
            optimizer.synchronize()
            weights = [one.detach().clone() for one in model.parameters()]
            loss_of(model, batch(0, 8, rank)).backward()
        optimizer.release()
        if not has_factors and not options.get("staleness"):
            assert all(torch.equal(one, other) for one, other in zip(weights, model.parameters())), options
        assert kept() == before, (options, kept())
        own = torch.cat([one.detach().flatten() for one in model.parameters()]).numpy()
        np.testing.assert_array_equal(own, of_rank_0(own))
        loss_of(model, batch(0, 5, 0)).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    print("worker %d: nothing is left of any kind" % rank, flush=True)


def of_rank_0(array):
    """Compares the workers: a store of its own, released as well."""
    session = job.current()
    store = session.new_store()
    key = session.declare("compared", array.shape, "float32", store)
    value = waiting.from_rank_0(session, key, array)
    session.release(store)
    return value


def missing(how):
    """Worker 0 releases; worker 1 does something else."""
    model = Net(False)
    optimizer = p3.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    loss_of(model, batch(0, 0, 0)).backward()
    optimizer.step()
    optimizer.synchronize()
    p3.torch.barrier()
    if p3.torch.rank() == 0:
        if how in ("joins", "waits"):
            job.current().wait_timeout_s = 2.0
        optimizer.release()
        print("nobody was missed", flush=True)
    elif how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "joins":
        optimizer.join()
    elif how == "waits":
        signal.pause()
    # or it leaves


def phases(folder, die_at):
    """Two phases of 4 steps with snapshots, the second with another optimizer of some of the weights. Rank 0 is killed
    behind step `die_at` the first time. Prints a digest of the weights."""
    import zlib

    rank, (round, state) = p3.torch.rank(), p3.torch.resume()
    torch.manual_seed(5)
    model = Net(False)

    def second():
        return torch.optim.Adam(model.layers.parameters(), lr=0.01)

    if round < 4:
        optimizer = p3.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.2, momentum=0.9), model)
    else:
        model.table.load_state_dict(state["table"])  # which the second phase leaves as it is
        optimizer = p3.torch.DistributedOptimizer(second(), model)
    for step in range(round, 8):
        if step == 4 and round < 4:
            optimizer.release()
            optimizer = p3.torch.DistributedOptimizer(second(), model)
        optimizer.zero_grad()
        loss_of(model, batch(1, step, rank)).backward()
        optimizer.step()
        p3.torch.snapshot(step + 1, {"table": model.table.state_dict()})
        if step + 1 == int(die_at) and rank == 0:
            this_job.die_once(job.current(), folder)
    optimizer.release()
    digest = zlib.crc32(b"".join(one.detach().numpy().tobytes() for one in model.parameters()))
    print("worker %d began at %d and has %08x" % (rank, round, digest), flush=True)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
