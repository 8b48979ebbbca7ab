"""Every optimizer of mx.optimizer, by name: the store's weights follow it."""

import numpy as np

from compatibility.registry import case, expect_close

OPTIMIZERS = {
    "adadelta": {},
    "adagrad": {"learning_rate": 0.1},
    "adam": {"learning_rate": 0.01},
    "adamax": {"learning_rate": 0.01},
    "dcasgd": {"learning_rate": 0.1},
    "ftml": {"learning_rate": 0.01},
    "ftrl": {"learning_rate": 0.1},
    "lamb": {"learning_rate": 0.01},
    "lars": {"learning_rate": 0.1, "momentum": 0.9},
    "lbsgd": {"learning_rate": 0.1, "momentum": 0.9},
    "nadam": {"learning_rate": 0.01},
    "nag": {"learning_rate": 0.1, "momentum": 0.9},
    "rmsprop": {"learning_rate": 0.01},
    "sgd": {"learning_rate": 0.1, "momentum": 0.9, "clip_gradient": 0.5},
    "signum": {"learning_rate": 0.01, "momentum": 0.9, "wd_lh": 0.01},
}  # not sgld, which adds noise; dcasgd without momentum, which MXNet itself fails at


def _follows(name, settings):
    def run(mx, kv):
        random = np.random.RandomState(1)
        start = random.uniform(-1, 1, (40, 5)).astype("float32")
        gradients = random.uniform(-1, 1, (5, 2, 40, 5)).astype("float32")

        def create():
            return mx.optimizer.create(name, wd=0.01, rescale_grad=0.5, **settings)

        weight, updater = mx.nd.array(start), mx.optimizer.get_updater(create())
        kv.set_optimizer(create())
        kv.init(0, weight)
        for both in gradients:
            kv.push(0, mx.nd.array(both[kv.rank]))
            updater(0, mx.nd.array(both.sum(axis=0)), weight)
            out = mx.nd.zeros(weight.shape)
            kv.pull(0, out)
            expect_close(out, weight)

    return run


for _name, _settings in OPTIMIZERS.items():
    case("Optimizers", "`%s`" % _name, "optimizer_" + _name)(_follows(_name, _settings))
