"""Trains models with row_sparse gradients, and writes the weights each ends with: sparse_training.py DIRECTORY CASE...

Workers take turns in the joined batch of each step, as in trajectory.py. Files: DIRECTORY/CASE-RANK.npz.
"""

import sys

import numpy as np

BATCH, STEPS = 8, 20
ROWS, COLUMNS = 30, 4
NEVER_USED = 29  # a row that no batch has


def case(optimizer="sgd", model="embedding", devices=1, update_on_kvstore=None, **settings):
    settings.setdefault("learning_rate", 0.1)
    return dict(optimizer=optimizer, model=model, devices=devices, update_on_kvstore=update_on_kvstore,
                settings=settings)  # fmt: skip


CASES = {
    "sgd": case(wd=0.01),
    "momentum": case(momentum=0.9, wd=0.01, clip_gradient=0.05),
    "adam": case("adam", learning_rate=0.01, wd=0.01),
    "adagrad": case("adagrad"),
    "two-devices": case(momentum=0.9, devices=2),
    "not-lazy": case(momentum=0.9, wd=0.01, lazy_update=False),
    "densified": case("rmsprop", learning_rate=0.01),
    "on-workers": case("lamb", learning_rate=0.01),
    "summed": case("adam", learning_rate=0.01, update_on_kvstore=False),
    "by-updater": case(momentum=0.9, wd=0.01, model="updater"),
    "rows-on-servers": case(momentum=0.9, model="sparse-embedding"),
    "rows-on-servers-adam": case("adam", learning_rate=0.01, model="sparse-embedding"),
    "rows-on-servers-densified": case("rmsprop", learning_rate=0.01, model="sparse-embedding"),
    "rows-on-servers-two-devices": case(model="sparse-embedding", devices=2),
    "module": case(momentum=0.9, model="module"),
    "module-rows-on-servers": case("adagrad", model="sparse-module"),
}


def batches(rank, workers):
    data = np.random.RandomState(11)
    share = BATCH // workers
    for _ in range(STEPS):
        ids = data.randint(0, NEVER_USED, (BATCH, 3))
        targets = data.uniform(size=(BATCH, 1))
        yield ids[rank * share : (rank + 1) * share], targets[rank * share : (rank + 1) * share]


def first_weights():
    values = np.random.RandomState(5)
    return values.uniform(-1, 1, (ROWS, COLUMNS)), values.uniform(-1, 1, (1, COLUMNS))


def train(mx, case, store, rank=0, workers=1):
    """{name: weight} after all steps. Without a store: MXNet's own training in one process."""
    trainers = {"module": train_module, "sparse-module": train_module, "updater": train_by_updater}
    return trainers.get(case["model"], train_gluon)(mx, case, store, rank, workers)


def make_net(mx, case, devices):
    gluon = mx.gluon
    sparse_weight = case["model"] == "sparse-embedding"

    class Net(gluon.Block):
        def __init__(self):
            super().__init__(prefix="net_")
            with self.name_scope():
                if sparse_weight:
                    self.embedding = gluon.contrib.nn.SparseEmbedding(ROWS, COLUMNS)
                else:
                    self.embedding = gluon.nn.Embedding(ROWS, COLUMNS, sparse_grad=True)
                self.out = gluon.nn.Dense(1, in_units=COLUMNS, use_bias=False)

        def forward(self, x):
            return self.out(self.embedding(x).mean(axis=1))

    net = Net()
    net.initialize(ctx=devices)
    table, out = (mx.nd.array(value) for value in first_weights())
    net.embedding.weight.set_data(table.tostype("row_sparse") if sparse_weight else table)
    net.out.weight.set_data(out)
    return net


