"""Worker 1 asks for the first value of a Trainer's weight when rank 0 has set another, or waits to do so: set_again.py
FOLDER."""

import sys

import mxnet as mx
from mxnet import gluon

from p3.mxnet.keys.dense import DenseKey
from turns import Turns


def broadcast():
    """As in the Trainer's next step; what this worker has then."""
    trainer._init_kvstore()
    trainer._init_params()
    return weight.data().copy()


turns = Turns(sys.argv[1])
kv = mx.kv.create("p3_sync")
weight = gluon.Parameter("weight", shape=(2,), init=mx.init.Constant(1.0))
weight.initialize()
trainer = gluon.Trainer([weight], "sgd", {"learning_rate": 0.1}, kvstore=kv, update_on_kvstore=True)
if kv.rank == 1:
    DenseKey.init = turns.behind(DenseKey.init, "again")
first = broadcast()
if kv.rank == 0:
    first.wait_to_read()
    kv.store.session.barrier = turns.within(kv.store.session.barrier, "again")
weight.set_data(mx.nd.array([2.0, 2.0]))
second = broadcast()
if kv.rank == 0:
    second.wait_to_read()
    turns.come("again")
values = first.asnumpy().tolist(), second.asnumpy().tolist()
assert values == ([1.0, 1.0], [2.0, 2.0]), values
