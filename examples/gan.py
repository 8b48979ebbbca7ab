"""Trains a generator and a discriminator on points around four centres: two Trainers, each with its own store.

    python examples/gan.py                                 # alone, in one process
    p3 run -n 2 -s 2 python examples/gan.py                # two workers and two servers

Both stores share the process's connections; their keys, optimizers and rounds are separate.
"""

import argparse

import p3  # noqa: F401  (tells MXNet about the store)
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

SEED = 1  # all workers start with the same weights
NOISE = 4
CENTRES = np.array([(1, 1), (1, -1), (-1, 1), (-1, -1)], dtype="float32")
SPREAD = 0.1


def make_net(outputs, store):
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(64, activation="relu"), gluon.nn.Dense(64, activation="relu"), gluon.nn.Dense(outputs))
    net.initialize(mx.init.Xavier())
    net.hybridize()
    return net, gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.002, "beta1": 0.5}, kvstore=store)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch-size", type=int, default=128, help="points per step, of all workers together")
    options = parser.parse_args()

    kv1, kv2 = mx.kv.create("p3_sync"), mx.kv.create("p3_sync")
    share = max(1, options.batch_size // kv1.num_workers)
    batch_size = share * kv1.num_workers
    mx.random.seed(SEED)
    generator, generator_trainer = make_net(2, kv1)
    discriminator, discriminator_trainer = make_net(1, kv2)
    judge = gluon.loss.SigmoidBCELoss()
    real, generated = mx.nd.ones(share), mx.nd.zeros(share)
    test_noise = mx.nd.random.normal(shape=(1000, NOISE))
    generator(test_noise), discriminator(mx.nd.zeros((1, 2)))  # creates the weights while all workers' seeds are equal

    mx.random.seed(SEED + 1 + kv1.rank)  # from here on, different points and noise on every worker
    numbers = np.random.RandomState(SEED + 1 + kv1.rank)
    for _ in range(options.steps):
        points = CENTRES[numbers.randint(len(CENTRES), size=share)]
        points = mx.nd.array(points + SPREAD * numbers.standard_normal(points.shape))
        noise = mx.nd.random.normal(shape=(share, NOISE))
        with autograd.record():
            invented = generator(noise)
            loss = judge(discriminator(points), real) + judge(discriminator(invented.detach()), generated)
        loss.backward()
        discriminator_trainer.step(batch_size)
        with autograd.record():
            loss = judge(discriminator(generator(noise)), real)
        loss.backward()
        generator_trainer.step(batch_size)

    distances = np.linalg.norm(generator(test_noise).asnumpy()[:, np.newaxis] - CENTRES, axis=2)
    shares = np.bincount(distances.argmin(axis=1), minlength=len(CENTRES)) / len(distances)
    print(
        f"worker {kv1.rank} of {kv1.num_workers}: distance {distances.min(axis=1).mean():.4f} to the nearest centre, "
        f"least share of a centre {shares.min():.4f}"
    )


if __name__ == "__main__":
    main()
