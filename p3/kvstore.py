"""The MXNet plugin: `mx.kv.create("p3_sync")`.

One dense key, from gradient to weight: the gradients of a worker's devices are summed by MXNet on the first device and
brought to CPU memory if they are not there; one operation of MXNet's engine sends the sum and receives the new value
into the key's landing array; MXNet copies that to every device. Each part is queued in the engine behind what it
reads, so every call returns at once, and a layer's weight is readable as soon as its own new value has landed.

Not straight into the weight: MXNet may hold it in a blocked oneDNN layout, and a raw write would scramble it.

The servers update the weights, if they know the optimizer; else the sum lands and is updated here: in a weight that the
store keeps (`set_optimizer` with an optimizer that the servers lack), or by the caller, to whom the sum is copied.

Threads: one at a time, as MXNet's own stores.
Errors: wrong use is MXNetError that names the key. A failed job is MXNetError too, the same in every later call.
"""

import atexit
import contextlib
import logging
import operator
import os
import warnings

try:
    import mxnet as mx
except ImportError as error:
    raise ImportError(
        f"P3's KVStore needs MXNet, which cannot be imported ({error}). Install it with: pip install 'mxnet-p3[mxnet]'"
    ) from error
from mxnet import autograd
from mxnet.base import MXNetError
from mxnet.ndarray import NDArray

from p3 import _core
from p3.server.optimizers import NotOnServer, describe, round_scalars
from p3.settings import Settings
from p3.worker import session as sessions
from p3.worker.priorities import Priorities

log = logging.getLogger("p3")

_NO_SCALARS = (0.0, 0.0, 1.0)  # lr, wd, rescale where the servers only sum
_NOT_PAUSED = contextlib.nullcontext()


