"""The MXNet plugin: `mx.kv.create("p3_sync")`.

One dense key, from gradient to weight: the gradients of a worker's devices are summed by MXNet on the first device and
brought to CPU memory if they are not there; one operation of MXNet's engine sends the sum and receives the new value
into the key's landing array; MXNet copies that to every device. Each part is queued in the engine behind what it
reads, so every call returns at once, and a layer's weight is readable as soon as its own new value has landed.

Not straight into the weight: MXNet may hold it in a blocked oneDNN layout, and a raw write would scramble it.

Of a key with row_sparse gradients only the touched rows travel, and a pull into a dense array changes only rows that
rounds have changed since the pull before (p3/mxnet/row_keys.py).

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
import pickle
import warnings
import weakref

try:
    import mxnet as mx
except ModuleNotFoundError as error:
    if error.name != "mxnet":
        raise
    raise ModuleNotFoundError(
        "P3's KVStore needs MXNet, which is not installed. Run: pip install 'mxnet-p3[mxnet]'", name="mxnet"
    ) from None
from mxnet import autograd
from mxnet.base import MXNetError

from p3 import _core
from p3.mxnet import _mxnet, hooks, joining, optimizer_states, store_snapshots
from p3.mxnet.keys import DenseKey, checked, is_sparse
from p3.mxnet.optimizer_descriptions import NotOnServer, describe, round_scalars, updates_rows_alone
from p3.mxnet.priorities import Priorities
from p3.mxnet.row_keys import RowKey, ServerRowKey, pull_rows
from p3.mxnet.server_states import ServerStates
from p3.settings import Settings
from p3.worker import partitions
from p3.worker import session as sessions

log = logging.getLogger("p3")

_SET_OPTIMIZER, _SET_MULTI_PRECISION = 0, 1  # MXNet's numbers of commands
_NOT_PAUSED = contextlib.nullcontext()
_stores = weakref.WeakSet()  # of this process, as long as the script holds them


class P3KVStore(mx.kvstore.KVStore):
    """A store of the job that the environment describes; without DMLC_* variables, of a job inside this process.

    It has no native handle: every method of MXNet's KVStore is overridden, as an inherited one would crash.
    """

    def __init__(self):  # pylint: disable=super-init-not-called
        settings = Settings.from_env(os.environ)
        self._session = sessions.current()
        session = self._session
        session.describe_optimizers = lambda: store_snapshots.numbers_of(session, _all_stores(session))
        self._engine = _mxnet.MXNetEngine(self._session.core, mx.base._LIB._name)
        self._engine_is_naive = os.environ.get("MXNET_ENGINE_TYPE") == "NaiveEngine"
        self._updater = self._updater_func = self._str_updater_func = None
        self._is_p3 = False  # MXNet's word for its own P3
        _prepare_process(self._engine_is_naive)
        self._store = self._session.new_store()
        self._keys = {}
        self._outdated = set()  # keys that take a new value at their next init
        self._priorities = Priorities(self._session, self._store, settings.priority)
        self._partitions = partitions.of(self._session)
        self._server_optimizer = None  # the one whose description the servers have
        self._loaded_states = {}  # of keys not pushed yet, in case they become of another kind (on rank 0)
        self._resuming = set()  # keys that take back what a snapshot has of them before their first push
        self._updates_here = False  # whether _updater updates the store's own weights
        _stores.add(self)

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

    def stats(self, servers=False):
        """What this worker has sent and received so far, as a dict; cheap, and never in the way of training.

        bytes_sent, bytes_received, slices_sent, slices_received; queued_slices and peak_queued_slices (of one
        connection) that wait to be sent; queued_s, how long all sent ones have waited, added up; rounds of keys.
        servers: the same per server, in a list.
        local: the same with the other workers of this machine (P3_LOCAL_AGGREGATION), which the first leave out.
        keys: for each key of this store its rounds, waited_s (from the ready gradient to the landed value, added up),
        longest_wait_s (of one round), compression, and route: how its gradients travel, "dense", or if they are
        row_sparse, "rows" or "slices". Of these also partitions: into how many the rows are cut; and of the last round,
        alpha: the share of all rows that a worker pushed, on average; union_density: the share that any worker pushed;
        and the counters behind them (p3/worker.h).
        With servers=True each server is asked for its own counters (p3/node.h, and cpu_s), under servers[n]["itself"],
        and for late_s: of each worker, how long after the first push of a round its last one came, in the mean of the
        last rounds (workers of one machine, who push as one, are equally late). That takes a round trip through the
        scheduler.
        """
        session = self._session
        stats = session.counters()
        stats["servers"] = [session.traffic_with(server) for server in range(session.num_servers)]
        stats["keys"] = {
            key: entry.stats(session.key_counters(entry.declared), self.num_workers)
            for key, entry in self._keys.items()
        }
        if servers:
            with _mxnet_errors():
                for one, itself in zip(stats["servers"], session.server_counters()):
                    one["itself"] = itself
        return stats

    def mark_stall(self, key, begin_ns, end_ns):
        """For `p3 trace`: the training thread waited for the key's value between these times of time.monotonic_ns()."""
        self._session.mark_stall(self._key(key).declared, begin_ns, end_ns)

    # Values in, values out. Each call may be about one key or about a list of keys with a list of values; a key that
    # the list names several times has the values of all. Arrays to copy to may have another type than the key:
    # MXNet casts.

    def init(self, key, value):
        """Makes keys known; their first values are those of rank 0. A key that is initialised again keeps its value.

        Blocks nothing, and is no barrier.
        """
        self._check()
        with _paused():
            for one_key, values in _grouped(key, value):
                self._init(one_key, values)

    def broadcast(self, key, value, out, priority=0):
        """init, and the first value (of rank 0) copied to `out`."""
        self._check()
        with _paused():
            for one_key, values, outs in _grouped(key, value, out):
                self._copy_out(self._init(one_key, values, outs), outs)

    def push(self, key, value, priority=0):
        """Sends gradients into the keys' next rounds; the results land whether they are pulled or not."""
        self._check()
        with _paused():
            for one_key, values in _grouped(key, value):
                self._push(self._key(one_key), values, values, priority)

    def pull(self, key, out=None, priority=0, ignore_sparse=True):
        """Copies to `out` what the pushes so far have led to; sparse arrays in it are left alone if `ignore_sparse`."""
        self._check()
        if out is None:
            raise MXNetError(f"pull of key {key!r}: no `out` to pull into was given")
        with _paused():
            for one_key, outs in _grouped(key, out):
                wanted = [one for one in outs if not (ignore_sparse and is_sparse(checked(one, one_key)))]
                self._copy_out(self._key(one_key), wanted)

    def pushpull(self, key, value, out=None, priority=0):
        """push, then pull to `out`, or to `value` itself where there is no `out`."""
        self._check()
        with _paused():
            pushed = [
                (self._push(self._key(one_key), values, outs, priority), outs)
                for one_key, values, outs in _grouped(key, value, value if out is None else out)
            ]
            for entry, outs in pushed:  # behind all pushes, as keys may share arrays
                self._copy_out(entry, outs)

    def row_sparse_pull(self, key, out=None, priority=0, row_ids=None):
        """Copies the rows `row_ids` of what the pushes so far have led to into the row_sparse arrays `out`.

        Afterwards `out` has just those rows. `row_ids`: whole numbers of any type, in any order; one array for each of
        `out`, or one for all. Waits until they are computed, but not for the network. A row that does not exist is
        MXNetError at once.
        """
        self._check()
        if out is None or row_ids is None:
            raise MXNetError(f"row_sparse_pull of key {key!r} needs `out` and `row_ids`")
        if isinstance(key, (list, tuple)):
            each_ids = _as_list(row_ids)
            row_ids = each_ids * len(key) if len(each_ids) == 1 else each_ids
        with _paused():
            for one_key, outs, ids in _each(key, out, row_ids):
                entry = self._key(one_key)
                if len(ids) not in (1, len(outs)):
                    raise MXNetError(f"row_sparse_pull of key {one_key!r}: {len(ids)} row_ids for {len(outs)} arrays")
                entry.priority = self._priorities.of(entry, priority, outs)
                arrays = [checked(one, one_key) for one in outs]
                pull_rows(entry, arrays, [checked(one, one_key) for one in ids], entry.priority)
                self._after_operation()

    def join(self, update=None):
        """For a worker that has taken its last step: returns when every worker has called it. So steps may be uneven.

        Until then the others' rounds, of every store that was made, go on without this worker, and its weights follow
        theirs; also of stores that the script has dropped, as others may still use theirs. A store that hands its sums
        to the caller (Trainer(update_on_kvstore=False)) needs `update`: called with the store after each step of the
        others, when their sums lie in the arrays that this worker pulled to last, it does what this worker would have
        done, e.g. lambda store: trainer.update(batch_size). Afterwards training may go on. As Horovod's join, but
        without an idle worker's zeros on the wire.
        """
        self._check()
        if not self._keys:
            raise MXNetError(
                "join: this worker has no keys to serve the others' rounds with. Trainer makes them in its first step, "
                "so every worker must take at least one; or call init"
            )
        if update is None and self._hands_out_sums() and self._pushed_keys():
            raise MXNetError(joining.NEEDS_UPDATE)
        with _paused(), _mxnet_errors():
            for store in _all_stores(self._session):
                store._restore_resumed()
            if self._session.progress.join():
                held = {store._store: store for store in _all_stores(self._session)}
                stores = [
                    held[number] if number in held else joining.DroppedStore(self._engine, keys)
                    for number, keys in enumerate(self._session.keys_of_stores)
                ]
                joining.serve_others(self._session, stores, self._check, update)
                self._session.progress.joined()

    def snapshot(self, round, state=None, trainer=None):
        """Takes a snapshot of the whole job, if P3_SNAPSHOT_DIR is set and this round is due (P3_SNAPSHOT_EVERY).

        Every worker calls it after each step, with the number of steps taken so far, which also tells where a step ends
        for who takes a lost worker's place (P3_ON_WORKER_LOSS), with or without a directory. It is of all stores of
        this process; `trainer`, or a list of all Trainers, adds what Trainers know themselves: running statistics, and
        if they update, weights and states. `state` is what this worker alone needs to go on: a dict of names to arrays,
        numbers, strings, None, and lists and dicts of these (position in the data, random states ...); ValueError names
        what cannot be in it. Waits for nothing; but a round that is due while the snapshot before is still being
        written waits for that.
        """
        self._check()
        with _paused(), _job_errors():
            store_snapshots.take(_all_stores(self._session), round, state, _as_trainers(trainer))

    def resume(self, trainer=None):
        """Brings the job back to its newest valid snapshot. On every worker, before the first init of any store.

        Returns (round, state): how many steps were taken, and this worker's own state; (0, {}) where there is none.
        Each key then begins with the snapshot's value instead of the script's. `trainer`: as for snapshot; its weights
        have the snapshot's values when this returns. Create all Trainers before. A worker that has taken the place of a
        lost one (P3_ON_WORKER_LOSS) gets the steps that are behind the job, {} and the others' weights, and goes on
        beside them. Blocks, at most P3_WAIT_TIMEOUT_S. ValueError if
        the snapshot does not fit this job; a damaged one is logged, and the one before it taken.
        """
        self._check()
        with _paused(), _job_errors():
            resumed = self._session.resume()
            if self._session.snapshots.own is not None:
                for store in _all_stores(self._session):
                    store_snapshots.restore_optimizer(store)
                store_snapshots.restore_trainers(self, _as_trainers(trainer))
            elif self._session.rejoined_at is not None:
                store_snapshots.fetch_weights(self, _as_trainers(trainer))
            self._session.trainers = [weakref.ref(one) for one in _as_trainers(trainer)]
        return resumed

    # Settings of the store, before its first init, the same on every worker

    def set_gradient_compression(self, compression_params):
        """{"type": "2bit", "threshold": 0.5} as MXNet's, or {"type": "fp16"}, of this store's float32 gradients.

        Both apply to what workers push; with fp16, sums that come back are float16 as well, weights never are. Each
        slice is compressed when its turn to leave has come, so priorities hold. Blocks until the servers know.
        """
        self._check()
        if not isinstance(compression_params, dict):
            raise MXNetError(f"compression_params is {compression_params!r}; it must be a dict like {{'type': '2bit'}}")
        params = dict(compression_params)
        if params.get("type") == "2bit":
            params["threshold"] = float(params.get("threshold", 0.5))  # MXNet's default
        with _mxnet_errors():
            self._session.set_option(self._store, "compression", params)

    def set_reduction(self, reduction):
        """What a round makes of the workers' gradients: their "sum", as MXNet's stores, or their "average".

        The average is over the workers that took part in the round (see join), so `Trainer.step` is given the batch
        size of one worker. Blocks until the servers know.
        """
        self._check()
        with _mxnet_errors():
            self._session.set_option(self._store, "reduction", {"type": reduction})

    # Optimizers

    def set_optimizer(self, optimizer):
        """Has the servers update the weights, or the workers where the servers lack the optimizer. Blocks till agreed.

        The object stays in use: its learning rate, weight decay and rescale_grad are read at each push. After a store's
        first push the workers update too, as servers could not tell which gradients came before: from what the pushes
        so far have led to, so that every worker must set it between the same pushes.
        """
        self._check()
        # As Trainer does after a reset; its state stays.
        is_set = optimizer is getattr(self._updater, "optimizer", None)
        try:
            description = describe(optimizer)
            if self._updates_here:
                raise NotOnServer("the workers update this store's weights already")
            if self._server_optimizer is None and self._pushed_keys():
                raise NotOnServer("gradients have been pushed without it; set it before the first push")
        except NotOnServer as reason:
            if is_set:
                return
            name = type(optimizer).__name__
            log.warning("%s updates the weights on every worker, not on the servers: %s", name, reason)
            self._set_updater(mx.optimizer.get_updater(optimizer))
        else:
            with _mxnet_errors():
                self._session.set_optimizer(self._store, description)
            if is_set:
                return
            self._server_optimizer = optimizer
            self._updater = mx.optimizer.get_updater(optimizer)  # Trainer looks for its `optimizer`
            store_snapshots.restore_optimizer(self)
        self._priorities.know_parameters(getattr(optimizer, "param_dict", None) or {})

    def _set_updater(self, updater):
        """`updater(key, sum, weight)` updates this worker's copy of the weights; all workers must do the same."""
        if self._server_optimizer is not None:
            raise MXNetError(
                f"the servers update this store's weights with {type(self._server_optimizer).__name__} already; "
                "set another optimizer on a new store"
            )
        if updater is self._updater:
            return
        self._updater = updater
        if not self._updates_here:
            self._updates_here = True
            for entry in self._keys.values():
                entry.keep_weight()
        store_snapshots.restore_optimizer(self)

    def save_optimizer_states(self, fname, dump_optimizer=False):
        """Writes the optimizer's state, as of this worker's last round, to one file that MXNet's Updater can load.

        Atomic: `fname` is the old file or the whole new one. Any worker may call it, alone. With dump_optimizer the
        file also holds the optimizer (learning rate, number of updates).
        """
        optimizer = self._require_optimizer("saved")
        states = self._updater.states
        if self._server_optimizer is not None:
            with _mxnet_errors():
                states = ServerStates(self._session, optimizer).fetch(self._pushed_keys())
        optimizer_states.write(fname, states, optimizer if dump_optimizer else None)

    def load_optimizer_states(self, fname):
        """Gives the optimizer the state in a file that this method, or MXNet's Updater.get_states, has written.

        Every worker must call it, with the same file, before its next push: the servers take rank 0's word, and an
        optimizer in the file replaces each worker's. MXNetError if the file is cut short or is of another model or
        optimizer; then everything is as before. MXNet's format is a pickle: load only files that you trust.
        """
        optimizer = self._require_optimizer("loaded")
        states, saved_optimizer = optimizer_states.read(fname)
        if saved_optimizer is not None:
            self._require_same_kind(optimizer, saved_optimizer, fname)
        unknown = sorted(map(repr, states.keys() - self._keys.keys()))
        if unknown:
            raise MXNetError(f"{fname} holds the state of another model: this store has no key {', '.join(unknown)}")
        anew = {entry.id for entry in self._pushed_keys()} - states.keys()  # as MXNet would begin them
        arrays = {
            key: optimizer_states.from_mxnet(optimizer, key, self._keys[key].template, states[key]) for key in states
        }
        self._resuming.clear()  # the file's word comes later than the snapshot's
        if self._server_optimizer is None:
            self._updater.states, self._updater.states_synced = states, dict.fromkeys(states, False)
        elif self.rank == 0:
            arrays.update((key, optimizer_states.fresh(optimizer, key, self._keys[key].template)) for key in anew)
            with _mxnet_errors():
                ServerStates(self._session, optimizer).store(self._keys, arrays)
            self._loaded_states = {key: arrays[key] for key in arrays if not self._keys[key].pushed}
        if saved_optimizer is not None:
            saved_optimizer.param_dict = getattr(optimizer, "param_dict", {})
            self._updater.optimizer = saved_optimizer
            if self._server_optimizer is not None:
                self._server_optimizer = saved_optimizer

    def _require_optimizer(self, action):
        self._check()
        optimizer = getattr(self._updater, "optimizer", None)
        if optimizer is None:
            raise MXNetError(f"no optimizer was set on this store, so no states can be {action}; call set_optimizer")
        return optimizer

    def _require_same_kind(self, optimizer, saved, fname):
        kind, saved_kind = type(optimizer).__name__, type(saved).__name__
        same = type(saved) is type(optimizer)
        if same and self._server_optimizer is not None:
            here, there = describe(optimizer), describe(saved)
            same = here == there
            kind, saved_kind = here, there
        if not same:
            raise MXNetError(f"{fname} holds the state of {saved_kind}, but this store's optimizer is {kind}")

    def _pushed_keys(self):
        return [entry for entry in self._keys.values() if entry.pushed]

    # The job

    def _barrier(self):
        self._check()
        with _mxnet_errors():
            self._session.barrier()

    def get_num_dead_node(self, node_id=0, timeout=60):
        """0, or the error that the whole job ends with when any node dies: nobody trains on beside a dead node."""
        self._check()
        return 0

    def _send_command_to_servers(self, head, body):
        """MXNet's own commands, as far as they mean something here: 0, an optimizer pickled by the caller; 1, that it
        has float32 master copies. The store applies them; P3's servers take none, as they never evaluate what they
        receive.
        """
        if head == _SET_OPTIMIZER:
            self.set_optimizer(pickle.loads(body.encode() if isinstance(body, str) else body))
        elif head != _SET_MULTI_PRECISION:
            raise MXNetError(
                f"P3's servers take no command {head!r}: they never evaluate what they receive. See set_optimizer, "
                "set_gradient_compression and stats"
            )

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
        if len(values) > 1:
            raise MXNetError(f"key {key!r} takes one first value, not {len(values)}")
        value = checked(values[0], key)
        entry = self._keys.get(key)
        if entry is not None:
            entry.require_alike(value, "initialised again with")
            if key not in self._outdated:
                return entry
            self._outdated.remove(key)
        else:
            arrays = (*values, *outs)
            parameter = self._priorities.parameter_of(key, arrays)
            sparse_gradient = getattr(parameter, "_grad_stype", "default") == "row_sparse"
            kind = self._kind_of_key(is_sparse(value), sparse_gradient, value.dtype)
            kind, name = self._settled_before(kind, key, value)
            entry = self._declare(kind, key, value.shape, value.dtype, is_sparse(value), name)
            self._priorities.add(entry, arrays)
            resumed = store_snapshots.value_of(self, entry, arrays)
            if resumed is not None:
                value = resumed
            self._resuming.add(key)
        self._give_first_value(entry, value)
        return entry

    def _declare(self, kind, key, shape, dtype, sparse_weight, name=None, landing=None):
        with _mxnet_errors():
            declared = self._session.declare(name or key, shape, dtype, self._store, sparse=kind is not DenseKey)
        entry = self._keys[key] = kind(self._engine, key, declared, sparse_weight, landing)
        self._session.keys_of_stores[self._store][key] = declared
        return entry

    def _give_first_value(self, entry, value):
        entry.priority = self._priorities.at_init(entry)
        entry.init(value if self.rank == 0 else None, entry.priority)
        if self._updates_here:
            entry.keep_weight()
        self._after_operation()

    def _kind_of_key(self, sparse_weight, sparse_gradient, dtype):
        """Which kind of key suits the arrays and, as far as it is known, the optimizer."""
        if not sparse_weight and not sparse_gradient:
            return DenseKey
        optimizer = self._server_optimizer or getattr(self._updater, "optimizer", None)
        if optimizer is not None and not updates_rows_alone(optimizer, dtype):
            return DenseKey
        on_servers = sparse_weight and not self._updates_here
        return ServerRowKey if on_servers else RowKey

    def _settled_before(self, kind, key, value):
        """In a process that has taken a lost one's place: the kind that the others have gone over to in _settle_kind,
        and the name that the key has since; else `kind`, and None."""
        if self._session.rejoined_at is not None:
            with_rows = self._kind_of_key(is_sparse(value), True, value.dtype)
            for other in (with_rows, DenseKey):
                if self._session.agreed_shape(self._store, _name_as(other, key)) is not None:
                    return other, _name_as(other, key)
        return kind, None

    def _catch_up(self):
        """Before a key's first push, in a process that has taken a lost one's place."""
        if self._session.rejoined_at is None:
            return
        if self._server_optimizer is None:
            raise MXNetError(
                "this worker has taken the place of one that was lost, and the weights with it, as the workers update "
                "them: only where the servers do (update_on_kvstore, and an optimizer that they know) can a worker be "
                "replaced"
            )
        store_snapshots.count_updates(self)

    def _settle_kind(self, entry, gradients):
        """Before a key's first push, when the storage of its gradients and the optimizer are known.

        If another kind suits them, the key is declared anew as that, with the value that it has. Every worker does so.
        """
        sparse_gradient = is_sparse(gradients[0])
        kind = self._kind_of_key(entry.sparse_weight, sparse_gradient, entry.dtype)
        if kind is ServerRowKey and self._server_optimizer is None:
            kind = RowKey  # sums go to the workers
        if type(entry) is kind or (kind is DenseKey and not sparse_gradient):
            return entry
        name = _name_as(kind, entry.id)
        settled = self._declare(kind, entry.id, entry.shape, entry.dtype, entry.sparse_weight, name, entry.landing)
        self._priorities.replace(entry, settled)
        self._give_first_value(settled, entry.value(entry.priority) if self.rank == 0 else None)
        settled.outs = entry.outs
        if entry.id in self._loaded_states:
            with _mxnet_errors():
                ServerStates(self._session, self._server_optimizer).store(
                    self._keys, {entry.id: self._loaded_states.pop(entry.id)}
                )
        return settled

    def _restore(self, entry):
        """Before this worker's first round of the key: what a snapshot has of it."""
        if entry.id in self._resuming:
            self._resuming.remove(entry.id)
            store_snapshots.restore_key(self, entry)

    def _restore_resumed(self):
        """The same of all keys, for a worker that has no step of its own before it joins."""
        for entry in list(self._keys.values()):
            self._restore(entry)

    def _expect_new_values(self):
        """The next init of each key brings rank 0's new value; the optimizer and its state stay. On every worker."""
        self._outdated = set(self._keys)

    def _push(self, entry, values, outs, priority):
        entry.require_alike(checked(values[0], entry.id), "pushed with")
        for value in values[1:]:
            entry.require_shape(checked(value, entry.id), "pushed with")  # its type is cast to that of the first
        if not entry.pushed:
            self._catch_up()
            entry = self._settle_kind(entry, values)
            with _mxnet_errors():
                self._restore(entry)
        self._session.begin_push(entry.declared, -priority)  # Trainer and Module begin with 0 and go down
        gradient = entry.gradient(values)
        scalars = _core.NO_SCALARS
        if self._server_optimizer is not None:
            scalars = round_scalars(self._server_optimizer, entry.id)
        entry.priority = self._priorities.of(entry, priority, (*outs, *values))
        if self._partitions is not None and entry.declared.sparse:
            self._partitions.pushed(entry.declared)
        entry.push(gradient, scalars, entry.priority)
        entry.pushed = entry.in_steps = True
        if self._updates_here:
            self._updater(entry.id, entry.sum_for_updater(), entry.weight)
        self._after_operation()
        return entry

    def _copy_out(self, entry, outs):
        for out in outs:
            entry.require_shape(checked(out, entry.id), "pulled into an array of")
        entry.copy_out(outs, entry.priority)
        entry.outs = outs

    # What joining.py asks of a store

    def _hands_out_sums(self):
        return self._server_optimizer is None and not self._updates_here

    def _follow(self, entry):
        """Takes over what has landed in a round that this worker skipped."""
        if self._server_optimizer is not None:
            round_scalars(self._server_optimizer, entry.id)  # counts the update here as elsewhere
        elif self._updates_here:
            self._updater(entry.id, entry.sum_for_updater(), entry.weight)
        elif entry.parameter is not None:
            for array in entry.parameter.list_data():
                array._fresh_grad = True  # or Trainer.update would take the sum for a stale gradient
        self._copy_out(entry, entry.outs)

    def _after_operation(self):
        if self._engine_is_naive:
            self._check()  # this engine waits for the operation, but drops its error


