"""The MXNet plugin: `mx.kv.create("p3_sync")`; and "p3_async" and "p3_ssp", whose workers may be rounds apart.

One dense key, from gradient to weight: the gradients of a worker's devices are summed by MXNet on the first device and
brought to CPU memory if they are not there; one operation of MXNet's engine sends the sum and receives the new value
into the key's landing array; MXNet copies that to every device. Each part is queued in the engine behind what it
reads, so every call returns at once, and a layer's weight is readable as soon as its own new value has landed.

Not straight into the weight: MXNet may hold it in a blocked oneDNN layout, and a raw write would scramble it.

Of a key with row_sparse gradients only the touched rows travel, and a pull into a dense array changes only rows that
rounds have changed since the pull before (p3/mxnet/keys/rows.py).

The servers update the weights, if they know the optimizer; else the sum lands and is updated here: in a weight that the
store keeps (`set_optimizer` with an optimizer that the servers lack), or by the caller, to whom the sum is copied.

Threads: one at a time, as MXNet's own stores.
Errors: wrong use is MXNetError that names the key. A failed job is MXNetError too, the same in every later call.
"""

import atexit
import functools
import logging
import os
import pickle
import sys
import warnings
import weakref

try:
    import mxnet as mx
except ModuleNotFoundError as error:
    if error.name != "mxnet":
        raise
    raise ModuleNotFoundError(
        "P3's KVStore needs MXNet, which is not installed. Run: pip install 'p3-training[mxnet]'", name="mxnet"
    ) from None
from mxnet import autograd
from mxnet.base import MXNetError

from p3 import codecs
from p3._core import NO_SCALARS, P3Error
from p3.frontend import partitions
from p3.frontend.loss_scale import LossScale
from p3.mxnet import _mxnet, clipping, hooks, joining, staleness, store_snapshots
from p3.mxnet.arguments import as_list, as_trainers, checked, each, grouped
from p3.mxnet.arrays import classic, is_sparse
from p3.mxnet.keys import beginnings
from p3.mxnet.keys.rows import pull_rows
from p3.mxnet.optimizers.descriptions import (
    LiveFields, NotOnServer, describe, looks_across_keys, round_scalars, would_update_all_rows,
)  # fmt: skip
from p3.mxnet.optimizers.saved_states import SavedStates
from p3.mxnet.priorities import Priorities
from p3.mxnet.staleness import Staleness
from p3.plan import choices, combinations
from p3.plan import strategy as strategies
from p3.settings import Settings
from p3.worker import session as sessions

log = logging.getLogger("p3")

_ROWS_ALONE = (
    "key %r: so far its rows have been updated alone, as its optimizer had lazy_update=True, and now all of them would "
    "be: leave lazy_update as it was when the key began, or begin with False"
)
_SET_OPTIMIZER, _SET_MULTI_PRECISION = 0, 1  # MXNet's numbers of commands
_stores = weakref.WeakSet()  # of this process, as long as the script holds them


def _call(method, as_mxnet_errors=(P3Error, ValueError, TimeoutError)):
    """A call of the script: raises the job's first failure, in every call from then on, as the engine itself reports an
    error only once. Nothing that it does belongs in a graph, and MXNet refuses to write an array of a graph while it
    records.
    """

    @functools.wraps(method)
    def call(self, *arguments, **named):
        self._check()
        try:
            if not autograd.is_recording():
                return method(self, *arguments, **named)
            with autograd.pause():
                return method(self, *arguments, **named)
        except as_mxnet_errors as error:
            raise MXNetError(str(error)) from error

    return call


# Of a snapshot: wrong arguments stay ValueError.
_snapshot_call = functools.partial(_call, as_mxnet_errors=(P3Error, TimeoutError))


