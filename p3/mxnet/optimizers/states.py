"""Optimizer states between the servers and MXNet: as the objects that mx.optimizer makes, and as files of them.

The servers keep plain arrays for each weight, one for each state of the algorithm, and the float32 master copy of a
float16 weight. MXNet nests them in a structure of each optimizer's own, which its `create_state_multi_precision` makes;
that object is the template here.
"""

import os
import pickle

import mxnet as mx
import numpy as np
from mxnet.base import MXNetError

from p3.mxnet.arguments import classic
from p3.snapshots.files import write_file

# np_shape in this file: or MXNet takes a length of 0, and the empty shape, for "not known yet". Not around files, which
# MXNet loads only under the setting that they were saved under: that one is the script's.


def to_mxnet(optimizer, index, weight, arrays, master):
    """The state of `weight` that `optimizer` would hold, filled with `arrays` in the order of the native states.

    The arrays are NumPy's, of the weight's size, and of float32 for a float16 weight; `master` is None unless there is
    a master copy. A float16 weight without one has float16 states in MXNet, to which they are rounded.
    """
    template = _template(optimizer, index, weight)
    leaves = list(arrays)
    if _has_master(optimizer, weight):
        leaves.insert(len(leaves) if _master_is_last(optimizer) else 0, master)
    expected = len(_leaves(template))
    if len(leaves) != expected:
        name = type(optimizer).__name__
        raise ValueError(f"key {index!r}: {len(leaves)} arrays given, but {name} has {expected} for this weight")
    remaining = iter(leaves)

    def fill(part):
        if isinstance(part, (tuple, list)):
            return type(part)(fill(each) for each in part)
        if part is None:
            return None
        values = np.asarray(next(remaining)).reshape(part.shape)
        array = mx.nd.array(values, ctx=part.context, dtype=_dtype(part, weight))
        return array if part.stype == "default" else array.tostype(part.stype)

    with mx.util.np_shape(True):
        return fill(template)


def from_mxnet(optimizer, index, weight, state):
    """(arrays, master) of a state that MXNet or `to_mxnet` made; None will do for a state where there is none.

    MXNetError, naming the key and what differs, unless `optimizer` would make the like for `weight`.
    """
    template = _template(optimizer, index, weight)
    leaves = []

    def collect(part, found):
        wanted, got = _shown(part, weight), _shown(found)
        if wanted != got:
            raise MXNetError(
                f"optimizer state of key {index!r}: {type(optimizer).__name__} has {wanted} here, and the file {got}; "
                "it is of another model, or of an optimizer with other settings"
            )
        if isinstance(part, (tuple, list)):
            for each, its in zip(part, found):
                collect(each, its)
        elif part is not None:
            leaves.append(found.asnumpy())

    if state is not None or _leaves(template):
        collect(template, state)
    master = None
    if _has_master(optimizer, weight) and leaves:
        master = leaves.pop(-1 if _master_is_last(optimizer) else 0)
    arithmetic = np.float64 if weight.dtype == np.float64 else np.float32
    return [leaf.astype(arithmetic) for leaf in leaves], master


def write(path, states, optimizer=None):
    """Writes what mx.optimizer.Updater.set_states loads: a dict of key to state, with the optimizer if there is one.

    The file is complete or as it was before, also if the machine fails meanwhile. MXNetError if it cannot be written.
    """
    try:
        content = pickle.dumps(states if optimizer is None else (states, optimizer))
        write_file(os.path.realpath(path), [content])  # a link stays one
    except Exception as error:  # what an optimizer of the user's own may raise when it is pickled is not known
        raise MXNetError(f"optimizer states cannot be written to {path}: {error}") from error


def read(path):
    """(states, optimizer or None) of a file that `write` or MXNet wrote. MXNetError if it is no such file.

    MXNet's format is a pickle, which can run any code when it is read: read only files that you trust.
    """
    try:
        with open(path, "rb") as file:
            content = pickle.load(file)
    except OSError as error:
        raise MXNetError(f"optimizer states cannot be read from {path}: {error.strerror}") from None
    except Exception as error:  # a damaged pickle may raise anything
        raise MXNetError(f"{path} is truncated or holds no optimizer states: {error}") from error
    states, optimizer = content if isinstance(content, tuple) and len(content) == 2 else (content, None)
    if not isinstance(states, dict) or not isinstance(optimizer, (mx.optimizer.Optimizer, type(None))):
        raise MXNetError(f"{path} holds no optimizer states, but a {type(content).__name__} of something else")
    return states, optimizer


def _template(optimizer, index, weight):
    with mx.util.np_shape(True):
        return optimizer.create_state_multi_precision(index, classic(weight))


def _has_master(optimizer, weight):
    return optimizer.multi_precision and weight.dtype == np.float16


def _master_is_last(optimizer):
    return isinstance(optimizer, (mx.optimizer.SGD, mx.optimizer.NAG))


def _leaves(state):
    if isinstance(state, (tuple, list)):
        return [leaf for part in state for leaf in _leaves(part)]
    return [] if state is None else [state]


def _dtype(part, weight):
    # Some optimizers make float32 states for float64 weights, which MXNet's operators then refuse.
    return np.dtype(np.float64 if weight.dtype == np.float64 else part.dtype)


def _shown(part, weight=None):
    """What must be equal for two parts of a state to fit, in words."""
    if isinstance(part, (tuple, list)):
        return f"{len(part)} parts"
    if isinstance(part, mx.nd.NDArray):
        dtype = np.dtype(part.dtype) if weight is None else _dtype(part, weight)
        return f"an array of shape {part.shape} and type {dtype}"
    return "nothing" if part is None else f"a {type(part).__name__}"


def fresh(optimizer, index, weight):
    """(arrays, master) as MXNet begins them for `weight`."""
    return from_mxnet(optimizer, index, weight, _template(optimizer, index, weight))
