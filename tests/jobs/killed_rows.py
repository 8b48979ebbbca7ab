"""Sparse rounds until another process is killed: killed_rows.py CASE. Prints "under way", then the error."""

import itertools
import sys

import numpy as np

ROWS, COLUMNS = 5000, 20
CASE = sys.argv[1]


def session_rounds(keeps_value):
    """The key moves again and again as well."""
    from p3.worker.session import Session

    session = Session.open()
    key = session.declare("table", (ROWS, COLUMNS), "float32", sparse=True)
    value = np.zeros((ROWS, COLUMNS), "float32")
    landing = value if keeps_value else None
    session.init(key, value if session.rank == 0 else None, landing).wait(60)
    session.set_optimizer(0, {"name": "sgd", "momentum": 0.9, "clip_gradient": -1.0, "multi_precision": False})
    ids = np.arange(session.rank, ROWS, 3)
    gradient = np.ones((len(ids), COLUMNS), "float32")
    for partitions in itertools.cycle([1, 40, 3, 7]):
        session.pushpull(key, (ids, gradient), landing).wait(60)
        if not keeps_value:
            session.fetch(key, gradient, ids=ids).wait(60)
        if session.rank == 0 and not session.is_moving(key):
            session.repartition(key, partitions)
        yield


def gluon_rounds(keeps_value):
    import mxnet as mx
    from mxnet import autograd, gluon

    import p3  # noqa: F401

    mx.random.seed(1)
    if keeps_value:
        net = gluon.nn.Embedding(ROWS, COLUMNS, sparse_grad=True)
    else:
        net = gluon.contrib.nn.SparseEmbedding(ROWS, COLUMNS)
    net.initialize()
    store = mx.kv.create("p3_sync")
    trainer = gluon.Trainer(net.collect_params(), "adam", kvstore=store)
    for _ in itertools.count():
        ids = mx.nd.random.randint(0, ROWS, (500,))
        with autograd.record():
            loss = net(ids).sum()
        loss.backward()
        trainer.step(1)
        loss.wait_to_read()
        yield


try:
    rounds = {"session": session_rounds, "gluon": gluon_rounds}[CASE.split("-")[0]](not CASE.endswith("on-servers"))
    for number, _ in enumerate(rounds):
        if number == 5:
            print("under way", flush=True)
except Exception as error:
    print(" ".join(str(error).split()))
