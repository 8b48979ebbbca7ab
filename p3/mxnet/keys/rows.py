"""Keys of rows: keys whose gradients are row_sparse, and of which only the rows that were touched travel.

RowKey: the weight is dense, so every worker has all of it: the landing array. What a round has changed there is copied
to the script's weight, and nothing else: rows that the script itself writes into that array stay until they are
touched. The first copy to an array is a whole one.

ServerRowKey: the weight is row_sparse and lives on the servers; workers read the rows that they ask for.
"""

import mxnet as mx
import numpy as np
from mxnet.base import MXNetError

from p3._core import NO_SCALARS
from p3.mxnet import _mxnet
from p3.mxnet.arguments import checked, is_sparse, to_dense
from p3.mxnet.keys.dense import Key, new_landing


class _KeyOfRows(Key):
    route = "rows"

    def __init__(self, engine, key, declared, sparse_weight, landing, anchor, template):
        super().__init__(engine, key, declared, sparse_weight, landing)
        self.anchor, self.template = anchor, template
        lands = landing is not None
        self.operations = _mxnet.MXNetRowsKey(
            engine, declared.handle, str(key), anchor.handle.value, self.shape[0], self.row_bytes, lands
        )

    def gradient(self, values):
        """As DenseKey.gradient; and if it is row_sparse, it is an array that nobody will write again."""
        total = self.sum_devices(values)
        is_ours = len(values) > 1
        if not self.engine.in_cpu_memory(total.handle.value) or (is_sparse(total) and not is_ours):
            total = total.copyto(mx.cpu())
        return total

    def stats(self, counters, num_workers):
        pushes = 1 if self.declared.staleness > 0 else num_workers  # that the counts are of
        alpha = counters["pushed_rows"] / (self.shape[0] * pushes)
        density = counters["touched_rows"] / self.shape[0]
        route = "slices" if counters["as_slices"] else "rows"
        return dict(counters, route=route, compression=None, alpha=alpha, union_density=density)


class RowKey(_KeyOfRows):
    def __init__(self, engine, key, declared, sparse_weight=False, landing=None):
        landing = new_landing(declared) if landing is None else landing
        super().__init__(engine, key, declared, sparse_weight, landing, landing, landing)
        self._holds_value = False  # since an init, and not yet sums
        self._copies = []  # arrays that the value was last copied to, and after which round

    def init(self, value, priority):
        super().init(value, priority)
        self._holds_value = True

    def push(self, gradient, scalars, priority):
        if scalars is NO_SCALARS:
            self.begin_sums()
        self._holds_value = False
        super().push(gradient, scalars, priority)

    def begin_sums(self):
        if self._holds_value:
            self.landing[:] = 0
            self._copies = []
        self._holds_value = False

    def keep_weight(self):
        super().keep_weight()
        self._copies = []  # from now on of sums, not of the value

    def sum_for_updater(self):
        return self.landing.tostype("row_sparse")

    def copy_out(self, outs, priority):
        copies, rounds = [], self.operations.rounds()
        for out in outs:
            since = next((after for array, after in self._copies if array is out), None)
            if since is None:
                self.copy_to(out, self.value(priority))
            elif since < rounds:
                self.operations.copy_changed(out.handle.value, since, priority)
            takes_bytes = not is_sparse(out) and self.engine.in_cpu_memory(out.handle.value) and self.has_type_of(out)
            if self.weight is None and takes_bytes:
                copies.append((out, rounds))
        self._copies = copies


class ServerRowKey(_KeyOfRows):
    def __init__(self, engine, key, declared, sparse_weight=True, landing=None):
        anchor = mx.nd.zeros(1)  # pushes write it and reads read it, which orders them
        template = mx.nd.sparse.zeros("row_sparse", declared.shape, dtype=declared.dtype)
        super().__init__(engine, key, declared, sparse_weight, None, anchor, template)

    def init(self, value, priority):
        """`value`: of all rows, so rank 0 needs the memory for them once."""
        value = None if value is None else to_dense(value).as_in_context(mx.cpu())
        self.operations.init(0 if value is None else value.handle.value, priority)

    def gradient(self, values):
        if not all(map(is_sparse, values)):
            raise MXNetError(f"key {self.id!r} has a row_sparse weight; it takes row_sparse gradients, not dense ones")
        return super().gradient(values)

    def keep_weight(self):
        pass  # another kind of key takes over at the first push

    def value(self, priority):
        return self.read_rows(np.arange(self.shape[0], dtype=np.int64), priority)

    def read_rows(self, ids, priority):
        rows = self.new_rows(ids)
        self.operations.fetch(ids, rows.handle.value, priority)
        return rows


def pull_rows(key, outs, row_ids, priority):
    """Copies rows to row_sparse arrays, each of which then has just those. `row_ids`: one for each, or one for all."""
    if len(row_ids) not in (1, len(outs)):
        raise MXNetError(f"row_sparse_pull of key {key.id!r}: {len(row_ids)} row_ids for {len(outs)} arrays")
    for number, out in enumerate(outs):
        if not is_sparse(checked(out, key.id)):
            raise MXNetError(f"row_sparse_pull of key {key.id!r}: `out` must be row_sparse, not dense; use pull")
        key.require_shape(out, "pulled into an array of")
        if number < len(row_ids):
            ids = _unique_rows(key, checked(row_ids[number], key.id))
            if ids.size:
                rows = key.read_rows(ids, priority)
            else:
                rows = mx.nd.sparse.zeros("row_sparse", key.shape, dtype=key.dtype)
        key.engine.copy(rows.handle.value, out.handle.value)


def _unique_rows(key, row_ids):
    """The rows that an array of ids names, as sorted int64. Waits for the ids to be computed."""
    ids = np.unique(row_ids.asnumpy())
    if ids.size and not (ids[0] >= 0 and ids[-1] < key.shape[0]):  # false for NaN as well
        wrong = ids[0] if not ids[0] >= 0 else ids[-1]
        raise MXNetError(
            f"row_sparse_pull of key {key.id!r}: row id {wrong:.0f} is out of range; the key has {key.shape[0]} rows"
        )
    return np.unique(ids.astype(np.int64))
