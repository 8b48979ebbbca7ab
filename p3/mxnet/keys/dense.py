"""The keys of a store: what each kind does for `init`, `push` and `pull`. Here what they share, and dense keys.

A DenseKey sends its whole gradient, cut into slices. Keys that send rows only are in rows.py; they have the same
methods, so that kvstore.py need not tell them apart.

Every method returns at once: it queues work in MXNet's engine.
"""

import ctypes
import logging
import struct

import mxnet as mx
import numpy as np
from mxnet.base import _LIB, MXNetError, check_call
from mxnet.ndarray.sparse import RowSparseNDArray

from p3._core import DTYPES
from p3.frontend.pieces import pieces
from p3.mxnet import _mxnet
from p3.mxnet.arguments import checked, classic, is_sparse, to_dense
from p3.mxnet.factored_layers import layer_of
from p3.mxnet.priorities import Priority

log = logging.getLogger("p3")


class Key:
    """One key of a store; Priorities notes here what it knows of it: index, parameter, searched."""

    route = None  # how its gradients travel

    def __init__(self, engine, key, declared, sparse_weight, landing):
        self.id = key
        self.engine = engine
        self.declared = declared  # the session's Key
        self.shape, self.dtype = declared.landing_shape, declared.dtype
        self.sparse_weight = sparse_weight  # whether the script's own arrays of the weight are row_sparse
        self.landing = landing  # None where the rows stay on the servers; such a key overrides what uses it
        self.anchor = landing  # what each round writes in MXNet's engine
        self.template = landing  # a weight for which an optimizer makes its state
        self.weight = None  # only where this worker updates
        self.outs = ()  # where its value was copied to last
        self.parameter = None  # whose weight it is, if Priorities knows
        self.pushed = False  # whether this worker has ever pushed it
        self.in_steps = False  # or is known to do so in its steps
        self.priority = Priority(0, 0)  # of its last round or read: what follows from that has the same

    def init(self, value, priority):
        """`value`: None on all ranks but 0."""
        if value is not None and value is not self.landing:
            # By MXNet, because inference may have left the weight itself in a layout that only MXNet can read.
            to_dense(classic(value)).copyto(self.landing)
        self.operations.init(0, priority)

    def push(self, gradient, scalars, priority):
        """`gradient`: what gradient() has made of a call's arrays."""
        self.operations.push(gradient.handle.value, scalars, priority)

    def skip(self, completions, token):
        """In join(), as StoreNorm.skip()."""
        self.operations.skip(self.priority, completions, token)

    def begin_sums(self):
        """Before the next round, which nobody updates by on the servers: its sums take the place of the value, also
        where it has none."""

    def keep_weight(self):
        self.weight = self.landing.copy()

    def value(self, priority):
        """The value (or sum), perhaps the key's own array. `priority`: where it must be fetched."""
        return self.landing if self.weight is None else self.weight

    def sum_for_updater(self):
        return self.landing

    def read_rows(self, ids, priority):
        """A new row_sparse array, in CPU memory, of the value's rows `ids`: ascending, each once, at least one."""
        rows = self.new_rows(ids)
        source = self.value(priority).handle.value
        self.operations.gather(ids, source, rows.handle.value, self.row_bytes, priority)
        return rows

    def new_rows(self, ids):
        """What read_rows() returns, before it has values.

        MXNet reads it from its own format, as filling in the ids of an array would wait for MXNet's engine.
        """
        values_shape = (len(ids), *self.shape[1:])
        head = struct.pack("<Ii", 0xF993FAC9, 1) + _packed(values_shape) + _packed(self.shape)  # row_sparse
        head += struct.pack("<4i", 1, 0, DTYPES[self.dtype], DTYPES["int64"]) + _packed(ids.shape)  # in CPU memory
        content = b"".join((head, bytes(len(ids) * self.row_bytes), ids))
        handle = mx.base.NDArrayHandle()
        check_call(_LIB.MXNDArrayLoadFromRawBytes(content, ctypes.c_size_t(len(content)), ctypes.byref(handle)))
        return RowSparseNDArray(handle)

    @property
    def row_bytes(self):
        return int(np.prod(self.shape[1:], dtype=np.int64)) * np.dtype(self.dtype).itemsize

    def stats(self, counters, num_workers):
        """What the store's stats() say of the key. `counters`: the session's."""
        return dict(counters, route=self.route)

    def wait(self):
        """Until MXNet's engine has handed the key's rounds to the core, and they are done."""
        self.anchor.wait_to_read()

    def require_shape(self, array, action, and_type=False):
        """MXNetError unless `array` is one that a key can take, and has this key's shape; or its type, too."""
        fits = self.engine.same_shape(self.template.handle.value, checked(array, self.id).handle.value)
        if not fits or (and_type and not self.has_type_of(array)):
            type_name = getattr(array.dtype, "__name__", str(array.dtype))
            raise MXNetError(
                f"key {self.id!r} has shape {self.shape} and type {self.dtype}; it cannot be "
                f"{action} shape {array.shape} and type {type_name}"
            )

    def require_outs(self, arrays):
        for array in arrays:
            self.require_shape(array, "pulled into an array of")

    def has_type_of(self, array):
        return self.engine.same_type(self.template.handle.value, array.handle.value)

    def copy_out(self, outs, priority):
        value = self.value(priority) if outs else None
        for out in outs:
            self.copy_to(out, value)

    def copy_to(self, out, source):
        """A whole copy by MXNet, also to another device, storage type or element type."""
        if source.stype != out.stype:
            source = source.tostype(out.stype)
        self.engine.copy(source.handle.value, out.handle.value)

    def sum_devices(self, values):
        """The sum over this worker's devices, in the order given, on the first device and in its type."""
        total = classic(values[0])
        for value in values[1:]:
            value = classic(value).astype(total.dtype, copy=False)
            total = mx.nd.elemwise_add(total, value.as_in_context(total.context))
        return total