class P3KVStore(mx.kvstore.KVStore):
    """A store of the job that the environment describes; without DMLC_* variables, of a job inside this process.

    It has no native handle: every method of MXNet's KVStore is overridden, as an inherited one would crash.
    """

    def __init__(self):  # pylint: disable=super-init-not-called
        settings = Settings.from_env(os.environ)
        self._session = sessions.current()
        self._engine = _core.MXNetEngine(self._session.core, mx.base._LIB._name)
        self._stage_gradients = settings.stage_gradients
        self._priority_mode = settings.priority
        self._engine_is_naive = os.environ.get("MXNET_ENGINE_TYPE") == "NaiveEngine"
        self._updater = self._updater_func = self._str_updater_func = None
        self._is_p3 = False  # MXNet's word for its own P3
        _prepare_process(self._engine_is_naive)
        self._forget_keys()

    def _forget_keys(self):
        """Starts afresh under a new store number; every worker must do so at the same point."""
        self._store = self._session.new_store()
        self._keys = {}
        self._priorities = Priorities(self._session, self._store, self._priority_mode)
        self._server_optimizer = None  # the one whose description the servers have
        self._updates_here = False  # whether _updater updates the store's own weights

    def __del__(self):
        pass  # MXNet's would free the handle

    # Who we are

    @property
    def handle(self):
        raise MXNetError("p3_sync has no native handle: this function of MXNet works with MXNet's own stores only")

    @property
    def type(self):
        return "dist_p3_sync"  # Gluon looks for "dist", Module for "dist" and "_sync"

    @property
    def rank(self):
        return self._session.rank

    @property
    def num_workers(self):
        return self._session.num_workers

    def is_capable(self, capability):
        if capability.lower() == self.OPTIMIZER:
            return True
        raise ValueError(f"Unknown capability: {capability}")

    def stats(self):
        """What this worker has sent and received so far: bytes_sent, bytes_received, slices_sent, ..., rounds."""
        return self._session.counters()

    # Values in, values out. Each call may be about one key or about a list of keys with a list of values.

    def init(self, key, value):
        """Makes keys known; their first values are those of rank 0. A key that is initialised again keeps its value."""
        self._check()
        with _paused():
            for one_key, values in _each(key, value):
                self._init(one_key, values)

    def broadcast(self, key, value, out, priority=0):
        """init, and the first value (of rank 0) copied to `out`."""
        self._check()
        with _paused():
            for one_key, values, outs in _each(key, value, out):
                self._copy_out(self._init(one_key, values, outs), outs)

    def push(self, key, value, priority=0):
        """Sends gradients into the keys' next rounds; the results land whether they are pulled or not."""
        self._check()
        with _paused():
            for one_key, values in _each(key, value):
                self._push(self._key(one_key), values, values, priority)

    def pull(self, key, out=None, priority=0, ignore_sparse=True):
        """Copies to `out` what the pushes so far have led to."""
        self._check()
        if out is None:
            raise MXNetError(f"pull of key {key!r}: no `out` to pull into was given")
        with _paused():
            for one_key, outs in _each(key, out):
                self._copy_out(self._key(one_key), outs)

    def pushpull(self, key, value, out=None, priority=0):
        """push, then pull to `out`, or to `value` itself where there is no `out`."""
        self._check()
        with _paused():
            for one_key, values, outs in _each(key, value, value if out is None else out):
                entry = self._key(one_key)
                self._push(entry, values, outs, priority)
                self._copy_out(entry, outs)

    def row_sparse_pull(self, key, out=None, priority=0, row_ids=None):
        raise MXNetError(f"row_sparse_pull of key {key!r}: {_NO_SPARSE}")

    # Optimizers

    def set_optimizer(self, optimizer):
        """Has the servers update the weights, or the workers where the servers lack the optimizer. Blocks till agreed.

        The object stays in use: its learning rate, weight decay and rescale_grad are read at each push.
        """
        self._check()
        try:
            description = describe(optimizer)
        except NotOnServer as reason:
            name = type(optimizer).__name__
            log.warning("%s updates the weights on every worker, not on the servers: %s", name, reason)
            self._set_updater(mx.optimizer.get_updater(optimizer))
        else:
            with _mxnet_errors():
                self._session.set_optimizer(self._store, description)
            self._server_optimizer = optimizer
            self._updater = mx.optimizer.get_updater(optimizer)  # Trainer looks for its `optimizer`
        self._priorities.know_parameters(getattr(optimizer, "param_dict", None) or {})

    def _set_updater(self, updater):
        """`updater(key, sum, weight)` updates this worker's copy of the weights; all workers must do the same."""
        if self._server_optimizer is not None:
            raise MXNetError(
                f"the servers update this store's weights with {type(self._server_optimizer).__name__} already; "
                "set another optimizer on a new store"
            )
        self._updater = updater
        self._updates_here = True
        for entry in self._keys.values():
            entry.keep_weight()

    def set_gradient_compression(self, compression_params):
        raise MXNetError("p3_sync does not compress gradients; leave out compression_params")

    def save_optimizer_states(self, fname, dump_optimizer=False):
        """Writes the states of an optimizer that runs on the workers, in MXNet's format."""
        self._require_states_here("saved")
        with open(fname, "wb") as file:
            file.write(self._updater.get_states(dump_optimizer))

    def load_optimizer_states(self, fname):
        self._require_states_here("loaded")
        with open(fname, "rb") as file:
            self._updater.set_states(file.read())

    def _require_states_here(self, action):
        self._check()
        if self._server_optimizer is not None:
            raise MXNetError(f"optimizer state lives on the servers and cannot be {action} yet")
        if not hasattr(self._updater, "get_states"):
            raise MXNetError(f"no optimizer was set on this store, so no states can be {action}")

    # The job

    def _barrier(self):
        self._check()
        with _mxnet_errors():
            self._session.barrier()

    def _send_command_to_servers(self, head, body):
        raise MXNetError("P3's servers take no commands: they never evaluate what they receive")

    def _check(self):
        """Raises the job's first error, in every call from then on. The engine itself reports an error only once."""
        try:
            self._session.check()
        except _core.P3Error as error:
            raise MXNetError(str(error)) from None

    # One key

    def _key(self, key):
        try:
            return self._keys[key]
        except (KeyError, TypeError):
            raise MXNetError(f"key {key!r} was not initialised on this store; call init or broadcast first") from None

    def _init(self, key, values, outs=()):
        key = key if isinstance(key, str) else _as_index(key)
        value = _dense(values[0], key)
        entry = self._keys.get(key)
        if entry is not None:
            entry.require_alike(value, "initialised again with")
            return entry
        with _mxnet_errors():
            declared = self._session.declare(key, value.shape, value.dtype, self._store)
        entry = self._keys[key] = _Key(self._engine, key, declared)
        self._priorities.add(entry, (*values, *outs))
        entry.operations.set_priority(*self._priorities.at_init(entry))
        if self.rank == 0:
            # By MXNet, because inference may have left the weight itself in a layout that only MXNet can read.
            _classic(value).copyto(entry.landing)
        entry.operations.init()
        if self._updates_here:
            entry.keep_weight()
        self._after_operation()
        return entry

    def _push(self, entry, values, outs, priority):
        gradient = self._sum_devices(entry, values)
        scalars = _NO_SCALARS
        if self._server_optimizer is not None:
            scalars = round_scalars(self._server_optimizer, entry.id)
        entry.operations.set_priority(*self._priorities.of(entry, priority, (*outs, *values)))
        entry.operations.push(gradient.handle.value, *scalars)
        if self._updates_here:
            self._updater(entry.id, entry.landing, entry.weight)
        self._after_operation()

    def _sum_devices(self, entry, values):
        """The sum over this worker's devices, in the order given and on the first device; then in CPU memory."""
        for value in values:
            entry.require_alike(_dense(value, entry.id), "pushed with")
        total = _classic(values[0])
        if len(values) > 1:
            device = total.context
            total = mx.nd.elemwise_add(total, _classic(values[1]).as_in_context(device))
            for value in values[2:]:
                mx.nd.elemwise_add(total, _classic(value).as_in_context(device), out=total)
        if self._stage_gradients or not self._engine.in_cpu_memory(total.handle.value):
            total = total.copyto(mx.cpu())
        return total

    def _copy_out(self, entry, outs):
        source = entry.landing if entry.weight is None else entry.weight
        for out in outs:
            entry.require_alike(_dense(out, entry.id), "pulled into an array of")
            self._engine.copy(source.handle.value, out.handle.value)

    def _after_operation(self):
        if self._engine_is_naive:
            self._check()  # this engine waits for the operation, but drops its error


