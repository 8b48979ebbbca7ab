"""When MXNet is imported, P3 plugs itself in: its stores, and what it changes there (changes.py).

Every Python that a worker starts imports this module, so it imports next to nothing itself.

Never in a server or scheduler of MXNet's or P3's: importing MXNet there starts MXNet's own server and never returns.
"""

import importlib
import os
import sys
import warnings

KINDS = ("p3_sync", "p3_async", "p3_ssp")
NAMES = (*KINDS, *("dist_" + kind for kind in KINDS))
_STORE = "p3.mxnet.kvstore"  # which plugs itself in when it is imported, also where that is what imports MXNet
BULK_VARIABLE = "MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN"


def may_be_apart(store):
    """Whether the workers of a store of that name or type, P3's or MXNet's, may be rounds apart."""
    return "async" in store or "p3_ssp" in store


def install():
    """Plugs P3 into MXNet if it is imported already, else as soon as it is. Called by `import p3`."""
    if os.environ.get("DMLC_ROLE") in ("server", "scheduler"):
        return
    if sys.modules.get("mxnet") is not None:
        if is_distributed_worker() and BULK_VARIABLE not in os.environ:
            warnings.warn(
                f"MXNet was imported before p3 and without {BULK_VARIABLE}=1, so backward passes that are not "
                "hybridized hand out gradients in groups of 15 operators and parameters are synchronised later than "
                "they could be. Import p3 first, or start the script with 'p3 run' or 'p3 exec'.",
                stacklevel=4,
            )
        importlib.import_module(_STORE)
    else:
        sys.meta_path.insert(0, _MXNetFinder())


def numpy_problem(version):
    """What is wrong with this version of NumPy for MXNet, and the command that mends it; None if it suits."""
    if not version or tuple(int(part) for part in version.split(".")[:2]) < (1, 24):
        return None
    finding = "NumPy %s is installed, and MXNet 1.9.1 fails to import with 1.24 and later" % version
    return finding, "%s -m pip install 'numpy<1.24'" % sys.executable


def withdraw():
    """Undoes install(), before MXNet is imported: MXNet stays as it is, without P3's stores."""
    if "mxnet" in sys.modules:
        raise RuntimeError("p3.mxnet.hooks.withdraw: MXNet is imported already; call it before")
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _MXNetFinder)]


def is_distributed_worker():
    return os.environ.get("DMLC_ROLE") == "worker"


class _MXNetFinder:
    """Finds MXNet as all other finders do, and has P3 plugged in when its loader is done."""

    def find_spec(self, name, path=None, target=None):
        if name != "mxnet":
            return None
        specs = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def exec_module(module):
            if is_distributed_worker():
                os.environ.setdefault(BULK_VARIABLE, "1")  # MXNet reads it once, while it loads
            try:
                load(module)
            except AttributeError as error:  # a name that NumPy has no more, deep in MXNet
                problem = numpy_problem(getattr(sys.modules.get("numpy"), "__version__", ""))
                if problem is None:
                    raise
                raise ImportError("%s (%s). Run: %s" % (problem[0], str(error).splitlines()[0], problem[1])) from None
            importlib.import_module(_STORE)

        spec.loader.exec_module = exec_module
        return spec
