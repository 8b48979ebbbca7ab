"""Python runs this before a worker's script: `p3 exec` puts this folder on PYTHONPATH.

It registers the P3 stores, so that mx.kv.create('p3_sync') cannot silently make a local store, and warns at exit if
the script used MXNet without ever opening a store: then it has trained alone. Another sitecustomize is run as well.
"""

import atexit
import os
import sys

_WARNING = (
    "p3: this worker used MXNet but never opened a P3 store, so it trained alone, without the other workers. Create it "
    "with kv = mx.kv.create('p3_sync') and give the object, not the string, to gluon.Trainer(..., kvstore=kv)."
)


def _run_other_sitecustomize(here):
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    spec = PathFinder.find_spec("sitecustomize", [entry for entry in sys.path if os.path.abspath(entry) != here])
    if spec is not None:
        spec.loader.exec_module(module_from_spec(spec))


def _warn_if_alone():
    session = sys.modules.get("p3.worker.session")
    processes = sys.modules.get("multiprocessing.process")
    is_main = processes is None or processes.parent_process() is None
    if "mxnet" in sys.modules and is_main and (session is None or not session.ever_opened()):
        print(_WARNING, file=sys.stderr)


def _register(here):
    try:
        import p3  # noqa: F401
    except ImportError:
        sys.path.append(os.path.dirname(os.path.dirname(here)))  # P3 runs from its source tree
        import p3  # noqa: F401
    atexit.register(_warn_if_alone)


_here = os.path.dirname(os.path.abspath(__file__))
_run_other_sitecustomize(_here)
if os.environ.get("DMLC_ROLE") == "worker":
    _register(_here)
