"""One worker whose only server is frozen while it takes a step. If any call waited for the network, it would fail after
P3_TIMEOUT_S instead of returning: the server goes on only after the step has returned."""

import p3  # noqa: F401
import mxnet as mx
from mxnet import gluon
import this_job

net = gluon.nn.Dense(1000, in_units=2000)  # 8 MB: more than the rings and sockets between them hold
net.initialize()
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=mx.kv.create("p3_sync"))


def step():
    with mx.autograd.record():
        loss = net(mx.nd.ones((2, 2000))).sum()
    loss.backward()
    trainer.step(2)


step()
mx.nd.waitall()
before = net.weight.data().copy()
before.wait_to_read()

with this_job.frozen_server():
    step()
    print("the step returned while the server was frozen")
change = (net.weight.data() - before).asnumpy()
assert abs(change + 0.1).max() < 1e-5, change
print("and took effect afterwards")