class DenseKey(Key):
    route = "dense"

    def __init__(self, engine, key, declared, sparse_weight=False, landing=None):
        super().__init__(engine, key, declared, sparse_weight, new_landing(declared) if landing is None else landing)
        self.densifies = False  # whether a log line has said so
        self.leaves_whole = declared.axes.leaves_whole  # a gradient, when all of it is in CPU memory
        self.operations = _mxnet.MXNetKey(engine, declared.handle, str(key), self.landing.handle.value)

    def gradient(self, values):
        """What push() sends: the sum over this worker's devices, on the first of them."""
        if layer_of(self.parameter) is not None:
            raise MXNetError(
                f"key {self.id!r}: its gradient arrays hold factors since p3.factors, which must come before the key's "
                "first push"
            )
        if any(map(is_sparse, values)):
            if not self.densifies:
                self.densifies = True
                log.warning("key %r: its row_sparse gradients are made dense, and all of its rows are sent", self.id)
            values = [to_dense(value) for value in values]
        return self.sum_devices(values)

    def push(self, gradient, scalars, priority):
        if not is_on_device(self.engine, gradient):
            return super().push(gradient, scalars, priority)
        if gradient.size <= self.engine.first_piece or self.leaves_whole:
            return super().push(gradient.copyto(mx.cpu()), scalars, priority)
        # In new memory: the array is the core's until the round is over, and no operation of MXNet's may hold it.
        buffer = new_landing(self.declared)
        arrival = self.operations.push_arriving(buffer.handle.value, scalars, priority)
        source, target = gradient.reshape(-1), buffer.reshape(-1)
        for begin, end in pieces(source.size, self.engine.first_piece):
            piece, place = source[begin:end], target[begin:end]
            self.engine.copy(piece.handle.value, place.handle.value)
            self.operations.arrived(arrival, buffer.handle.value, end, priority)


def is_on_device(engine, array):
    """Tests of the copies that follow put another function here, which takes CPU memory for a device's."""
    return not engine.in_cpu_memory(array.handle.value)


def new_landing(declared):
    with mx.util.np_shape(True):  # or MXNet takes a length of 0 for "not known yet"
        return mx.nd.empty(declared.landing_shape, mx.cpu(), declared.dtype)


def _packed(shape):
    return struct.pack(f"<i{len(shape)}q", len(shape), *shape)
