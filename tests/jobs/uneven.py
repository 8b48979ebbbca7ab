"""Workers with different numbers of steps: uneven.py DIRECTORY UPDATE REDUCTION STEPS...

STEPS are those of each worker, in each of two epochs (the second in reverse). UPDATE says who updates the weights:
servers, workers (an optimizer that the servers lack), trainer (update_on_kvstore=False). Writes DIRECTORY/RANK.npz.
Two trainers on two stores, as in a GAN, take turns.
"""

import sys

import numpy as np

UPDATES = {"servers": ("adam", None), "workers": ("lamb", None), "trainer": ("sgd", False)}
BATCH = 4


def make_net(gluon, mx):
    mx.random.seed(3)
    net = gluon.nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(gluon.nn.Dense(5, in_units=3, activation="tanh"), gluon.nn.Dense(2, in_units=5))
    net.initialize(mx.init.Xavier())
    return net


def batch(mx, rank, epoch, step):
    data = np.random.RandomState(1000 * rank + 100 * epoch + step)
    return mx.nd.array(data.uniform(-1, 1, (BATCH, 3))), mx.nd.array(data.uniform(-1, 1, (BATCH, 2)))


def gradients(mx, net, x, y):
    with mx.autograd.record():
        loss = mx.gluon.loss.L2Loss()(net(x), y)
    loss.backward()


def main(directory, update, reduction, *steps):
    import p3  # noqa: F401
    import mxnet as mx
    from mxnet import gluon

    stores = [mx.kv.create("p3_sync") for _ in range(2)]
    rank = stores[0].rank
    optimizer, update_on_kvstore = UPDATES[update]
    nets, trainers = [], {}
    for store in stores:
        store.set_reduction(reduction)
        nets.append(make_net(gluon, mx))
        trainers[store] = gluon.Trainer(
            nets[-1].collect_params(),
            optimizer,
            {"learning_rate": 0.01},
            kvstore=store,
            update_on_kvstore=update_on_kvstore,
        )
    batch_size = BATCH if reduction == "average" else BATCH * stores[0].num_workers
    for epoch, counts in enumerate((steps, steps[::-1])):
        for step in range(int(counts[rank])):
            for net, trainer in zip(nets, trainers.values()):
                gradients(mx, net, *batch(mx, rank, epoch, step))
                trainer.step(batch_size)
        stores[epoch].join(update=lambda store: trainers[store].update(batch_size))
    weights = {
        f"{number}-{name}": parameter.data().asnumpy()
        for number, net in enumerate(nets)
        for name, parameter in net.collect_params().items()
    }
    np.savez(f"{directory}/{rank}.npz", updates=trainers[stores[0]].optimizer.num_update, **weights)


if __name__ == "__main__":
    main(*sys.argv[1:])
