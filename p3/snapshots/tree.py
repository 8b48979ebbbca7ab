"""Values of a script as they lie in a snapshot: arrays as tensors, the rest as JSON. No pickles.

A tree is None, a bool, int, float or str, an array, or a list, tuple or dict of trees. It comes back as it was, types
and bits; an MXNet array as one in CPU memory.
"""

from __future__ import annotations

import json
import sys
from typing import Any, Callable, Dict, List, Tuple

import numpy as np

from p3.snapshots.files import FILE_TYPES

_PLAIN = (type(None), bool, int, float, str)
_KEYS = (bool, int, float, str)  # of dicts


def checked(tree: Any, where: str, copy: Callable[[Any], Any] = np.array) -> Any:
    """A copy of the tree, for another thread. ValueError, naming the entry, if a snapshot cannot hold it.

    `copy` makes an array's.
    """
    if type(tree) in _PLAIN:
        return tree
    if isinstance(tree, np.generic):
        return checked(tree.item(), where)
    if type(tree) in (list, tuple):
        return type(tree)(checked(item, "%s[%d]" % (where, number), copy) for number, item in enumerate(tree))
    if isinstance(tree, dict):
        for key in tree:
            if type(key) not in _KEYS:
                raise ValueError("%s: the key %r cannot be in a snapshot; strings and numbers can" % (where, key))
        return {key: checked(item, "%s[%r]" % (where, key), copy) for key, item in tree.items()}
    if (isinstance(tree, np.ndarray) or _is_mxnet(tree)) and np.dtype(tree.dtype).name in FILE_TYPES:
        return copy(tree)
    type_name = type(tree).__name__
    if hasattr(tree, "dtype"):
        type_name += " of %s" % tree.dtype
    raise ValueError(
        "%s is a %s, which cannot be in a snapshot; arrays, numbers, strings, None, and lists and dicts of them can"
        % (where, type_name)
    )


def encode(tree: Any) -> Tuple[List[Tuple[str, str, Tuple[int, ...], Any]], Dict[str, str]]:
    """(tensors, metadata) for files.write_part. Waits for MXNet's arrays."""
    tensors: List[Tuple[str, str, Tuple[int, ...], Any]] = []

    def walk(value: Any) -> Any:
        if type(value) in _PLAIN:
            return value
        if isinstance(value, (list, tuple)):
            return {type(value).__name__: [walk(item) for item in value]}
        if isinstance(value, dict):
            return {"dict": [[key, walk(item)] for key, item in value.items()]}
        kind = "numpy"
        if _is_mxnet(value):
            kind = "mxnet." + value.stype
            value = value.asnumpy()
        array = np.ascontiguousarray(value).reshape(value.shape)
        name = "array.%d" % len(tensors)
        tensors.append((name, array.dtype.name, array.shape, array))
        return {"array": [name, kind]}

    return tensors, {"tree": json.dumps(walk(tree))}


def decode(tensors: Dict[str, Any], metadata: Dict[str, str]) -> Any:
    """The tree of encode(). ValueError if they hold none."""

    def walk(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        ((kind, content),) = value.items()
        if kind == "dict":
            return {key: walk(item) for key, item in content}
        if kind in ("list", "tuple"):
            return {"list": list, "tuple": tuple}[kind](walk(item) for item in content)
        name, array_kind = content
        return to_mxnet(tensors[name], array_kind[6:]) if array_kind.startswith("mxnet.") else tensors[name]

    try:
        return walk(json.loads(metadata["tree"]))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError("the part of a worker holds no values: %s: %s" % (type(error).__name__, error)) from None


def _is_mxnet(value: Any) -> bool:
    mxnet = sys.modules.get("mxnet")
    return mxnet is not None and isinstance(value, mxnet.nd.NDArray)


def to_mxnet(array: np.ndarray, stype: str = "default") -> Any:
    import mxnet as mx

    with mx.util.np_shape(True):  # or MXNet takes a length of 0, and the empty shape, for "not known yet"
        made = mx.nd.array(array, dtype=array.dtype)
    return made if stype == "default" else made.tostype(stype)
