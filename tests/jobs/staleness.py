"""Workers that are rounds apart: staleness.py clocks KIND STALENESS ROUNDS [LAST], staleness.py train KIND DIRECTORY,
or staleness.py in_turn ROUNDS.

`clocks`: with SGD and a learning rate of 1, worker w pushes -1 into row w, so that what each receives tells whose
pushes it holds; of the keys of rows into its row of block b in every round that b + 1 divides, so that no two rounds
change the same rows. Fails if a row is not as it must be. Worker 1 is killed after round LAST.
`train`: a small net with an embedding; writes DIRECTORY/RANK.npz.
`in_turn`: they push one after the other. MXNet's optimizers, in one process that takes all their gradients in that
order, must have the same weights.
"""

import math
import os
import signal
import sys
import time

import numpy as np

KEYS = {"small": 1, "large": 30_000, "loose": 5}  # elements of a row; "loose" has a staleness of its own
ROWS = {"held": "default", "served": "row_sparse"}  # of a weight that each worker holds, and that stays on the servers
BLOCKS, WIDTH = 7, 40
LONGEST_S = 0.02


def touched(rank, workers, round):
    """The rows that a worker pushes in this round, of the keys of rows."""
    return [block * workers + rank for block in range(BLOCKS) if round % (block + 1) == 0]


def clocks_of(rows, workers):
    """(blocks, workers): how often each worker has touched its row of each block."""
    rows = rows.asnumpy().reshape(BLOCKS, workers, WIDTH)
    assert (rows == rows[:, :, :1]).all(), "a row is torn"
    return rows[:, :, 0]


def check_rows(rows, rank, round, allowed, rounds):
    """Of one worker after its round, whoever has touched them."""
    each = 1 + np.arange(BLOCKS)
    assert (rows[:, rank] == round // each).all(), (round, rows)
    if allowed < round:
        assert (rows >= ((round - allowed) // each)[:, None]).all(), (round, rows)
    assert (rows <= (rounds // each)[:, None]).all(), (round, rows)


def clocks(kind, staleness, rounds, last=0):
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
    rows = {key: mx.nd.zeros((BLOCKS * workers, WIDTH)).tostype(stype) for key, stype in ROWS.items()}
    every_row = mx.nd.arange(BLOCKS * workers)
    for key, out in rows.items():
        kv.init(key, out)
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=1.0, rescale_grad=1.0))
    lead, alone = 0, int(min(staleness, 5))
    if rank > 0:
        kv._barrier()  # until worker 0 has taken as many rounds as it may without the others
    for round in range(1, int(rounds) + 1):
        for key in random.permutation(list(KEYS)):
            gradient = np.zeros(outs[key].shape, np.float32)
            gradient[rank] = -1
            kv.pushpull(key, mx.nd.array(gradient), out=outs[key])
        ids = touched(rank, workers, round)
        for key in random.permutation(list(ROWS)):
            gradient = -np.ones((len(ids), WIDTH), np.float32)
            kv.push(key, mx.nd.sparse.row_sparse_array((gradient, ids), shape=rows[key].shape, dtype="float32"))
        kv.pull("held", out=rows["held"], ignore_sparse=False)
        kv.row_sparse_pull("served", out=rows["served"], row_ids=every_row)
        if rank == 1 and round == int(last):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(random.uniform(0, LONGEST_S))  # so that now this worker is ahead, and now another one
        for key, out in outs.items():
            allowed = math.inf if key == "loose" else staleness
            now = out.asnumpy()
            assert (now[rank] == round).all(), (key, round, now)
            assert (now >= round - allowed).all() and (now <= int(rounds)).all(), (key, round, now)
            lead = max(lead, round - now.min())
        for out in rows.values():
            check_rows(clocks_of(out, workers), rank, round, staleness, int(rounds))
        if rank == 0 and round == alone:
            kv._barrier()
    kv.join()
    for key, out in outs.items():
        assert (out.asnumpy() == int(rounds)).all(), (key, out.asnumpy())
    kv.row_sparse_pull("served", out=rows["served"], row_ids=every_row)
    for key, out in rows.items():
        assert (clocks_of(out, workers).T == int(rounds) // (1 + np.arange(BLOCKS))).all(), (key, out)
    print(f"worker {rank} was up to {lead:g} rounds ahead", flush=True)


def train(kind, directory):
    import p3  # noqa: F401
    import mxnet as mx
    import uneven
    from mxnet import gluon

    kv = mx.kv.create(kind)
    net = uneven.make_net(gluon, mx)
    words = gluon.nn.Embedding(9, 3, sparse_grad=True, prefix="words_")  # a key of rows
    words.initialize(mx.init.Zero())
    parameters = net.collect_params()
    parameters.update(words.collect_params())
    trainer = gluon.Trainer(parameters, "adam", {"learning_rate": 0.01}, kvstore=kv)
    losses = []
    for step in range(40):
        x, _ = uneven.batch(mx, kv.rank, 0, step)
        y = x[:, :2] - x[:, 1:]
        ids = mx.nd.arange(uneven.BATCH) + step % 3 + kv.rank
        with mx.autograd.record():
            loss = gluon.loss.L2Loss()(net(x + words(ids)), y)
        loss.backward()
        trainer.step(uneven.BATCH * kv.num_workers)
        losses.append(loss.mean().asscalar())
    kv.join()
    weights = {name: parameter.data().asnumpy() for name, parameter in parameters.items()}
    np.savez(f"{directory}/{kv.rank}.npz", losses=losses, **weights)


def in_turn(rounds):
    import p3  # noqa: F401
    import mxnet as mx

    shape = (7, 3)
    settings = {"sgd": {"momentum": 0.9}, "adam": {}, "adamax": {}, "nadam": {}, "ftml": {}}
    for name, further in settings.items():
        make = lambda: mx.optimizer.create(name, learning_rate=0.1, wd=0.01, rescale_grad=1.0, **further)  # noqa: E731
        kv = mx.kv.create("p3_async")
        keys = ["w", "rows"] if name == "adam" else ["w"]  # Nadam's schedule would go on with every key
        outs = {key: mx.nd.ones(shape) for key in keys}
        expected = {key: mx.nd.ones(shape) for key in keys}
        kv.set_optimizer(make())
        updaters = {key: mx.optimizer.get_updater(make()) for key in keys}
        for key in keys:
            kv.broadcast(key, mx.nd.ones(shape), outs[key])
        for round in range(int(rounds)):
            for worker in range(kv.num_workers):
                gradient = mx.nd.array(np.random.RandomState(10 * round + worker).uniform(-1, 1, shape))
                for key in keys:
                    updaters[key](0, gradient, expected[key])
                    if worker == kv.rank:
                        kv.push(key, gradient.tostype("row_sparse") if key == "rows" else gradient)
                        kv.pull(key, out=outs[key])
                        outs[key].wait_to_read()
                kv._barrier()
        kv.join()
        for key in keys:
            np.testing.assert_allclose(outs[key].asnumpy(), expected[key].asnumpy(), rtol=1e-5, err_msg=name)
    print(f"worker {kv.rank} is as one process", flush=True)


if __name__ == "__main__":
    {"clocks": clocks, "train": train, "in_turn": in_turn}[sys.argv[1]](*sys.argv[2:])
