"""MXNet's front end: everything of P3 that knows MXNet.

`p3.mxnet.clip_global_norm` is loaded at first use, as it imports MXNet.
"""

import importlib


def __getattr__(name):
    if name != "clip_global_norm":
        raise AttributeError(f"module 'p3.mxnet' has no attribute {name!r}")
    return importlib.import_module("p3.mxnet.clipping").clip_global_norm