class _Key:
    """One key of a store: its arrays, its operations, and what Priorities notes about it."""

    __slots__ = ("id", "landing", "weight", "operations", "index", "parameter", "searched")

    def __init__(self, engine, key, declared):
        self.id = key
        with mx.util.np_shape(True):  # or MXNet takes a length of 0 for "not known yet"
            self.landing = mx.nd.empty(declared.shape, mx.cpu(), declared.dtype)
        self.weight = None  # only where this worker updates
        self.operations = _core.MXNetKey(engine, declared.handle, str(key), self.landing.handle.value)

    def keep_weight(self):
        if self.weight is None:
            self.weight = self.landing.copy()

    def require_alike(self, array, action):
        """MXNetError unless `array` has the key's shape and type."""
        if not self.operations.takes(array.handle.value):
            raise MXNetError(
                f"key {self.id!r} has shape {self.landing.shape} and type {_type_name(self.landing)}; it cannot be "
                f"{action} shape {array.shape} and type {_type_name(array)}"
            )


def _each(keys, *values):
    """(key, list of arrays, ...) for each key of a call. A single key may come with one array or one per device."""
    if not isinstance(keys, (list, tuple)):
        return ((keys, *map(_as_list, values)),)
    for one in values:
        if not isinstance(one, (list, tuple)) or len(one) != len(keys):
            raise MXNetError(f"{len(keys)} keys need as many values, in a list")
    return [(key, *map(_as_list, row)) for key, *row in zip(keys, *values)]


def _as_list(arrays):
    if not isinstance(arrays, (list, tuple)):
        return [arrays]
    if not arrays:
        raise MXNetError("an empty list of arrays was given for a key")
    return arrays


def _as_index(key):
    try:
        return operator.index(key)
    except TypeError:
        raise MXNetError(f"a key is a string or a whole number, not {key!r}") from None


_NO_SPARSE = "p3_sync synchronises dense arrays only; create the Parameter or Embedding without sparse storage"


def _dense(array, key):
    if type(array) is NDArray:  # the usual case, and never sparse
        return array
    if not isinstance(array, NDArray):
        raise MXNetError(f"key {key!r}: an NDArray or a list of them is wanted, not {type(array).__name__}")
    if array.stype != "default":
        raise MXNetError(f"key {key!r}: got a {array.stype} array; {_NO_SPARSE}")
    return array


def _classic(array):
    """MXNet's legacy operators take its NumPy-like arrays only under their classic type; the memory is the same."""
    return array if type(array) is NDArray else array.as_nd_ndarray()


def _type_name(array):
    return getattr(array.dtype, "__name__", str(array.dtype))


def _paused():
    """Nothing here belongs into a graph, and MXNet refuses to write an array of a graph while it records."""
    return autograd.pause() if autograd.is_recording() else _NOT_PAUSED


@contextlib.contextmanager
def _mxnet_errors():
    try:
        yield
    except (_core.P3Error, ValueError, TimeoutError) as error:
        raise MXNetError(str(error)) from error


_process_is_prepared = False


def _prepare_process(engine_is_naive):
    """Once, after the session has been opened: what is registered later runs earlier at exit."""
    global _process_is_prepared
    if _process_is_prepared:
        return
    _process_is_prepared = True
    atexit.register(_drain)
    # fork() itself makes MXNet wait for its operations, but holding Python's lock all the while.
    os.register_at_fork(before=_drain)
    if engine_is_naive:
        warnings.warn("MXNET_ENGINE_TYPE=NaiveEngine: each push waits for the network; nothing overlaps", stacklevel=3)


def _drain():
    """Waits until no operation uses the session any more. The store keeps its errors for itself."""
    try:
        mx.nd.waitall()
    except MXNetError as error:
        log.info("while waiting for MXNet: %s", error)
