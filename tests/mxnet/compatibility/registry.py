"""The rows of the tables. A case is a function of MXNet and a store; the first line of its docstring is its row.

It uses what MXNet offers any store, and raises WrongResult if a value is not the expected one. Any other exception is
the store's refusal.
"""

from typing import Callable, Dict, NamedTuple

import numpy as np

STORES = {"dist_sync": "`dist_sync`", "mxnet_p3": "MXNet's P3", "p3_sync": "`p3_sync`"}


class Case(NamedTuple):
    table: str
    row: str
    run: Callable  # (mx, kv); or (mx, type of the store), where the case creates the store
    creates_store: bool
    alone: bool  # a job of its own, as what it does may end the job
    env: Dict[str, str]
    dies: bool  # worker 1 kills itself


CASES: Dict[str, Case] = {}


class WrongResult(Exception):
    pass


def case(table, row=None, name=None, creates_store=False, alone=False, env=None, dies=False):
    def register(function):
        text = row or function.__doc__.splitlines()[0].rstrip(".")
        key = name or function.__name__
        if key in CASES:
            raise ValueError("two cases are called %s" % key)
        CASES[key] = Case(table, text, function, creates_store, alone or bool(env) or dies, env or {}, dies)
        return function

    return register


def expect(condition, text):
    if not condition:
        raise WrongResult(text)


def expect_equal(got, expected):
    """Exactly, in every element."""
    got, expected = _numpy(got), np.broadcast_to(_numpy(expected), got.shape)
    expect(np.array_equal(got, expected), "%s instead of %s" % (_short(got), _short(expected)))


def expect_close(got, expected, tolerance=1e-5):
    """Relative to the largest expected value."""
    got, expected = _numpy(got).astype("float64"), _numpy(expected).astype("float64")
    far = np.abs(got - expected).max(initial=0) > tolerance * np.abs(expected).max(initial=1e-3)
    expect(not far and np.isfinite(got).all(), "%s instead of %s" % (_short(got), _short(expected)))


def _numpy(array):
    return array.asnumpy() if hasattr(array, "asnumpy") else np.asarray(array)


def _short(array):
    text = np.array2string(array.ravel()[:3], precision=4, separator=", ")
    return text[:-1] + ", ...]" if array.size > 3 else text