class P3KVStore(mx.kvstore.KVStore):
    """A store of the job that the environment describes; without DMLC_* variables, of a job inside this process.

    It has no native handle: every method of MXNet's KVStore is overridden, as an inherited one would crash.
    """

    def __init__(self, kind=staleness.SYNC):
        settings = Settings.from_env(os.environ)
        self._kind = kind
        self._staleness = Staleness(kind, settings.staleness)
        session = self._session = sessions.current()
        session.describe_optimizers = lambda: store_snapshots.numbers_of(session, _all_stores(session))
        self._engine_is_naive = os.environ.get("MXNET_ENGINE_TYPE") == "NaiveEngine"
        # That engine would wait for a round before it copies what the round waits for.
        first_piece = sys.maxsize if self._engine_is_naive else session.slice_elements
        self._engine = _mxnet.MXNetEngine(session.core, mx.base._LIB._name, first_piece)
        self._updater = None  # Trainer looks for its `optimizer`
        self._live_fields = None  # of what the servers update with
        self._servers_update = False  # with that optimizer; else the updater updates the store's own weights
        _prepare_process(self._engine_is_naive)
        self._store = session.new_store()
        self._keys = {}
        self._outdated = set()  # keys that take a new value at their next init
        self._priorities = Priorities(session, self._store, settings.priority)
        self._loss_scale = LossScale(session)
        self._strategy = None  # of set_strategy(), until it is held against the keys
        self._clips = False  # set_clipping() was called
        self._rates = None  # learning rate and weight decay of a Trainer that pushes just now
        self._norm = None  # then, of its sums, as soon as it has a key
        self._saved_states = SavedStates(self)
        self._resuming = store_snapshots.Resuming(self)
        _stores.add(self)

    def __del__(self):
        pass  # MXNet's would free the handle

    # Who we are

    @property
    def handle(self):
        raise MXNetError(
            f"{self._kind} has no native handle: this function of MXNet works with MXNet's own stores only"
        )

    @property
    def type(self):
        return staleness.TYPES[self._kind]  # Gluon looks for "dist", Module for "dist" and "_sync"

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

    def stats(self, servers=False, flat=False):
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
        snapshots: how many of this job were taken and how many failed.
        order: how well priorities have foreseen the order in which forward passes use the keys (p3/frontend/order.py).
        With servers=True each server is asked for its own counters (p3/node.h, and cpu_s), under servers[n]["itself"],
        and for late_s: of each worker, how long after the first push of a round its last one came, in the mean of the
        last rounds (workers of one machine, who push as one, are equally late). That takes a round trip through the
        scheduler.

        With flat=True it is Session.stats() instead: names as `p3/steps_per_s` with a number each, for TensorBoard.
        """
        session = self._session
        if flat:
            return session.stats()
        stats = session.counters()
        stats["order"] = self._priorities.order_stats()
        stats["snapshots"] = dict(session.snapshots.counts)
        stats["servers"] = [session.traffic_with(server) for server in range(session.num_servers)]
        stats["keys"] = {
            key: entry.stats(session.key_counters(entry.declared), self.num_workers)
            for key, entry in self._keys.items()
        }
        if servers:
            for one, itself in zip(stats["servers"], self._server_counters()):
                one["itself"] = itself
        return stats

    @_call
    def _server_counters(self):
        return self._session.server_counters()

    def mark_stall(self, key, begin_ns, end_ns):
        """For `p3 trace`: the training thread waited for the key's value between these times of time.monotonic_ns()."""
        self._session.mark_stall(self._key(key).declared, begin_ns, end_ns)

    # Values in, values out. Each call may be about one key or about a list of keys with a list of values; a key that
    # the list names several times has the values of all. Arrays to copy to may have another type than the key:
    # MXNet casts. What is wrong with one key of a list is found before anything is done with the others.

    @_call
    def init(self, key, value):
        """Makes keys known; their first values are those of rank 0. A key that is initialised again keeps its value.

        Blocks nothing, and is no barrier.
        """
        for one_key, values in grouped(key, value):
            beginnings.init(self, one_key, values)

    @_call
    def broadcast(self, key, value, out, priority=0):
        """init, and the first value (of rank 0) copied to `out`."""
        for one_key, values, outs in grouped(key, value, out):
            entry = beginnings.init(self, one_key, values, outs)
            entry.require_outs(outs)
            self._copy_out(entry, outs)

    @_call
    def push(self, key, value, priority=0):
        """Sends gradients into the keys' next rounds; the results land whether they are pulled or not."""
        for entry, values in [(self._gradients_of(one, values), values) for one, values in grouped(key, value)]:
            self._push(entry, values, values, priority)

    @_call
    def pull(self, key, out=None, priority=0, ignore_sparse=True):
        """Copies to `out` what the pushes so far have led to; sparse arrays in it are left alone if `ignore_sparse`."""
        if out is None:
            raise MXNetError(f"pull of key {key!r}: no `out` to pull into was given")
        wanted = [
            (self._key(one_key), [one for one in outs if not (ignore_sparse and is_sparse(checked(one, one_key)))])
            for one_key, outs in grouped(key, out)
        ]
        for entry, outs in wanted:
            entry.require_outs(outs)
        for entry, outs in wanted:
            self._copy_out(entry, outs)

    @_call
    def pushpull(self, key, value, out=None, priority=0):
        """push, then pull to `out`, or to `value` itself where there is no `out`."""
        known = [
            (self._gradients_of(one_key, values), values, outs)
            for one_key, values, outs in grouped(key, value, value if out is None else out)
        ]
        for entry, _, outs in known:
            entry.require_outs(outs)
        pushed = [(self._push(entry, values, outs, priority), outs) for entry, values, outs in known]
        for entry, outs in pushed:  # behind all pushes, as keys may share arrays
            self._copy_out(entry, outs)

    @_call
    def row_sparse_pull(self, key, out=None, priority=0, row_ids=None):
        """Copies the rows `row_ids` of what the pushes so far have led to into the row_sparse arrays `out`.

        Afterwards `out` has just those rows. `row_ids`: whole numbers of any type, in any order; one array for each of
        `out`, or one for all. Waits until they are computed, but not for the network. A row that does not exist is
        MXNetError at once.
        """
        if out is None or row_ids is None:
            raise MXNetError(f"row_sparse_pull of key {key!r} needs `out` and `row_ids`")
        if isinstance(key, (list, tuple)):
            each_ids = as_list(row_ids)
            row_ids = each_ids * len(key) if len(each_ids) == 1 else each_ids
        for one_key, outs, ids in each(key, out, row_ids):
            entry = self._key(one_key)
            entry.priority = self._priorities.of(entry, priority, outs)
            pull_rows(entry, outs, ids, entry.priority)
            self._after_operation()

    @_call
    def join(self, update=None):
        """For a worker that has taken its last step: returns when every worker has called it. So steps may be uneven.

        Until then the others' rounds, of every store that was made, go on without this worker, and its weights follow
        theirs; also of stores that the script has dropped, as others may still use theirs. A store that hands its sums
        to the caller (Trainer(update_on_kvstore=False)) needs `update`: called with the store after each step in which
        the others have pushed keys, when their sums lie in the arrays that this worker pulled to last, it does what
        this worker would have done, e.g. lambda store: trainer.update(batch_size). Afterwards training may go on. As
        Horovod's join, but without an idle worker's zeros on the wire.
        """
        joining.join(self, _all_stores(self._session), update)

    @_snapshot_call
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
        store_snapshots.take(_all_stores(self._session), round, state, as_trainers(trainer))

    @_snapshot_call
    def resume(self, trainer=None):
        """Brings the job back to its newest valid snapshot. On every worker, before the first init of any store.

        Returns (round, state): how many steps were taken, and this worker's own state; (0, {}) where there is none. Of
        a job with another number of workers, which the result's `workers` tells, new ranks get rank 0's state. Each key
        then begins with the snapshot's value, not the script's. `trainer`: as for snapshot; its weights have the
        snapshot's values when this returns. Create all Trainers before. A worker that has taken the place of a
        lost one (P3_ON_WORKER_LOSS) gets the steps that are behind the job, {} and the others' weights, and goes on
        beside them. Blocks, at most P3_WAIT_TIMEOUT_S. ValueError if the snapshot does not fit this job; a damaged one
        is logged, and the one before it taken.
        """
        trainers = as_trainers(trainer)
        resumed = self._session.resume()
        if self._session.saved.own is not None:
            for store in _all_stores(self._session):
                store_snapshots.restore_optimizer(store)
            store_snapshots.restore_trainers(self, trainers)
        elif self._session.rejoined_at is not None:
            store_snapshots.fetch_weights(self, trainers)
        self._session.trainers = [weakref.ref(one) for one in trainers]
        return resumed

    # Settings of the store, before its first init, the same on every worker

    @_call
    def set_gradient_compression(self, compression_params):
        """{"type": "2bit", "threshold": 0.5} as MXNet's, {"type": "fp16"}, or any other of docs/compression.md, of
        float32 gradients.

        All apply to what workers push; with some, fp16 for one, sums come back so as well. Each slice is compressed
        when its turn to leave has come, so priorities hold. Blocks until the servers know.

        {"type": "int8", "down": "bf16"}, or {"down": "bf16"} alone: so come back sums, or if the servers update changes
        of the weights; of keys of at least two dimensions. "down" is a type, or a dict of one with its options.

        {"type": "dgc", "ratio": 0.001}: deep gradient compression, with SGD on the servers alone. Keys of one dimension
        stay as they are.
        """
        if not isinstance(compression_params, dict):
            raise MXNetError(f"compression_params is {compression_params!r}; it must be a dict like {{'type': '2bit'}}")
        ways = codecs.ways_of_mxnet(compression_params)
        combinations.require("set_gradient_compression", choices.of_compression(ways.up), choices.MXNET)
        for option, value in ways.options.items():
            self._session.set_option(self._store, option, value)

    @_call
    def set_reduction(self, reduction):
        """What a round makes of the workers' gradients: their "sum", as MXNet's stores, or their "average".

        The average is over the workers that took part in the round (see join), so `Trainer.step` is given the batch
        size of one worker. Blocks until the servers know.
        """
        self._session.set_option(self._store, "reduction", {"type": reduction})

    @_call
    def set_staleness(self, rounds, keys=None):
        """Of p3_ssp and p3_async: how many rounds the fastest worker may be ahead of the slowest; or math.inf.

        Of the store, or of the `keys` that are named: of those with 0 rounds are synchronous. Before the first init of
        the keys it is about, the same on every worker. p3_ssp begins with P3_STALENESS, p3_async with math.inf.
        """
        self._staleness.set(rounds, None if keys is None else as_list(keys), begun=self._keys)

    @_call
    def set_strategy(self, strategy):
        """Which servers hold what of the store's keys: the path of a file that `p3 plan` has written, or a dict of what
        such a file has (docs/planning.md).

        Before the first init, the same on every worker; blocks until all agree. MXNetError names what does not fit the
        job, and at the store's first push an entry whose key it lacks. With P3_STRATEGY, which is for all keys of a
        job, it must say the same.
        """
        given = strategies.given(strategy)
        self._session.set_strategy(self._store, given)
        self._strategy = given

    @_call
    def set_clipping(self):
        """Has the servers tell the norm of each step's sums, for p3.mxnet.clip_global_norm.

        Before the store's first init, on every worker; one that differs fails the job at its first init, with an error
        that names it. That init waits for rank 0's. The store is for a gluon.Trainer with update_on_kvstore=False: each
        key has one round in each step, and no key comes after the first step. MXNetError if the store updates, is not
        synchronous, or has keys already.
        """
        discipline = choices.SYNCHRONOUS if self._kind == staleness.SYNC else choices.STALE
        combinations.require(self._kind, choices.NORM, discipline)
        if self._updater is not None:
            self._refuse_updates()
        if self._keys and not self._clips:
            raise MXNetError(
                "set_clipping: the store has keys already; call it before the first init, as a Trainer does in its "
                "first step"
            )
        self._clips = True

    # Optimizers

    @_call
    def set_optimizer(self, optimizer):
        """Has the servers update the weights, or the workers where the servers lack the optimizer. Blocks till agreed.

        The object stays in use: its numbers, such as learning rate, weight decay and momentum, are read at each push.
        Another object of the same kind and with the same settings (other than those two) begins with fresh states.
        After a store's first push the workers update too, as servers could not tell which gradients came before: from
        what the pushes so far have led to. So every worker must set an optimizer between the same pushes.
        """
        is_set = optimizer is self._optimizer  # by Trainer, after a reset; its state stays
        if is_set and self._servers_update:
            return
        try:
            description = describe(optimizer)
            if self._updates_here:
                raise NotOnServer("the workers update this store's weights already")
            if not self._servers_update and self._pushed_keys():
                raise NotOnServer("gradients have been pushed without it; set it before the first push")
        except NotOnServer as reason:
            if is_set:
                return
            name = type(optimizer).__name__
            self._staleness.require_servers(f"{name} runs on the workers: {reason}")
            log.warning("%s updates the weights on every worker, not on the servers: %s", name, reason)
            self._set_updater(mx.optimizer.get_updater(optimizer))
        else:
            self._session.set_optimizer(self._store, description)
            for entry in self._keys.values():
                if would_update_all_rows(optimizer, entry):
                    raise MXNetError(_ROWS_ALONE % (entry.id,))
            self._live_fields = LiveFields(optimizer)
            self._servers_update, self._updater = True, mx.optimizer.get_updater(optimizer)
            self._saved_states.begin_anew()
            store_snapshots.restore_optimizer(self)
        self._priorities.know_parameters(getattr(optimizer, "param_dict", None) or {})

    @_call
    def _set_updater(self, updater):
        """`updater(key, sum, weight)` updates this worker's copy of the weights; all workers must do the same."""
        self._staleness.require_servers("an updater runs on the workers")
        if self._servers_update:
            raise MXNetError(
                f"the servers update this store's weights with {type(self._optimizer).__name__} already; "
                "set another optimizer on a new store"
            )
        if updater is self._updater:
            return
        if self._clips:
            self._refuse_updates()
        if self._updater is None:
            for entry in self._keys.values():
                entry.keep_weight()
        self._updater = updater
        store_snapshots.restore_optimizer(self)

    def _refuse_updates(self):
        raise MXNetError(
            f"{self._kind}: with set_clipping() the Trainer updates, behind the store's sums and their norm, and not "
            "the store: pass update_on_kvstore=False to the Trainer"
        )

    @_call
    def save_optimizer_states(self, fname, dump_optimizer=False):
        """Writes the optimizer's state, as of this worker's last round, to one file that MXNet's Updater can load.

        Atomic: `fname` is the old file or the whole new one. Any worker may call it, alone. With dump_optimizer the
        file also holds the optimizer (learning rate, number of updates).
        """
        self._saved_states.save(fname, dump_optimizer)

    @_call
    def load_optimizer_states(self, fname):
        """Gives the optimizer the state in a file that this method, or MXNet's Updater.get_states, has written.

        Every worker must call it, with the same file, before its next push, and waits until all have: the servers take
        rank 0's word, and an optimizer in the file replaces each worker's. MXNetError if the file is cut short or is of
        another model or optimizer; then everything is as before. MXNet's format is a pickle: load only files that you
        trust.
        """
        self._saved_states.load(fname)

    @property
    def _optimizer(self):
        return getattr(self._updater, "optimizer", None)

    @property
    def _updates_here(self):
        """Whether the updater updates this worker's own copy of the weights."""
        return self._updater is not None and not self._servers_update

    def _hands_out_sums(self):
        return self._updater is None

    def _updates_in_order(self):
        """Whether it matters in which order this worker updates the keys."""
        return self._updates_here and looks_across_keys(self._optimizer)

    def _pushed_keys(self):
        return [entry for entry in self._keys.values() if entry.pushed]

    # The job

    @_call
    def _barrier(self):
        self._session.barrier()

    @_call
    def get_num_dead_node(self, node_id=0, timeout=60):
        """0, or the error that the whole job ends with when any node dies: nobody trains on beside a dead node."""
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
        try:
            self._session.check()
        except P3Error as error:
            raise MXNetError(str(error)) from None

    # One key

    def _key(self, key):
        try:
            return self._keys[key]
        except KeyError:
            raise MXNetError(f"key {key!r} was not initialised on this store; call init or broadcast first") from None

    @_call
    def _expect_new_values(self):
        """The next init of each key brings rank 0's new value; the optimizer and its state stay. On every worker at the
        same point; waits for them, or one that is late would get that value in the place of the one before."""
        mx.nd.waitall()
        self._session.barrier("set_data() or load_parameters()")
        self._outdated = set(self._keys)

    def _gradients_of(self, key, values):
        """The key, if it can take these arrays as its gradient."""
        entry = self._key(key)
        entry.require_shape(values[0], "pushed with", and_type=True)
        for value in values[1:]:
            entry.require_shape(value, "pushed with")  # its type is cast to that of the first
        return entry

    def _push(self, entry, values, outs, priority):
        if self._strategy is not None:
            self._strategy.require_keys(self._keys)
            self._strategy = None
        if not entry.pushed:
            entry = beginnings.before_first_push(self, entry, values)
        elif self._servers_update and would_update_all_rows(self._optimizer, entry):
            raise MXNetError(_ROWS_ALONE % (entry.id,))
        declared = entry.declared
        self._session.begin_push(declared, -priority)  # Trainer and Module begin with 0 and go down
        gradient = entry.gradient(values)
        scalars = NO_SCALARS
        if self._servers_update:
            scalars = round_scalars(self._optimizer, entry.id, servers_count=declared.staleness > 0)
            scalars = (*scalars, self._live_fields.of(self._optimizer, declared))
        elif self._rates is not None and not (declared.sparse or declared.factors or declared.staleness):
            scalars = (*self._rates, *NO_SCALARS[2:])
        entry.priority = self._priorities.of_round(entry, priority, (*outs, *values))
        partitions.note_push(self._session, declared)
        if self._norm is not None:
            self._norm.before_push(entry, self._keys.values())
        entry.push(gradient, scalars, entry.priority)
        entry.pushed = entry.in_steps = True
        self._saved_states.note_round(entry.id)
        if self._updates_here:
            self._updater(entry.id, entry.sum_for_updater(), entry.weight)
        self._after_operation()
        return entry

    def _begin_pushes(self, optimizer):
        """Of a Trainer's step. Where workers update, the servers see to it that all do so at the same rate."""
        self._rates = optimizer.learning_rate, optimizer.wd

    @_call
    def _end_pushes(self):
        self._rates = None
        if self._norm is not None:
            self._norm.end_pushes(self._keys.values())
            self._after_operation()

    def _end_step(self):
        """The Trainer is about to update by the sums as they are."""
        if self._norm is not None:
            self._norm.end_step()

    @_call
    def _clip(self, trainer, max_norm):
        """p3.mxnet.clip_global_norm."""
        if not self._clips:
            raise MXNetError(
                "clip_global_norm: the servers tell no norms. Call set_clipping() of the store before the first step "
                "of the Trainer, and pass update_on_kvstore=False to that"
            )
        if self._norm is None:
            raise MXNetError(clipping.NOTHING_TO_CLIP)
        if getattr(trainer, "_amp_loss_scaler", None) is not None:
            combinations.require("clip_global_norm", choices.CLIPPING, choices.SCALER)
        parameters = (one for one in trainer._params if one.grad_req != "null")
        norm = self._norm.clip([classic(grad) for one in parameters for grad in one.list_grad()], max_norm)
        self._after_operation()
        return norm

    def _follow_loss_scale(self, scale):
        """The gradients that are pushed next have this scale. Nothing may be under way where it has changed."""
        self._loss_scale.follow(scale, [entry.declared for entry in self._keys.values()])

    def _leave_out(self, keys):
        """Nobody uses the sums of the last step, in which these keys were pushed and which have landed."""
        self._loss_scale.leave_out([self._keys[key].declared for key in keys])

    def _copy_out(self, entry, outs):
        entry.copy_out(outs, entry.priority)
        entry.outs = outs

    def _follow(self, entry):
        """Takes over what has landed in a round that this worker skipped."""
        self._saved_states.note_round(entry.id)
        if self._servers_update:
            round_scalars(self._optimizer, entry.id)  # counts the update here as elsewhere
        elif self._updates_here:
            self._updater(entry.id, entry.sum_for_updater(), entry.weight)
        elif entry.parameter is not None:
            for array in entry.parameter.list_data():
                array._fresh_grad = True  # or Trainer.update would take the sum for a stale gradient
        self._copy_out(entry, entry.outs)

    def _take_last(self, entry):
        """Takes over the value that all workers end with, where they have been rounds apart."""
        if entry.declared.staleness > 0:
            self._copy_out(entry, entry.outs)

    def _after_operation(self):
        if self._engine_is_naive:
            self._check()  # this engine waits for the operation, but drops its error


def _all_stores(session):
    """That the script still holds, in the order in which they were made."""
    return sorted((store for store in _stores if store._session is session), key=lambda store: store._store)


@functools.lru_cache(maxsize=None)
def _prepare_process(engine_is_naive):
    """Once, after the session has been opened: what is registered later runs earlier at exit."""
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
