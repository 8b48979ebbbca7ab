"""P3: priority-based parameter propagation for data-parallel training with PyTorch (p3.torch) or MXNet.

    import p3.torch
    optimizer = p3.torch.DistributedOptimizer(optimizer, model)

    import p3
    kv = mx.kv.create("p3_sync")
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=kv)

Importing p3 imports neither MXNet nor the C++ core: the store registers itself when MXNet is imported, before or
after p3. `P3Worker`, `P3Server`, `Session`, `LocalSteps`, `P3Error`, `shard` and `SplitSampler` are loaded at first
use and need no MXNet.
"""

import importlib

from p3.mxnet import hooks

__version__ = "0.1.0"
__all__ = [
    "LocalSteps", "P3Error", "P3KVStore", "P3Server", "P3Worker", "Session", "SplitSampler", "__version__", "factors",
    "shard",
]  # fmt: skip

_LAZY = {
    "LocalSteps": "p3.frontend.local_steps.arrays",
    "P3Error": "p3._core",
    "P3KVStore": "p3.mxnet.kvstore",
    "P3Server": "p3._core",
    "P3Worker": "p3._core",
    "Session": "p3.worker.session",
    "SplitSampler": "p3.data",
    "factors": "p3.mxnet.factored_layers",
    "shard": "p3.data",
}


def __getattr__(name):
    if name not in _LAZY:
        raise AttributeError(f"module 'p3' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


hooks.install()
