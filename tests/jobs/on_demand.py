"""on_demand.py FRONT_END STEPS: trains STEPS steps with snapshots, 0: until a signal ends it, a minute at most.

Says when it trains, and whether a snapshot was asked for while it did: the step behind it. Ends with a digest of the
weights. FRONT_END: numpy, torch or mxnet.
"""

import os
import sys
import time
import zlib

import numpy as np

LONG_S = 60


def samples(step, rank):
    return np.random.RandomState(1000 * step + rank).rand(6, 8).astype("float32")


def with_numpy():
    from p3.worker.session import Session

    session = Session.open()
    resumed = session.resume()
    key, weight = session.declare("w", (6, 8), "float32"), np.zeros((6, 8), "float32")
    value = session.resumed_value(key) if resumed.round else weight
    session.wait([session.init(key, value if session.rank == 0 else None, weight)])
    session.set_optimizer(0, {"name": "sgd", "momentum": 0.9, "clip_gradient": -1.0, "multi_precision": False})
    session.restore(key)

    def step(number):
        gradient = samples(number, session.rank)
        session.wait([session.pushpull(key, gradient, weight, lr=0.1)])

    return resumed.round, step, lambda number: session.snapshot(number, [key]), lambda: weight, session


def with_torch():
    import torch

    import p3.torch

    round, _ = p3.torch.resume()
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 4)
    optimizer = p3.torch.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), model)

    def step(number):
        optimizer.zero_grad()
        model(torch.from_numpy(samples(number, p3.torch.rank()))).square().mean().backward()
        optimizer.step()

    return round, step, p3.torch.snapshot, lambda: model.state_dict()["weight"].numpy(), p3.torch.start.job.current()


def with_mxnet():
    import mxnet as mx
    from mxnet import autograd, gluon

    import p3  # noqa: F401

    mx.random.seed(1)
    net = gluon.nn.Dense(4, in_units=8)
    net.initialize(mx.init.Normal(0.1))
    kv = mx.kv.create("p3_sync")
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.01}, kvstore=kv)
    round, _ = kv.resume(trainer=trainer)

    def step(number):
        with autograd.record():
            loss = (net(mx.nd.array(samples(number, kv.rank))) ** 2).mean()
        loss.backward()
        trainer.step(kv.num_workers)

    snapshot = lambda number: kv.snapshot(number, trainer=trainer)  # noqa: E731
    return round, step, snapshot, lambda: net.weight.data().asnumpy(), kv.store.session


def main():
    front_end, steps = sys.argv[1], int(sys.argv[2])
    number, step, snapshot, weight, session = globals()["with_" + front_end]()
    deadline, demanded = time.monotonic() + LONG_S, 0
    first = number
    while number < steps or (steps == 0 and time.monotonic() < deadline):
        step(number)
        if steps == 0:
            time.sleep(0.02)  # a step of a real training takes a while
        number += 1
        snapshot(number)
        if number == first + 3:
            print("trains with process %d" % os.getpid(), flush=True)
        if session.snapshots.counts["taken"] > demanded:
            demanded += 1
            print("taken by step %d" % number, flush=True)
    print("from %d to %d: %08x" % (first, number, zlib.crc32(weight().tobytes())), flush=True)


if __name__ == "__main__":
    main()