def _name_as(kind, key):
    """Of a key that was declared anew, as another kind."""
    return f"{key} ({kind.route})"


def _each(keys, *values):
    """(key, list of arrays, ...) for each key of a call. A single key may come with one array or one per device."""
    if not isinstance(keys, (list, tuple)):
        return ((keys, *map(_as_list, values)),)
    for one in values:
        if not isinstance(one, (list, tuple)) or len(one) != len(keys):
            raise MXNetError(f"{len(keys)} keys need as many values, in a list")
    return [(key, *map(_as_list, row)) for key, *row in zip(keys, *values)]


def _grouped(keys, *values):
    """As _each; a key that the call names several times comes once, with all its arrays in the order given."""
    grouped = {}
    for key, *arrays in _each(keys, *values):
        try:
            before = grouped.get(key)
        except TypeError:
            raise MXNetError(f"a key is a string or a whole number, not {key!r}") from None
        grouped[key] = arrays if before is None else [[*had, *more] for had, more in zip(before, arrays)]
    return [(key, *arrays) for key, arrays in grouped.items()]


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


def _paused():
    """Nothing here belongs into a graph, and MXNet refuses to write an array of a graph while it records."""
    return autograd.pause() if autograd.is_recording() else _NOT_PAUSED


@contextlib.contextmanager
def _mxnet_errors():
    try:
        yield
    except (_core.P3Error, ValueError, TimeoutError) as error:
        raise MXNetError(str(error)) from error


@contextlib.contextmanager
def _job_errors():
    """As _mxnet_errors, but wrong arguments stay ValueError."""
    try:
        yield
    except (_core.P3Error, TimeoutError) as error:
        raise MXNetError(str(error)) from error


def _all_stores(session):
    """That the script still holds, in the order in which they were made."""
    return sorted((store for store in _stores if store._session is session), key=lambda store: store._store)


def _as_trainers(trainer):
    if trainer is None:
        return []
    return list(trainer) if isinstance(trainer, (list, tuple)) else [trainer]


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


hooks.plug_in(mx, P3KVStore)
