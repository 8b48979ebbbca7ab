"""Python runs this before a worker's script: `p3 exec` puts this folder on PYTHONPATH.

It registers the P3 stores, so that mx.kv.create('p3_sync') cannot silently make a local store. Another sitecustomize is
run as well.
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
    try:
        import p3
    except ImportError:
        sys.path.append(os.path.dirname(os.path.dirname(here)))  # P3 runs from its source tree
        import p3  # noqa: F401


_here = os.path.dirname(os.path.abspath(__file__))
_run_other_sitecustomize(_here)
if os.environ.get("DMLC_ROLE") == "worker":
    _register(_here)
