"""What comes back encoded, through stores of real processes: mxnet_both_ways.py MODE UP DOWN

values      the servers update: against a plain store, which has the exact weights, and NumPy, to the bit
optimizers  the same, with each optimizer that servers run
sums        the workers do: against NumPy, to the bit
whole       rows, and all keys with staleness, come back as without DOWN
trainer     trains a net, some workers for more steps than others; prints the loss at both ends and a digest of the
            weights
UP and DOWN: types of compression, or none.
"""

import sys

import numpy as np
import p3  # noqa: F401
import mxnet as mx
from compressions import sender
from gluon_lessons import SHAPE, gradients, learn
from optimizer_cases import OPTIMIZERS

from p3._core import MASTER

MODE, UP, DOWN = sys.argv[1:4]
PARAMS = {"down": DOWN} if UP == "none" else {"type": UP, "down": DOWN}
SLICE, STEPS = 50_000, 5


def stores(name="p3_sync"):
    """One that is compressed both ways, and one that is so on the way up alone."""
    made = [mx.kv.create(name), mx.kv.create(name)]
    made[0].set_gradient_compression(PARAMS)
    if UP != "none":
        made[1].set_gradient_compression({"type": UP})
    return made


def init(kv):
    for key, value in gradients(77, 0).items():
        kv.init(key, mx.nd.array(value, dtype=value.dtype))


def push(kv, step):
    outs = {}
    for key, gradient in gradients(kv.rank, step).items():
        outs[key] = mx.nd.zeros(gradient.shape, dtype=gradient.dtype)
        kv.pushpull(key, mx.nd.array(gradient, dtype=gradient.dtype), out=outs[key])
    return {key: out.asnumpy() for key, out in outs.items()}


def adam(**more):
    return mx.optimizer.Adam(learning_rate=0.01, wd=0.01, **more)


def check_values(make=adam):
    kv, plain = stores()
    for store in (kv, plain):
        store.set_optimizer(make(rescale_grad=1 / kv.num_workers))
        init(store)
    published, exact = gradients(77, 0)["w"], np.zeros(SHAPE, "float32")
    for step in range(1, STEPS + 1):
        landed, expected = push(kv, step), push(plain, step)
        for key in ("b", "d"):
            np.testing.assert_array_equal(landed[key], expected[key])
        published = published + sender(DOWN, SLICE)((expected["w"] - published).ravel()).reshape(SHAPE)
        np.testing.assert_array_equal(landed["w"], published)
        kv.store.session.fetch(kv.store.keys["w"].declared, exact, MASTER).wait(60)
        np.testing.assert_array_equal(exact, expected["w"])
        assert not np.array_equal(exact, published)
    print("rank %d: values are those of NumPy" % kv.rank)


def check_optimizers():
    for make in OPTIMIZERS.values():
        check_values(make)


def check_whole():
    """Against stores that are compressed on the way up alone."""
    of_rows, of_stale = stores(), stores("p3_ssp")
    rows = mx.nd.array([0, 2, 3], dtype="int64")
    values = mx.nd.random.normal(shape=(3, 8))
    for kv in of_rows:
        kv.set_optimizer(mx.optimizer.SGD(learning_rate=0.5))
        kv.init("rows", mx.nd.ones((5, 8)).tostype("row_sparse"))
        for _ in range(3):
            kv.push("rows", mx.nd.sparse.row_sparse_array((values, rows), shape=(5, 8)))
    pulled = [mx.nd.zeros((5, 8)).tostype("row_sparse") for _ in of_rows]
    for kv, out in zip(of_rows, pulled):
        kv.row_sparse_pull("rows", out=out, row_ids=mx.nd.arange(5, dtype="int64"))
    np.testing.assert_array_equal(pulled[0].asnumpy(), pulled[1].asnumpy())
    assert not np.array_equal(pulled[0].asnumpy(), np.ones((5, 8)))
    for kv in of_stale:
        kv.set_optimizer(mx.optimizer.SGD(learning_rate=0.5))
        init(kv)
        for step in range(STEPS):
            assert all(np.isfinite(out).all() for out in push(kv, step).values())
        axes = kv.store.keys["w"].declared.axes
        assert not axes.value_codec and bool(axes.codec) == (UP != "none"), axes
    print("rank %d: all comes back whole" % of_rows[0].rank)


def check_sums():
    kv, plain = stores()
    for store in (kv, plain):
        init(store)
    back = sender(DOWN, SLICE)
    for step in range(1, STEPS + 1):
        landed, expected = push(kv, step), push(plain, step)
        for key in ("b", "d"):
            np.testing.assert_array_equal(landed[key], expected[key])
        np.testing.assert_array_equal(landed["w"], back(expected["w"].ravel()).reshape(SHAPE))
    print("rank %d: sums are those of NumPy" % kv.rank)


{
    "values": check_values, "optimizers": check_optimizers, "sums": check_sums, "whole": check_whole,
    "trainer": lambda: learn(PARAMS),
}[MODE]()  # fmt: skip
