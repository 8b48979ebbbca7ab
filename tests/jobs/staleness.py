"""Workers that are rounds apart: staleness.py clocks KIND STALENESS ROUNDS, or staleness.py train KIND DIRECTORY.

`clocks`: with SGD and a learning rate of 1, worker w pushes -1 into row w, so that what each receives tells whose
pushes it holds. Fails if a row is not as it must be. `train`: a small net; writes DIRECTORY/RANK.npz.
"""

import math
import sys
import time

import numpy as np

KEYS = {"small": 1, "large": 30_000, "loose": 5}  # elements of a row; "loose" has a staleness of its own
LONGEST_S = 0.02


def clocks(kind, staleness, rounds):
    import p3  # noqa: F401
    import mxnet as mx

    kv = mx.kv.create(kind)
    staleness = math.inf if staleness == "inf" else int(staleness)
    kv.set_staleness(staleness)
    kv.set_staleness(math.inf, keys="loose")
    rank, workers = kv.rank, kv.num_workers
    random = np.random.RandomState(rank)
    outs = {key: mx.nd.zeros((workers, width)) for key, width in KEYS.items()}
    for key, out in outs.items():
        kv.broadcast(key, mx.nd.zeros(out.shape), out)
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=1.0, rescale_grad=1.0))
    lead, alone = 0, int(min(staleness, 5))
    if rank > 0:
        kv._barrier()  # until worker 0 has taken as many rounds as it may without the others
    for round in range(1, int(rounds) + 1):
        for key in random.permutation(list(KEYS)):
            gradient = np.zeros(outs[key].shape, np.float32)
            gradient[rank] = -1
            kv.pushpull(key, mx.nd.array(gradient), out=outs[key])
        time.sleep(random.uniform(0, LONGEST_S))  # so that now this worker is ahead, and now another one
        for key, out in outs.items():
            allowed = math.inf if key == "loose" else staleness
            rows = out.asnumpy()
            assert (rows[rank] == round).all(), (key, round, rows)
            assert (rows >= round - allowed).all() and (rows <= int(rounds)).all(), (key, round, rows)
            lead = max(lead, round - rows.min())
        if rank == 0 and round == alone:
            kv._barrier()
    kv.join()
    for key, out in outs.items():
        assert (out.asnumpy() == int(rounds)).all(), (key, out.asnumpy())
    print(f"worker {rank} was up to {lead:g} rounds ahead", flush=True)


def train(kind, directory):
    import p3  # noqa: F401
    import mxnet as mx
    import uneven
    from mxnet import gluon

    kv = mx.kv.create(kind)
    net = uneven.make_net(gluon, mx)
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.01}, kvstore=kv)
    losses = []
    for step in range(40):
        x, _ = uneven.batch(mx, kv.rank, 0, step)
        y = x[:, :2] - x[:, 1:]
        with mx.autograd.record():
            loss = gluon.loss.L2Loss()(net(x), y)
        loss.backward()
        trainer.step(uneven.BATCH * kv.num_workers)
        losses.append(loss.mean().asscalar())
    kv.join()
    weights = {name: parameter.data().asnumpy() for name, parameter in net.collect_params().items()}
    np.savez(f"{directory}/{kv.rank}.npz", losses=losses, **weights)


if __name__ == "__main__":
    {"clocks": clocks, "train": train}[sys.argv[1]](*sys.argv[2:])
