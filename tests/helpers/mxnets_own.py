"""MXNet's own tests of its stores, for `p3_sync`: how they are fetched, and what is changed in them.

MXNET_SOURCE names MXNet 1.9.1's source: a folder with its files, or a git repository that has the tag 1.9.1. The files
are copied to where a test runs and changed there; none is kept here.
"""

import os
import subprocess
from pathlib import Path
from typing import Dict, List, NamedTuple

VERSION = "1.9.1"
NIGHTLY, UNITTEST = "tests/nightly/", "tests/python/unittest/"

# Why a line is changed.
NAME = "the store's name, and an import of P3"
PYTHON = "a float used as a length, which is an error from Python 3.10 on"
GPU = "CPUs in place of GPUs"
WORKS = "an error was expected, but P3 works"
LOCAL = "true for MXNet's single-machine stores, not for `dist_sync`"
STATES = "compares states of a worker's own optimizer; here the servers have them"
OTHER_OPTIMIZER = "the store already has another optimizer, which P3 does not replace: another store"


class Change(NamedTuple):
    old: str
    new: str
    times: int
    why: str


_IMPORT = Change("import mxnet as mx\n", "import p3\nimport mxnet as mx\n", 1, NAME)

CHANGES: Dict[str, List[Change]] = {
    NIGHTLY + "dist_sync_kvstore.py": [
        _IMPORT,
        Change("'dist_sync'", "'p3_sync'", 1, NAME),
        Change("num_rows/2", "num_rows//2", 2, PYTHON),
        Change("'default', 'row_sparse', False, ValueError", "'default', 'row_sparse', False, False", 1, WORKS),
        Change("assert_exception(params.load, RuntimeError, ", "params.load(", 1, WORKS),
    ],
    NIGHTLY + "dist_device_sync_kvstore_custom.py": [
        _IMPORT,
        Change("'dist_device_sync'", "'dist_p3_sync'", 1, NAME),
        Change("mx.gpu(", "mx.cpu(", 7, GPU),
    ],
    NIGHTLY + "dist_device_sync_kvstore.py": [
        _IMPORT,
        Change("'dist_device_sync'", "'p3_sync'", 1, NAME),
        Change("mx.gpu(", "mx.cpu(", 3, GPU),
        Change("kvstore=kv, ", "kvstore=mx.kv.create('p3_sync'), ", 1, OTHER_OPTIMIZER),
    ],
    NIGHTLY + "test_kvstore.py": [],  # dist_sync_kvstore.py takes a function from it
    UNITTEST + "test_kvstore.py": [
        Change("kv.type == kvtype", "kv.type == 'dist_p3_sync'", 1, NAME),
        Change("check_invalid_key_types_single(kvs", "(lambda *_: None)(kvs", 1, WORKS),
        Change("check_invalid_key_types_list(kvs", "(lambda *_: None)(kvs", 1, WORKS),
    ],
    UNITTEST + "test_kvstore_custom.py": [],
    UNITTEST + "test_gluon_trainer.py": [
        Change("['local', 'device']", "['dist_p3_sync']", 2, NAME),
        Change("assert trainer._update_on_kvstore is None", "assert trainer._update_on_kvstore", 1, LOCAL),
        Change("assert trainer._kvstore is None  #", "assert trainer._kvstore is not None  #", 1, LOCAL),
        Change("'default', 'row_sparse', None, False", "'default', 'row_sparse', None, True", 1, LOCAL),
    ],
    UNITTEST + "test_module.py": [
        Change("dict_equ(mod._kvstore._updater.states, mod2._updater.states)", "pass", 1, STATES),
    ],
    UNITTEST + "test_contrib_svrg_module.py": [],
    UNITTEST + "test_contrib_svrg_optimizer.py": [],
    UNITTEST + "common.py": [],
    "tests/python/common/models.py": [],
    "tests/python/train/test_bucketing.py": [],
}

# The unit tests name MXNet's stores for one machine, or take the Trainer's default, and run under nose.
_CONFTEST = """
import p3
import mxnet as mx

create = mx.kv.create
mx.kvstore.create = mx.kv.create = lambda name="local": create(name if name == "teststore" else "p3_sync")
mx.gluon.Trainer.__init__.__defaults__ = None, "dist_p3_sync", None, None
"""
_NOSE_TOOLS = """
import functools
import pytest

def make_decorator(function):
    return functools.wraps(function)

def assert_raises(error, function, *arguments, **settings):
    with pytest.raises(error):
        function(*arguments, **settings)

def raises(error):
    def decorate(test):
        return functools.wraps(test)(lambda: assert_raises(error, test))
    return decorate
"""


def source():
    """The folder or repository that MXNET_SOURCE names; None if it is not set."""
    path = os.environ.get("MXNET_SOURCE")
    return Path(path).resolve() if path else None


def write(folder, names):
    """The files, changed, side by side in `folder`."""
    for name in names:
        text = _read(name)
        for change in CHANGES[name]:
            if text.count(change.old) != change.times:
                raise ValueError(f"{name}: {change.old!r} is there {text.count(change.old)} times, not {change.times}")
            text = text.replace(change.old, change.new)
        (folder / Path(name).name).write_text(text, encoding="utf-8")


def write_unit_tests(folder):
    write(folder, [name for name in CHANGES if not name.startswith(NIGHTLY)])
    (folder / "conftest.py").write_text(_CONFTEST)
    (folder / "nose").mkdir()
    (folder / "nose" / "__init__.py").touch()
    (folder / "nose" / "tools.py").write_text(_NOSE_TOOLS)


def _read(name):
    path = source()
    shown = subprocess.run(
        ["git", "-C", str(path), "show", f"{VERSION}:{name}"], capture_output=True, encoding="utf-8", check=False
    )
    if shown.returncode == 0:
        return shown.stdout
    if f'"{VERSION}"' not in (path / "python/mxnet/libinfo.py").read_text(encoding="utf-8"):
        raise ValueError(f"MXNET_SOURCE={path} is not MXNet {VERSION}")
    return (path / name).read_text(encoding="utf-8")