def train_gluon(mx, case, store, rank, workers):
    devices = [mx.cpu(i) for i in range(case["devices"])]
    net = make_net(mx, case, devices)
    sparse_weight = case["model"] == "sparse-embedding"
    settings = dict(case["settings"])
    if store is None and sparse_weight:
        store = mx.kv.create("local")  # without a store MXNet trains no row_sparse weight
    update_on_kvstore = None if store is None else case["update_on_kvstore"]
    trainer = mx.gluon.Trainer(net.collect_params(), case["optimizer"], settings, kvstore=store,
                               update_on_kvstore=update_on_kvstore)  # fmt: skip
    loss = mx.gluon.loss.L2Loss()
    for ids, targets in batches(rank, workers):
        share = len(ids) // len(devices)
        with mx.autograd.record():
            losses = []
            for i, device in enumerate(devices):
                part = slice(i * share, (i + 1) * share)
                x, y = mx.nd.array(ids[part], ctx=device), mx.nd.array(targets[part], ctx=device)
                losses.append(loss(net(x), y).sum())
        mx.autograd.backward(losses)
        trainer.step(BATCH)
    if sparse_weight:
        every = mx.nd.arange(ROWS, ctx=devices[-1])
        table = net.embedding.weight.row_sparse_data(every)
    else:
        table = net.embedding.weight.data(devices[-1])
    return {"table": table.asnumpy(), "out": net.out.weight.data(devices[-1]).asnumpy()}


def train_by_updater(mx, case, store, rank, workers):
    """Without Trainer: the store's own weights are updated on each worker, by what it is given as updater."""
    net = make_net(mx, case, [mx.cpu()])
    optimizer = mx.optimizer.create(case["optimizer"], rescale_grad=1 / BATCH, **case["settings"])
    updater = mx.optimizer.get_updater(optimizer)
    parameters = list(enumerate(net.collect_params().values()))
    if store is not None:
        store._set_updater(lambda key, gradient, weight: updater(key, gradient, weight))
        for key, parameter in parameters:
            store.init(key, parameter.data())
    loss = mx.gluon.loss.L2Loss()
    for ids, targets in batches(rank, workers):
        with mx.autograd.record():
            total = loss(net(mx.nd.array(ids)), mx.nd.array(targets)).sum()
        total.backward()
        for key, parameter in parameters:
            if store is None:
                updater(key, parameter.grad(), parameter.data())
            else:
                store.push(key, parameter.grad())
                store.pull(key, parameter.data())
    return {"table": net.embedding.weight.data().asnumpy(), "out": net.out.weight.data().asnumpy()}


def train_module(mx, case, store, rank, workers):
    sparse_weight = case["model"] == "sparse-module"
    data, label = mx.sym.var("data"), mx.sym.var("label")
    table = mx.sym.var("table", shape=(ROWS, COLUMNS), **({"stype": "row_sparse"} if sparse_weight else {}))
    embedded = mx.sym.Embedding(data, table, ROWS, COLUMNS, sparse_grad=True)
    out = mx.sym.FullyConnected(mx.sym.mean(embedded, axis=1), mx.sym.var("out"), num_hidden=1, no_bias=True)
    module = mx.mod.Module(mx.sym.LinearRegressionOutput(out, label), label_names=["label"])
    share = BATCH // workers
    module.bind([("data", (share, 3))], [("label", (share, 1))])
    table_value, out_value = (mx.nd.array(value) for value in first_weights())
    if sparse_weight:
        table_value = table_value.tostype("row_sparse")
    module.init_params(arg_params={"table": table_value, "out": out_value})
    settings = dict(case["settings"], rescale_grad=1 / BATCH)
    module.init_optimizer(store or "local", case["optimizer"], settings)
    for ids, targets in batches(rank, workers):
        batch = mx.io.DataBatch([mx.nd.array(ids)], [mx.nd.array(targets)])
        if sparse_weight:
            module.prepare(batch, sparse_row_id_fn=lambda batch: {"table": batch.data[0]})
        module.forward_backward(batch)
        module.update()
    weights, _ = module.get_params()
    return {name: weight.asnumpy() for name, weight in weights.items()}


def main(directory, *names):
    import mxnet as mx

    import p3  # noqa: F401

    for name in names:
        store = mx.kv.create("p3_sync")
        weights = train(mx, CASES[name], store, store.rank, store.num_workers)
        route = {str(key): entry.get("route") for key, entry in store.stats()["keys"].items()}
        np.savez("%s/%s-%d.npz" % (directory, name, store.rank), routes=list(route.values()), **weights)


if __name__ == "__main__":
    main(*sys.argv[1:])
