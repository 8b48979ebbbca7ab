"""Sufficient factors in PyTorch: torch_factors.py SCENARIO

like-dense  models with and without p3.torch.factors, for each optimizer: parameters and states are alike; prints a
            digest for each
uneven      the last worker takes fewer steps, then joins
exact       weights that travel as factors are exact, and synchronize(exact=True) leaves them
refused     what cannot be, and says so
"""

import copy
import hashlib
import sys

import p3.torch
import torch
from torch import nn

BATCH, STEPS = 4, 6
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "rows-here": lambda parameters: torch.optim.Adamax(parameters, lr=1e-4, eps=1e-2),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, eps=1e-2),
}


def make_model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 48, bias=False), nn.Tanh(), nn.Linear(48, 10))


def batches(steps, rows=BATCH):
    generator = torch.Generator().manual_seed(7 + p3.torch.rank())
    for _ in range(steps):
        x, y = torch.randn(BATCH, 40, generator=generator), torch.randint(0, 10, (BATCH,), generator=generator)
        yield x[:rows], y[:rows]


def train(model, optimizer, data):
    for x, y in data:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def values(model, optimizer):
    optimizer.synchronize()
    states = [one for state in optimizer.state_dict()["state"].values() for _, one in sorted(state.items())]
    return [tensor.detach().clone() for tensor in (*model.parameters(), *states) if torch.is_tensor(tensor)]


def digest(tensors):
    return hashlib.sha256(b"".join(one.numpy().tobytes() for one in tensors)).hexdigest()[:16]


def distance(ones, others):
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in zip(ones, others))


def like_dense():
    for name, make in OPTIMIZERS.items():
        for synchronous in (False, True):
            ends = []
            for with_factors in (False, True):
                model = make_model()
                if with_factors:
                    p3.torch.factors(model, batch_size=BATCH, route="factors")
                settings = {"synchronous": synchronous, "max_grad_norm": 0.5 if synchronous else None}
                optimizer = p3.torch.DistributedOptimizer(make(model.parameters()), model, **settings)
                train(model, optimizer, batches(STEPS, BATCH - (name == "adamw")))  # a short batch is padded
                state = copy.deepcopy(optimizer.state_dict())
                train(model, optimizer, batches(2))
                optimizer.load_state_dict(state)  # each worker has its own
                train(model, optimizer, batches(1))
                ends.append(values(model, optimizer))
            assert len(ends[0]) == len(ends[1])
            far = distance(*ends)
            assert far <= 1e-5, (name, synchronous, far)
            print("like dense, digest", digest(ends[1]), flush=True)


def uneven():
    model = p3.torch.factors(make_model(), route="factors")
    optimizer = p3.torch.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()), model)
    train(model, optimizer, batches(STEPS - 2 * (p3.torch.rank() == p3.torch.size() - 1)))
    optimizer.join()
    print("joined, digest", digest(values(model, optimizer)), flush=True)


def exact():
    model = p3.torch.factors(make_model(), batch_size=BATCH, route="factors")
    sgd = OPTIMIZERS["sgd"](model.parameters())
    optimizer = p3.torch.DistributedOptimizer(sgd, model, compression={"down": "int8"})
    train(model, optimizer, batches(STEPS))
    optimizer.synchronize()
    before = [one.detach().clone() for one in model.parameters()]
    optimizer.synchronize(exact=True)
    assert all(torch.equal(one, was) for one, was in zip(model.parameters(), before))
    print("exact weights stay", flush=True)


def refused():
    def expect(text, call):
        try:
            call()
        except (ValueError, RuntimeError) as error:
            assert text in str(error), error
        else:
            raise AssertionError(text)

    def distribute(model, **settings):
        return p3.torch.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()), model, **settings)

    expect("it must be", lambda: p3.torch.factors(make_model(), route="fast"))
    shared = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    shared[1].weight = shared[0].weight
    assert type(p3.torch.factors(shared)[0]) is nn.Linear  # stays dense
    assert type(p3.torch.factors(nn.Linear(8, 8).double())) is nn.Linear
    model = p3.torch.factors(make_model(), route="factors")
    expect("staleness and factors (0.weight) exclude each other", lambda: distribute(model, staleness=2))

    # A copy, as for a moving average, computes as a plain layer with its own weight.
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied[0].weight.zero_()
    assert (copied[0](torch.ones(1, 40)) == copied[0].bias).all()

    optimizer = distribute(model)
    expect("has had no forward pass yet", optimizer.step)
    x, y = next(batches(1))

    model = p3.torch.factors(make_model(), route="factors")
    optimizer = distribute(model)
    nn.functional.cross_entropy(model(x), y).backward()
    expect("factors and gradients of several backward passes", nn.functional.cross_entropy(model(x), y).backward)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x) + model(x), y).backward()
    expect("times in one step", optimizer.step)

    # With a batch_size it has decided by then, and computes in float32; else it decides to stay dense.
    ends = []
    for how in ({"route": "factors", "batch_size": BATCH}, {}):
        model = p3.torch.factors(make_model(), **how)
        optimizer = distribute(model)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bool(how)):
            loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        ends.append(values(model, optimizer))
    assert distance(*ends) < 0.05  # but for the activations between, which are bfloat16

    model = p3.torch.factors(make_model(), route="factors", batch_size=2)
    optimizer = distribute(model)
    nn.functional.cross_entropy(model(x), y).backward()
    expect("a batch has 4 rows on a device, but its factors are of 2", optimizer.step)
    print("refused", flush=True)


SCENARIOS = {"like-dense": like_dense, "uneven": uneven, "exact": exact, "refused": refused}

if __name__ == "__main__":
    SCENARIOS[sys.argv[1]]()
