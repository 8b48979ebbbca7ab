"""Deep gradient compression through a store of real processes: dgc.py numpy|trainer|refused

numpy    pushes random gradients; the weights must be NumPy's to the bit, and the plain keys' those of a plain store
trainer  trains a net, some workers for more steps than others; prints the loss at both ends and a digest of the weights
refused  everything that dgc is not for
"""

import hashlib
import sys

import numpy as np
import p3  # noqa: F401
import mxnet as mx
from compressions import Dgc, take_steps
from gluon_lessons import gradients, learn

STEPS = 8
SETTINGS = {
    "plain": {"ratio": 0.01},
    "all options": {"ratio": 0.001, "warmup_steps": 6, "clip_norm": 40.0, "masking": False},
}


def sgd(workers):
    return mx.optimizer.SGD(learning_rate=0.1, momentum=0.9, wd=0.01, rescale_grad=1 / workers)


def check_weights(options):
    kv, plain = mx.kv.create("p3_sync"), mx.kv.create("p3_sync")
    kv.set_gradient_compression({"type": "dgc", **options})
    optimizers = [sgd(kv.num_workers), sgd(kv.num_workers)]
    for store, optimizer in zip((kv, plain), optimizers):
        store.set_optimizer(optimizer)
        for key, value in gradients(77, 0).items():
            store.init(key, mx.nd.array(value, dtype=value.dtype))
    weight = gradients(77, 0)["w"].reshape(-1)
    workers = [Dgc(weight.size, 50_000, 0.9, num_workers=kv.num_workers, **options) for _ in range(kv.num_workers)]
    outs = {key: mx.nd.zeros(value.shape, dtype=value.dtype) for key, value in gradients(77, 0).items()}
    others = {key: out.copy() for key, out in outs.items()}
    for step in range(1, STEPS + 1):
        lr = 0.1 if step < 5 else 0.03
        for optimizer in optimizers:
            optimizer.set_learning_rate(lr)
        for key, gradient in gradients(kv.rank, step).items():
            gradient = mx.nd.array(gradient, dtype=gradient.dtype)
            kv.pushpull(key, gradient, out=outs[key])
            plain.pushpull(key, gradient, out=others[key])
        sent = [
            worker(gradients(rank, step)["w"].reshape(-1), step, lr, 1 / kv.num_workers)
            for rank, worker in enumerate(workers)
        ]
        weight = take_steps(weight, sent, lr, 0.01)
        np.testing.assert_array_equal(outs["w"].asnumpy().reshape(-1), weight)
        for key in ("b", "d"):
            np.testing.assert_array_equal(outs[key].asnumpy(), others[key].asnumpy())
    assert not np.array_equal(outs["w"].asnumpy(), others["w"].asnumpy())
    kinds = {key: stats["compression"] for key, stats in kv.stats()["keys"].items()}
    assert kinds == {"w": "dgc", "b": None, "d": None}, kinds
    print("rank %d: weights are those of NumPy, %s" % (kv.rank, hashlib.sha256(weight.tobytes()).hexdigest()[:16]))


def refusal(call, *arguments):
    try:
        call(*arguments)
    except mx.MXNetError as error:
        return str(error)
    raise AssertionError("%s took %s" % (call, arguments))


def check_refusals():
    def store(**options):
        kv = mx.kv.create("p3_sync")
        kv.set_gradient_compression({"type": "dgc", **options})
        return kv

    kv = store()
    for optimizer, why in (
        (mx.optimizer.Adam(), "dgc and another optimizer on the servers (adam) exclude each other"),
        (mx.optimizer.SGD(momentum=0.9, clip_gradient=1.0), "(SGD with clip_gradient=1.0) exclude each other"),
    ):
        assert why in refusal(kv.set_optimizer, optimizer)
    assert "dgc and averages exclude each other" in refusal(kv.set_reduction, "average")
    other = mx.kv.create("p3_sync")
    other.set_reduction("average")
    assert "dgc and averages exclude each other" in refusal(other.set_gradient_compression, {"type": "dgc"})
    for wrong, why in (({"ratio": 0}, "ratio is 0"), ({"ratio": 2}, "ratio is 2"), ({"warmup_steps": -1}, "warmup"),
                       ({"clip_norm": -1.0}, "clip_norm"), ({"masking": 1}, "masking"), ({"x": 1}, "'x'")):  # fmt: skip
        assert why in refusal(mx.kv.create("p3_sync").set_gradient_compression, {"type": "dgc", **wrong})
    # Nobody on the servers takes the steps.
    nothing, on_workers = lambda kv: None, lambda kv: kv.set_optimizer(mx.optimizer.LAMB())
    for prepare in (nothing, on_workers, lambda kv: kv._set_updater(print)):
        kv = store()
        kv.init("w", mx.nd.ones((4, 5)))
        prepare(kv)
        text = refusal(kv.push, "w", mx.nd.ones((4, 5)))
        assert "key 'w': dgc and sums handed to the workers (no optimizer is set on the servers) exclude" in text
    kv = store()
    kv.init("w", mx.nd.ones((4, 5)))
    kv.set_optimizer(mx.optimizer.SGD(momentum=0.9))
    kv.push("w", mx.nd.ones((4, 5)))
    for call in (kv.save_optimizer_states, kv.load_optimizer_states):
        assert "store %d: dgc and files of an optimizer's states" % kv.store.number in refusal(call, "states")
    print("rank %d: refused" % kv.rank)


if sys.argv[1] == "numpy":
    for CHOSEN in SETTINGS.values():
        check_weights(CHOSEN)
elif sys.argv[1] == "trainer":
    learn({"type": "dgc", "ratio": 0.05, "warmup_steps": 20, "clip_norm": 5.0}, new_rates=[(30, 0.02)])
else:
    check_refusals()
