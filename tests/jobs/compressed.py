"""Pushes the same random gradients through a store with gradient compression; checks them against NumPy, or saves them.

    python compressed.py numpy             sums and weights of every worker, through p3_sync, on one machine
    python compressed.py save STORE FILE   the two-bit sums of a store, for one worker
"""

import os
import sys

import numpy as np

MODE = sys.argv[1]
STORE = sys.argv[2] if MODE == "save" else "p3_sync"
if STORE == "p3_sync":
    import p3  # noqa: F401
import mxnet as mx  # noqa: E402
from compressions import sender  # noqa: E402

from p3 import codecs  # noqa: E402

SIZES = {0: 1, 1: 17, 2: 120_001}  # the last one is of three slices; all have two dimensions, as topk asks for
ROUNDS, SLICE = 5, 50_000


def gradients(rank, size, dtype="float32"):
    random = np.random.RandomState(1000 * size % 9973 + rank)
    return [random.uniform(-1, 1, size).astype(dtype) for _ in range(ROUNDS)]


def column(values):
    return mx.nd.array(values.reshape(-1, 1))


def sum_of(parts):
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


class Senders:
    """What workers of one machine send of their gradients of a key: each of its own; or one of the sum."""

    def __init__(self, kind, num_workers):
        self._adds_up = os.environ["P3_LOCAL_AGGREGATION"] == "1"
        self._senders = [sender(kind, SLICE) for _ in range(1 if self._adds_up else num_workers)]

    def __call__(self, parts):
        parts = [sum_of(parts)] if self._adds_up else parts
        return sum_of([send(part) for send, part in zip(self._senders, parts)])


def check_sums(kind):
    kv = mx.kv.create("p3_sync")
    kv.set_gradient_compression({"type": kind})
    for key, size in SIZES.items():
        first = np.full(size, 1.0001, "float32")  # no half
        out = mx.nd.zeros((size, 1))
        kv.broadcast(key, column(first), out=out)
        np.testing.assert_array_equal(out.asnumpy().ravel(), first)
    kv.init("double", mx.nd.zeros(5, dtype="float64"))
    sent = {key: Senders(kind, kv.num_workers) for key in SIZES}
    for step in range(ROUNDS):
        for key, size in SIZES.items():
            out = mx.nd.zeros((size, 1))
            kv.pushpull(key, column(gradients(kv.rank, size)[step]), out=out)
            expected = sent[key]([gradients(rank, size)[step] for rank in range(kv.num_workers)])
            is_shorter = codecs.push_bytes(codecs.codecs()[kind].complete(), size) < 4 * size
            if codecs.codecs()[kind].carries_sums and is_shorter:
                expected = sender(kind, SLICE)(expected)
            np.testing.assert_array_equal(out.asnumpy().ravel(), expected)
        parts = [gradients(rank, 5, "float64")[step] for rank in range(kv.num_workers)]
        out = mx.nd.zeros(5, dtype="float64")
        kv.pushpull("double", mx.nd.array(parts[kv.rank], dtype="float64"), out=out)
        np.testing.assert_array_equal(out.asnumpy(), sum_of(parts))
    print("rank %d: %s sums are those of NumPy" % (kv.rank, kind))


def check_weights(kind):
    """The servers update them, by sums of compressed gradients; they themselves come back as they are."""
    kv = mx.kv.create("p3_sync")
    kv.set_gradient_compression({"type": kind})
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=0.001, wd=0))
    size = SIZES[2]
    weight = np.random.RandomState(5).uniform(1, 2, size).astype("float32")
    kv.init(7, column(weight))
    sent = Senders(kind, kv.num_workers)
    out = mx.nd.zeros((size, 1))
    for step in range(ROUNDS):
        kv.pushpull(7, column(gradients(kv.rank, size)[step]), out=out)
        weight = weight - np.float32(0.001) * sent([gradients(k, size)[step] for k in range(kv.num_workers)])
        np.testing.assert_allclose(out.asnumpy().ravel(), weight, rtol=3e-7)
    assert not np.array_equal(out.asnumpy().ravel(), sender("fp16", SLICE)(out.asnumpy().ravel()))
    print("rank %d: %s weights are those of NumPy" % (kv.rank, kind))


def save(path):
    kv = mx.kv.create(STORE)
    kv.set_gradient_compression({"type": "2bit", "threshold": 0.3})
    sums = {}
    for key, size in SIZES.items():
        kv.init(key, mx.nd.zeros(size))
    for step in range(ROUNDS):
        for key, size in SIZES.items():
            out = mx.nd.zeros(size)
            kv.push(key, mx.nd.array(gradients(0, size)[step]))
            kv.pull(key, out=out)
            sums["%d of round %d" % (key, step)] = out.asnumpy()
    np.savez(path, **sums)


if MODE == "save":
    save(sys.argv[3])
else:
    for KIND in codecs.of_gradients():
        check_sums(KIND)
        check_weights(KIND)
