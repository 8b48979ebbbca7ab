"""Forks, and has a DataLoader fork, while rounds are under way; the parent goes on, the child says why it cannot."""

import os

import numpy as np
import p3  # noqa: F401
import mxnet as mx

kv = mx.kv.create("p3_sync")
value = mx.nd.zeros(1_000_000)
kv.init("key", value)


def push():
    for _ in range(5):
        kv.pushpull("key", mx.nd.ones(1_000_000), out=value)


push()
child = os.fork()
if child == 0:
    try:
        kv.push("key", value)
    except mx.base.MXNetError as error:
        os._exit(0 if "forked" in str(error) else 2)
    os._exit(1)
assert os.waitpid(child, 0)[1] == 0, "the child's error is missing, or not the one that names the fork"

push()
data = mx.gluon.data.ArrayDataset(np.arange(40, dtype="float32"))
loader = mx.gluon.data.DataLoader(data, batch_size=8, num_workers=2, timeout=60)
push()
assert sum(float(batch.sum().asscalar()) for batch in loader) == 780
push()
assert (value.asnumpy() == kv.num_workers).all()
print("passed")
