"""MXNet's front end: everything of P3 that knows MXNet.

`p3.mxnet.clip_global_norm`, and `LocalSteps` with `resume` and `snapshot` beside it, are loaded at first use, as that
imports MXNet.
"""

import importlib

_LAZY = {
    "LocalSteps": "p3.mxnet.local_steps",
    "clip_global_norm": "p3.mxnet.clipping",
    "resume": "p3.mxnet.local_steps",
    "snapshot": "p3.mxnet.local_steps",
}


def __getattr__(name):
    if name not in _LAZY:
        raise AttributeError(f"module 'p3.mxnet' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
