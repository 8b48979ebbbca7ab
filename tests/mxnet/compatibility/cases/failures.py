"""What goes wrong, and must be an error on every worker: not a hang, and not a wrong value."""

import os
import signal

from compatibility.cases.methods import pulled
from compatibility.registry import WrongResult, case, expect_equal

FAILURES = "Failures and uneven work"


@case(FAILURES, alone=True)
def uneven_steps(mx, kv):
    """one worker takes fewer steps (with `join` where it exists)"""
    kv.init("key", mx.nd.zeros(3))
    steps = 3 if kv.rank == 0 else 5
    for step in range(1, steps + 1):
        kv.push("key", mx.nd.full(3, step * (kv.rank + 1)))
        out = pulled(mx, kv, "key", 3)
        expect_equal(out, 3 * step if step <= 3 else 2 * step)
    if hasattr(kv, "join"):
        kv.join(update=lambda store: None)  # nothing to apply: the sums are looked at below
        expect_equal(pulled(mx, kv, "key", 3), 10)
    else:
        kv._barrier()  # or the worker that is done would end, and the row say nothing of the other


@case(FAILURES, alone=True)
def wrong_shape(mx, kv):
    """another shape on one worker is an error on all"""

    def use():
        shape = (2, 3) if kv.rank == 0 else (3, 4)
        kv.init("key", mx.nd.zeros(shape))
        kv.push("key", mx.nd.ones(shape))
        pulled(mx, kv, "key", shape).wait_to_read()

    expect_error(mx, kv, use)


@case(FAILURES, alone=True)
def wrong_type(mx, kv):
    """another type on one worker is an error on all"""

    def use():
        dtype = "float32" if kv.rank == 0 else "float64"
        kv.init("key", mx.nd.zeros(6, dtype=dtype))
        kv.push("key", mx.nd.ones(6, dtype=dtype))
        pulled(mx, kv, "key", 6, dtype).wait_to_read()

    expect_error(mx, kv, use)


@case(FAILURES, alone=True)
def wrong_type_of_gradient(mx, kv):
    """`push` of an array of another type than the key's is an error"""
    kv.init("key", mx.nd.zeros(6))

    def use():
        kv.push("key", mx.nd.ones(6, dtype="float64"))
        pulled(mx, kv, "key", 6).wait_to_read()

    expect_error(mx, kv, use)


@case(FAILURES, alone=True)
def optimizer_on_one_worker(mx, kv):
    """`push` without the optimizer that another worker has set is an error on all"""

    def use():
        kv.init("key", mx.nd.zeros(3))
        if kv.rank == 1:
            kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=0.5))
        kv.push("key", mx.nd.ones(3))
        pulled(mx, kv, "key", 3).wait_to_read()

    expect_error(mx, kv, use)


@case(FAILURES, alone=True)
def several_first_values(mx, kv):
    """several initial values of one key are an error"""
    expect_error(mx, kv, lambda: kv.init([3, 3], [mx.nd.zeros(3), mx.nd.ones(3)]))


@case(FAILURES, alone=True)
def unknown_key(mx, kv):
    """`pull` of a key that was not initialised is an error"""
    expect_error(mx, kv, lambda: pulled(mx, kv, "key", 3).wait_to_read())


@case(FAILURES, alone=True)
def wrong_out(mx, kv):
    """`pull` into an array of another shape is an error"""
    kv.init("key", mx.nd.zeros(3))
    expect_error(mx, kv, lambda: pulled(mx, kv, "key", 5).wait_to_read())


@case(FAILURES, alone=True)
def wrong_key_type(mx, kv):
    """a key that is neither a string nor an integer is an error"""
    expect_error(mx, kv, lambda: kv.init(1.5, mx.nd.zeros(3)))


@case(FAILURES, dies=True)
def dead_worker(mx, kv):
    """killing a worker is an error on the other"""
    kv.init("key", mx.nd.zeros(3))
    kv.push("key", mx.nd.ones(3))
    expect_equal(pulled(mx, kv, "key", 3), 2)
    if kv.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)

    def use():
        kv.push("key", mx.nd.ones(3))
        pulled(mx, kv, "key", 3).wait_to_read()

    expect_error(mx, kv, use)


def expect_error(mx, kv, use):
    try:
        use()
    except (mx.MXNetError, AssertionError, TypeError, ValueError):
        return
    raise WrongResult("no error")
