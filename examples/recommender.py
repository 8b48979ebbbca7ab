"""Trains a recommender to predict ratings; its two embedding tables are nearly all of the model.

    python examples/recommender.py                      # alone, in one process
    p3 run -n 2 -s 2 python examples/recommender.py     # two workers and two servers

A step touches few users and items. With sparse_grad=True only their rows are sent and updated. The ratings are
synthetic: inner products of hidden tastes and traits, with some noise.
"""

import argparse

import p3
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

SEED = 1  # all workers start with the same weights
USERS, ITEMS, TRAITS = 1000, 500, 4
NOISE = 0.2  # standard deviation; no prediction can be better
BATCH = 256  # of all workers together


class Recommender(gluon.Block):
    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.users = gluon.nn.Embedding(USERS, TRAITS, sparse_grad=True)
            self.items = gluon.nn.Embedding(ITEMS, TRAITS, sparse_grad=True)

    def forward(self, user, item):
        return (self.users(user) * self.items(item)).sum(axis=-1)


def make_ratings(count):
    """(user, item, rating) of each."""
    random = np.random.RandomState(SEED)
    tastes, traits = random.normal(size=(USERS, TRAITS)), random.normal(size=(ITEMS, TRAITS))
    user, item = random.randint(0, USERS, count), random.randint(0, ITEMS, count)
    rating = (tastes[user] * traits[item]).sum(axis=1) / TRAITS**0.5 + random.normal(scale=NOISE, size=count)
    return [array.astype("float32") for array in (user, item, rating)]


def rmse(net, user, item, rating):
    error = net(mx.nd.array(user), mx.nd.array(item)).asnumpy() - rating
    return float(np.sqrt(np.mean(error**2)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6)
    options = parser.parse_args()

    kv = mx.kv.create("p3_sync")
    mx.random.seed(SEED)
    net = Recommender()
    net.initialize(mx.init.Normal(0.3))
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.03}, kvstore=kv)
    loss_of = gluon.loss.L2Loss()

    ratings = make_ratings(60_000)
    seen, unseen = [array[:-6_000] for array in ratings], [array[-6_000:] for array in ratings]
    sampler = p3.SplitSampler(len(seen[0]))
    share = BATCH // kv.num_workers
    for epoch in range(options.epochs):
        mine = np.array(list(sampler))
        for start in range(0, len(mine) - share + 1, share):
            user, item, rating = (mx.nd.array(array[mine[start : start + share]]) for array in seen)
            with autograd.record():
                loss = loss_of(net(user, item), rating)
            loss.backward()
            trainer.step(BATCH)
        if kv.rank == 0:
            print(f"epoch {epoch}: error {rmse(net, *unseen):.3f} of unseen ratings", flush=True)
    print(f"worker {kv.rank} of {kv.num_workers}: error {rmse(net, *unseen):.4f} of unseen ratings")


if __name__ == "__main__":
    main()
