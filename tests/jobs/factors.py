"""Sufficient factors in MXNet: factors.py SCENARIO

like-dense  nets with and without p3.factors, for each optimizer and place of the update: the weights are alike; prints
            a digest for each
uneven      the last worker takes fewer steps, then joins
states      the optimizer's states are saved by rank 0 and loaded by all, and training goes on as before
refused     what cannot be, and says so
late        p3.factors behind the first push
"""

import hashlib
import os
import sys

import numpy as np
import p3
import mxnet as mx
from mxnet import autograd, gluon
from mxnet.gluon import nn

BATCH, STEPS = 4, 6
TOLERANCE = 1e-5


@mx.optimizer.Optimizer.register
class OwnSGD(mx.optimizer.SGD):
    """Which the servers do not know: the workers update."""


def make_net(hybridize=False, prefix="net_"):
    np.random.seed(3)
    mx.random.seed(3)
    net = nn.HybridSequential(prefix=prefix)
    with net.name_scope():
        net.add(nn.Dense(64, activation="tanh"), nn.Dense(48, use_bias=False, flatten=False), nn.Dense(10))
    net.initialize(mx.init.Xavier())
    if hybridize:
        net.hybridize()
    return net


def batches(rank, steps, rows=BATCH):
    random = np.random.RandomState(7 + rank)
    for _ in range(steps):
        x, y = random.randn(BATCH, 5, 8), random.randint(0, 10, BATCH)
        yield mx.nd.array(x[:rows]), mx.nd.array(y[:rows])


def train(net, trainer, data, after_step=lambda: None):
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    for x, y in data:
        with autograd.record():
            loss = loss_of(net(x), y)
        loss.backward()
        trainer.step(2 * BATCH)
        net(x).wait_to_read()  # an evaluation, which may have another layout of the weights
        after_step()


def make_trainer(net, optimizer="sgd", **how):
    settings = {"learning_rate": 0.1, "momentum": 0.9}
    return gluon.Trainer(net.collect_params(), optimizer, settings, kvstore=mx.kv.create("p3_sync"), **how)


def weights(net):
    return [parameter.data().asnumpy() for parameter in net.collect_params().values()]


def distance(ones, others):
    return max(abs(one - other).max() / abs(other).max() for one, other in zip(ones, others))


def digest(net):
    return hashlib.sha256(b"".join(one.tobytes() for one in weights(net))).hexdigest()[:16]


def routes(trainer):
    return [one["route"] for one in trainer._kvstore.stats()["keys"].values()]


def like_dense(rank):
    for hybridize in (False, True):
        for optimizer, how in (("sgd", {}), ("sgd", {"update_on_kvstore": False}), ("nag", {}), ("ownsgd", {})):
            rows = BATCH - hybridize  # a short batch is padded
            ends = []
            for with_factors in (False, True):
                net = make_net(hybridize)
                if with_factors:
                    p3.factors(net, batch_size=BATCH if hybridize else None, route="factors")
                trainer = make_trainer(net, optimizer, **how)
                train(net, trainer, batches(rank, STEPS, rows))
                ends.append(weights(net))
            far = distance(*ends)
            assert far <= TOLERANCE, (hybridize, optimizer, how, far)
            assert routes(trainer).count("factors") == 3, routes(trainer)
            print("like dense, digest", digest(net), flush=True)


def uneven(rank):
    net = p3.factors(make_net(), batch_size=BATCH, route="factors")
    trainer = make_trainer(net)
    last = trainer._kvstore_params["kvstore"].num_workers - 1
    train(net, trainer, batches(rank, STEPS - 2 * (rank == last)))
    trainer._kvstore.join()
    print("joined, digest", digest(net), flush=True)


def states(rank):
    net = p3.factors(make_net(), route="factors")
    trainer = make_trainer(net)
    train(net, trainer, batches(rank, 3))
    folder = os.environ["FOLDER"]
    file = os.path.join(folder, "states-%d" % rank)
    trainer.save_states(file)
    before = weights(net)
    train(net, trainer, batches(rank + 10, 2))
    expected = weights(net)
    for parameter, value in zip(net.collect_params().values(), before):
        parameter.set_data(mx.nd.array(value))
    trainer._reset_kvstore()
    trainer.load_states(file)
    train(net, trainer, batches(rank + 10, 2))
    assert distance(weights(net), expected) == 0
    print("states are back, digest", digest(net), flush=True)


def refused(rank):
    tied = nn.HybridSequential(prefix="tied_")
    with tied.name_scope():
        first = nn.Dense(8, in_units=8)
        tied.add(first, nn.Dense(8, in_units=8, params=first.params))
    tied.initialize()
    assert type(p3.factors(tied)) is nn.HybridSequential and not hasattr(first.weight, "_p3_layer")

    for wrong in ({"route": "fast"}, {"batch_size": 0}):
        try:
            p3.factors(make_net(), **wrong)
        except ValueError as error:
            assert "it must be" in str(error)
        else:
            raise AssertionError(wrong)
    net = p3.factors(make_net(), route="factors")
    try:
        p3.factors(net)
    except ValueError as error:
        assert "already" in str(error)
    else:
        raise AssertionError
    trainer = make_trainer(net)
    train(net, trainer, batches(rank, 1))
    assert np.isnan(net[0].weight.grad().asnumpy()).any()  # of which no script shall take it for a gradient

    def expect(text, rows, uses):
        x, y = next(batches(rank, 1))
        x = mx.nd.concat(*[x] * rows, dim=0)
        with autograd.record():
            loss = sum(net(x).sum() for _ in range(uses))
        loss.backward()
        try:
            trainer.step(1)
        except mx.base.MXNetError as error:
            assert text in str(error), error
        else:
            raise AssertionError(text)

    expect("was used 2 times in one step", 1, 2)
    expect("a batch has 8 rows on a device, but its factors are of 4", 2, 1)
    print("refused", flush=True)


def late(rank):
    net = make_net()
    trainer = make_trainer(net)
    train(net, trainer, batches(rank, 1))
    p3.factors(net, route="factors")
    try:
        train(net, trainer, batches(rank, 1))
    except mx.base.MXNetError as error:
        assert "must come before the key's first push" in str(error), error
        print("too late", flush=True)


SCENARIOS = {"like-dense": like_dense, "uneven": uneven, "states": states, "refused": refused, "late": late}

if __name__ == "__main__":
    SCENARIOS[sys.argv[1]](mx.kv.create("p3_sync").rank)
