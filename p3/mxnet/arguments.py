"""What scripts give to a store's methods: one key or a list of keys, each with an array or a list of arrays; and what
kind of array one is."""

import operator

from mxnet.base import MXNetError
from mxnet.ndarray import NDArray


def each(keys, *values):
    """(key, list of arrays, ...) for each key of a call. A single key may come with one array or one per device."""
    if not isinstance(keys, (list, tuple)):
        keys, values = (keys,), [(one,) for one in values]
    for one in values:
        if not isinstance(one, (list, tuple)) or len(one) != len(keys):
            raise MXNetError(f"{len(keys)} keys need as many values, in a list")
    return [(_key(key), *map(as_list, row)) for key, *row in zip(keys, *values)]


def grouped(keys, *values):
    """As each(); a key that the call names several times comes once, with all its arrays in the order given."""
    groups = {}
    for key, *arrays in each(keys, *values):
        before = groups.get(key)
        groups[key] = arrays if before is None else [[*had, *more] for had, more in zip(before, arrays)]
    return [(key, *arrays) for key, arrays in groups.items()]


def as_list(arrays):
    if not isinstance(arrays, (list, tuple)):
        return [arrays]
    if not arrays:
        raise MXNetError("an empty list of arrays was given for a key")
    return arrays


def as_trainers(trainer):
    if trainer is None:
        return []
    return list(trainer) if isinstance(trainer, (list, tuple)) else [trainer]


def checked(array, key):
    """`array`, if it is one that a key can take."""
    if type(array) is NDArray:  # the usual case
        return array
    if not isinstance(array, NDArray):
        raise MXNetError(f"key {key!r}: expected an NDArray or a list of them, not {type(array).__name__}")
    if array.stype not in ("default", "row_sparse"):
        raise MXNetError(f"key {key!r}: got a {array.stype} array; p3_sync takes dense and row_sparse arrays only")
    return array


def is_sparse(array):
    return type(array) is not NDArray and array.stype != "default"


def to_dense(array):
    return array.tostype("default") if is_sparse(array) else array


def classic(array):
    """MXNet's legacy operators take its NumPy-like arrays only under their classic type; the memory is the same."""
    return array if type(array) is NDArray or is_sparse(array) else array.as_nd_ndarray()


def _key(key):
    try:
        return key if isinstance(key, str) else operator.index(key)
    except TypeError:
        raise MXNetError(f"a key is a string or a whole number, not {key!r}") from None
