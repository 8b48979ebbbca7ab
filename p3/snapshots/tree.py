"""Values of a script as they lie in a snapshot: arrays as tensors, the rest as JSON. No pickles.

A tree is None, a bool, int, float or str, an array, or a list, tuple or dict of trees. It comes back as it was, types
and bits. Arrays are NumPy's, and those that a front end has registered, which come back in CPU memory.
"""

from __future__ import annotations

import json
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import numpy as np

from p3.snapshots.files import FILE_TYPES

_PLAIN = (type(None), bool, int, float, str)
_KEYS = (bool, int, float, str)  # of dicts
_TREE = "tree"  # the tensor that has the JSON: it may be longer than a file's header


class ArrayKind(NamedTuple):
    """A front end's arrays."""

    type: type
    variant: Callable[[Any], str]  # what there is to say of one, beside what NumPy's array says
    to_numpy: Callable[[Any], np.ndarray]  # may wait
    from_numpy: Callable[[np.ndarray, str], Any]  # array and variant
    copy: Callable[[Any], Any]  # another one, of the same kind
    type_name: Callable[[Any], str] = lambda array: np.dtype(array.dtype).name  # of its elements, NumPy's


_kinds: Dict[str, ArrayKind] = {}


def register(front_end: str, kind: ArrayKind) -> None:
    """From now on such arrays can be in a tree."""
    _kinds[front_end] = kind


def _front_end_of(value: Any) -> Optional[str]:
    return next((name for name, kind in _kinds.items() if isinstance(value, kind.type)), None)


def checked(tree: Any, where: str) -> Any:
    """A copy of the tree, for another thread. ValueError, naming the entry, if a snapshot cannot hold it."""
    if type(tree) in _PLAIN:
        return tree
    if isinstance(tree, np.generic):
        return checked(tree.item(), where)
    if type(tree) in (list, tuple):
        return type(tree)(checked(item, "%s[%d]" % (where, number)) for number, item in enumerate(tree))
    if isinstance(tree, dict):
        for key in tree:
            if type(key) not in _KEYS:
                raise ValueError("%s: the key %r cannot be in a snapshot; strings and numbers can" % (where, key))
        return {key: checked(item, "%s[%r]" % (where, key)) for key, item in tree.items()}
    kind = _kinds.get(_front_end_of(tree))
    if kind is not None and kind.type_name(tree) in FILE_TYPES:
        return kind.copy(tree)
    if isinstance(tree, np.ndarray) and tree.dtype.name in FILE_TYPES:
        return np.array(tree, tree.dtype if tree.dtype.isnative else tree.dtype.newbyteorder())
    type_name = type(tree).__name__
    if hasattr(tree, "dtype"):
        type_name += " of %s" % tree.dtype
    raise ValueError(
        "%s is a %s, which cannot be in a snapshot; arrays, numbers, strings, None, and lists and dicts of them can"
        % (where, type_name)
    )


def encode(tree: Any) -> List[Tuple[str, str, Tuple[int, ...], Any]]:
    """Tensors for files.write_part. Waits for a front end's arrays."""
    tensors: List[Tuple[str, str, Tuple[int, ...], Any]] = []

    def add(name: str, array: np.ndarray) -> None:
        tensors.append((name, array.dtype.name, array.shape, array))

    def walk(value: Any) -> Any:
        if type(value) in _PLAIN:
            return value
        if isinstance(value, (list, tuple)):
            return {type(value).__name__: [walk(item) for item in value]}
        if isinstance(value, dict):
            return {"dict": [[key, walk(item)] for key, item in value.items()]}
        kind, front_end = "numpy", _front_end_of(value)
        if front_end is not None:
            kind = "%s.%s" % (front_end, _kinds[front_end].variant(value))
            value = _kinds[front_end].to_numpy(value)
        array = np.ascontiguousarray(value).reshape(value.shape)
        name = "array.%d" % len(tensors)
        add(name, array)
        return {"array": [name, kind]}

    add(_TREE, np.frombuffer(json.dumps(walk(tree)).encode(), np.uint8))
    return tensors


def decode(tensors: Dict[str, Any]) -> Any:
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
        front_end, _, variant = array_kind.partition(".")
        if front_end == "numpy":
            return tensors[name]
        if front_end not in _kinds:
            raise ValueError("it holds arrays of %s: import p3 and %s before resume()" % (front_end, front_end))
        return _kinds[front_end].from_numpy(tensors[name], variant)

    try:
        return walk(json.loads(tensors[_TREE].tobytes()))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError("the part of a worker holds no values: %s: %s" % (type(error).__name__, error)) from None
