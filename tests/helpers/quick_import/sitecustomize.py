"""In the PYTHONPATH of tests' processes: what is slow to import takes a part of its time: quick_mxnet, quick_torch.

Where P3S_FORK_SERVERS names the folder of fork servers' sockets (../forked.py), a process whose library one of them has
imported stands for one that is forked there, whoever starts it.
"""

import functools
import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

import quick_mxnet
import quick_torch


class _Finder:
    """Of the modules that are loaded in another way."""

    _loads = {**quick_mxnet.LOADS, **quick_torch.LOADS}

    @classmethod
    def find_spec(cls, name, path, target=None):
        load = cls._loads.get(name)
        spec = PathFinder.find_spec(name, path) if load else None
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = functools.partial(load, spec.loader.exec_module)
        return spec


sys.meta_path.insert(0, _Finder)

_servers = os.environ.get("P3S_FORK_SERVERS")
if _servers and os.environ.get("DMLC_ROLE", "worker") == "worker":  # MXNet is another role's loop when it is imported
    sys.path.append(os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "fork_server"))
    import needs

    _arguments = needs.arguments(getattr(sys, "orig_argv", []))
    _library = needs.library(_arguments) if _arguments else None
    if _library is not None:
        import ask

        ask.stand_for(os.path.join(_servers, _library), _arguments)
    sys.path.pop()

# One that a test has written runs as well: in a folder behind this one, as P3's own is before it, and runs this one.
_here = [os.path.abspath(entry) for entry in sys.path].index(os.path.dirname(os.path.abspath(__file__)))
_other = PathFinder.find_spec("sitecustomize", sys.path[_here + 1 :])
if _other is not None:
    _other.loader.exec_module(module_from_spec(_other))
