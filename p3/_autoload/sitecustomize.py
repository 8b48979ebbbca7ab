"""Python runs this before a worker's script: `p3 exec` puts this folder on PYTHONPATH.

It registers the P3 stores, so that mx.kv.create('p3_sync') cannot silently make a local store. Another sitecustomize is
run as well. Pythons without P3, of tools that a worker starts, are left as they are.
"""

import os
import sys


def _run_other_sitecustomize(here):
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    spec = PathFinder.find_spec("sitecustomize", [entry for entry in sys.path if os.path.abspath(entry) != here])
    if spec is not None:
        spec.loader.exec_module(module_from_spec(spec))


def _register(here):
    root = os.path.dirname(os.path.dirname(here))
    try:
        import p3
    except ImportError:
        # P3 may run from its source tree, which holds nothing but P3, built for this Python. Never the packages of
        # another Python.
        if os.path.basename(root) in ("site-packages", "dist-packages") or not _built(root):
            return
        sys.path.append(root)
        import p3  # noqa: F401


def _built(root):
    from importlib.machinery import EXTENSION_SUFFIXES

    return any(os.path.exists(os.path.join(root, "p3", "_core" + suffix)) for suffix in EXTENSION_SUFFIXES)


_here = os.path.dirname(os.path.abspath(__file__))
_run_other_sitecustomize(_here)
if os.environ.get("DMLC_ROLE") == "worker":
    _register(_here)
