"""The MXNet plugin: `mx.kv.create("p3_sync")`; and "p3_async" and "p3_ssp", whose workers may be rounds apart.

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
from mxnet.base import MXNetError

from p3 import codecs
from p3._core import P3Error
from p3.mxnet import changes, entering, joining, staleness, store_snapshots
from p3.mxnet.arguments import as_list, as_trainers, checked, each, grouped, is_sparse
from p3.mxnet.keys import beginnings
from p3.mxnet.keys.rows import pull_rows
from p3.mxnet.store import Store, call
from p3.plan import choices, combinations
from p3.plan import strategy as strategies

log = logging.getLogger("p3")

_SET_OPTIMIZER, _SET_MULTI_PRECISION = 0, 1  # MXNet's numbers of commands
_kvstores = weakref.WeakSet()  # of this process, as long as the script holds them

# Of a snapshot: wrong arguments stay ValueError.
_snapshot_call = functools.partial(call, as_mxnet_errors=(P3Error, TimeoutError))


class P3KVStore(mx.kvstore.KVStore):
    """A store of the job that the environment describes; without DMLC_* variables, of a job inside this process.

    It has no native handle: every method of MXNet's KVStore is overridden, as an inherited one would crash.
    """

    def __init__(self, kind=staleness.SYNC):
        self.store = Store(kind)  # for P3's own modules
        self.check = self.store.check  # of every call
        _prepare_process(self.store.engine_is_naive)
        _kvstores.add(self)

    def __del__(self):
        pass  # MXNet's would free the handle

    # Who we are

    @property
    def handle(self):
        raise MXNetError(
            f"{self.store.kind} has no native handle: this function of MXNet works with MXNet's own stores only"
        )

    @property
    def type(self):
        return staleness.TYPES[self.store.kind]  # Gluon looks for "dist", Module for "dist" and "_sync"

    @property
    def rank(self):
        return self.store.session.rank

    @property
    def num_workers(self):
        return self.store.session.num_workers

    def is_capable(self, capability):
        if capability.lower() == self.OPTIMIZER:
            return True
        raise ValueError(f"Unknown capability: {capability}")

    def stats(self, servers=False, flat=False):
        """What this worker has sent and received so far, as a dict; cheap, and never in the way of training.

        bytes_sent, bytes_received, slices_sent, slices_received; queued_slices and peak_queued_slices (of one
        connection) that wait to be sent; queued_s, how long all sent ones have waited, added up; rounds of keys;
        system_calls of the core's threads.
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
        session = self.store.session
        if flat:
            return session.stats()
        stats = session.counters()
        stats["order"] = self.store.priorities.order_stats()
        stats["snapshots"] = dict(session.snapshots.counts)
        stats["servers"] = [session.traffic_with(server) for server in range(session.num_servers)]
        stats["keys"] = {
            key: entry.stats(session.key_counters(entry.declared), self.num_workers)
            for key, entry in self.store.keys.items()
        }
        if servers:
            for one, itself in zip(stats["servers"], self._server_counters()):
                one["itself"] = itself
        return stats

    @call
    def _server_counters(self):
        return self.store.session.server_counters()

    def mark_stall(self, key, begin_ns, end_ns):
        """For `p3 trace`: the training thread waited for the key's value between these times of time.monotonic_ns()."""
        self.store.session.mark_stall(self.store.key(key).declared, begin_ns, end_ns)

    # Values in, values out. Each call may be about one key or about a list of keys with a list of values; a key that
    # the list names several times has the values of all. Arrays to copy to may have another type than the key:
    # MXNet casts. What is wrong with one key of a list is found before anything is done with the others.

    @call
    def init(self, key, value):
        """Makes keys known; their first values are those of rank 0. A key that is initialised again keeps its value.

        Blocks nothing, and is no barrier.
        """
        for one_key, values in grouped(key, value):
            beginnings.init(self.store, one_key, values)

    @call
    def broadcast(self, key, value, out, priority=0):
        """init, and the first value (of rank 0) copied to `out`."""
        for one_key, values, outs in grouped(key, value, out):
            entry = beginnings.init(self.store, one_key, values, outs)
            entry.require_outs(outs)
            self.store.copy_out(entry, outs)

    @call
    def push(self, key, value, priority=0):
        """Sends gradients into the keys' next rounds; the results land whether they are pulled or not."""
        for entry, values in [(self.store.gradients_of(one, values), values) for one, values in grouped(key, value)]:
            self.store.push(entry, values, values, priority)

    @call
    def pull(self, key, out=None, priority=0, ignore_sparse=True):
        """Copies to `out` what the pushes so far have led to; sparse arrays in it are left alone if `ignore_sparse`."""
        if out is None:
            raise MXNetError(f"pull of key {key!r}: no `out` to pull into was given")
        store = self.store
        wanted = [
            (store.key(one_key), [one for one in outs if not (ignore_sparse and is_sparse(checked(one, one_key)))])
            for one_key, outs in grouped(key, out)
        ]
        for entry, outs in wanted:
            entry.require_outs(outs)
        for entry, outs in wanted:
            store.copy_out(entry, outs)

    @call
    def pushpull(self, key, value, out=None, priority=0):
        """push, then pull to `out`, or to `value` itself where there is no `out`."""
        known = [
            (self.store.gradients_of(one_key, values), values, outs)
            for one_key, values, outs in grouped(key, value, value if out is None else out)
        ]
        for entry, _, outs in known:
            entry.require_outs(outs)
        pushed = [(self.store.push(entry, values, outs, priority), outs) for entry, values, outs in known]
        for entry, outs in pushed:  # behind all pushes, as keys may share arrays
            self.store.copy_out(entry, outs)

    @call
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
            entry = self.store.key(one_key)
            entry.priority = self.store.priorities.of(entry, priority, outs)
            pull_rows(entry, outs, ids, entry.priority)
            self.store.after_operation()

    @call
    def join(self, update=None):
        """For a worker that has taken its last step: returns when every worker has called it. So steps may be uneven.

        Until then the others' rounds, of every store that was made, go on without this worker, and its weights follow
        theirs; also of stores that the script has dropped, as others may still use theirs. A store that hands its sums
        to the caller (Trainer(update_on_kvstore=False)) needs `update`: called with the store after each step in which
        the others have pushed keys, when their sums lie in the arrays that this worker pulled to last, it does what
        this worker would have done, e.g. lambda store: trainer.update(batch_size). Afterwards training may go on. As
        Horovod's join, but without an idle worker's zeros on the wire.
        """
        updates = {one.store: update and functools.partial(update, one) for one in _held(self.store.session)}
        joining.join(self.store, updates)

    @_snapshot_call
    def snapshot(self, round, state=None, trainer=None):
        """Takes a snapshot of the whole job, if P3_SNAPSHOT_DIR is set and this round is due (P3_SNAPSHOT_EVERY).

        Every worker calls it after each step, with the number of steps taken so far. It is of all stores of this
        process; `trainer`, or a list of all Trainers, adds what Trainers know themselves: running statistics, and if
        they update, weights and states. `state` is what this worker alone needs to go on: a dict of names to arrays,
        numbers, strings, None, and lists and dicts of these (position in the data, random states ...); ValueError names
        what cannot be in it. Waits for nothing; but a round that is due while the snapshot before is still being
        written waits for that.
        """
        store_snapshots.take(_held_stores(self.store.session), round, state, as_trainers(trainer))

    @_snapshot_call
    def resume(self, trainer=None):
        """Brings the job back to its newest valid snapshot. On every worker, before the first init of any store.

        Returns (round, state): how many steps were taken, and this worker's own state; (0, {}) where there is none. Of
        a job with another number of workers, which the result's `workers` tells, new ranks get rank 0's state. Each key
        then begins with the snapshot's value, not the script's. `trainer`: as for snapshot; its weights have the
        snapshot's values when this returns. Create all Trainers before. Blocks, at most P3_WAIT_TIMEOUT_S. ValueError
        if the snapshot does not fit this job; a damaged one is logged, and the one before it taken.

        In a process that has joined a running job (P3_JOIN) it is the round of the members() at which it has, and the
        state that the first worker gave there; the Trainers have what that one's have: weights, running statistics,
        the optimizer's numbers and, where they update, its states. ValueError if they are others. Waits for nobody.
        """
        session, trainers = self.store.session, as_trainers(trainer)
        resumed = session.resume()
        with_stores = [(one, self._store_of(one)) for one in trainers]
        if session.entrance.barrier:
            entering.begin(session, _held_stores(session), with_stores)
            resumed = resumed.map(lambda given: given["state"])
        elif session.saved.own is not None:
            for store in _held_stores(session):
                store_snapshots.restore_optimizer(store)
            store_snapshots.restore_trainers(session, with_stores)
        entering.tell_of(session, trainers)
        return resumed

    def _store_of(self, trainer):
        """This one, if the Trainer was given the name of one."""
        its_own = trainer._kvstore_params["kvstore"]
        return (its_own if isinstance(its_own, P3KVStore) else self).store

    # Settings of the store, before its first init, the same on every worker

    @call
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
            self.store.session.set_option(self.store.number, option, value)

    @call
    def set_reduction(self, reduction):
        """What a round makes of the workers' gradients: their "sum", as MXNet's stores, or their "average".

        The average is over the workers that took part in the round (see join), so `Trainer.step` is given the batch
        size of one worker. Blocks until the servers know.
        """
        self.store.session.set_option(self.store.number, "reduction", {"type": reduction})

    @call
    def set_staleness(self, rounds, keys=None):
        """Of p3_ssp and p3_async: how many rounds the fastest worker may be ahead of the slowest; or math.inf.

        Of the store, or of the `keys` that are named: of those with 0 rounds are synchronous. Before the first init of
        the keys it is about, the same on every worker. p3_ssp begins with P3_STALENESS, p3_async with math.inf.
        """
        self.store.staleness.set(rounds, None if keys is None else as_list(keys), begun=self.store.keys)

    @call
    def set_strategy(self, strategy):
        """Which servers hold what of the store's keys, and how they are compressed where the script leaves that open:
        the path of a file that `p3 plan` has written, or a dict of what such a file has (docs/planning.md#the-file).

        Before the first init, the same on every worker; blocks until all agree. MXNetError names what does not fit the
        job, and at the store's first push an entry whose key it lacks. With P3_STRATEGY, which is for all keys of a
        job, it must say the same.
        """
        given = strategies.given(strategy)
        self.store.session.set_strategy(self.store.number, given)
        self.store.strategy = given

    @call
    def set_clipping(self):
        """Has the servers tell the norm of each step's sums, for p3.mxnet.clip_global_norm.

        Before the store's first init, on every worker; one that differs fails the job at its first init, with an error
        that names it. That init waits for rank 0's. The store is for a gluon.Trainer with update_on_kvstore=False: each
        key has one round in each step, and no key comes after the first step. MXNetError if the store updates, is not
        synchronous, or has keys already.
        """
        discipline = choices.SYNCHRONOUS if self.store.kind == staleness.SYNC else choices.STALE
        combinations.require(self.store.kind, choices.NORM, discipline)
        if self.store.updates.updater is not None:
            self.store.refuse_updates()
        if self.store.keys and not self.store.clips:
            raise MXNetError(
                "set_clipping: the store has keys already; call it before the first init, as a Trainer does in its "
                "first step"
            )
        self.store.clips = True

    # Optimizers

    @call
    def set_optimizer(self, optimizer):
        """Has the servers update the weights, or the workers where the servers lack the optimizer. Blocks till agreed.

        The object stays in use: its numbers, such as learning rate, weight decay and momentum, are read at each push.
        Another object of the same kind and with the same settings (other than those two) begins with fresh states.
        After a store's first push the workers update too, as servers could not tell which gradients came before: from
        what the pushes so far have led to. So every worker must set an optimizer between the same pushes.
        """
        self.store.set_optimizer(optimizer)

    @call
    def _set_updater(self, updater):
        """`updater(key, sum, weight)` updates this worker's copy of the weights; all workers must do the same."""
        self.store.set_updater(updater)

    @call
    def save_optimizer_states(self, fname, dump_optimizer=False):
        """Writes the optimizer's state, as of this worker's last round, to one file that MXNet's Updater can load.

        Atomic: `fname` is the old file or the whole new one. Any worker may call it, alone. With dump_optimizer the
        file also holds the optimizer (learning rate, number of updates).
        """
        self.store.saved_states.save(fname, dump_optimizer)

    @call
    def load_optimizer_states(self, fname):
        """Gives the optimizer the state in a file that this method, or MXNet's Updater.get_states, has written.

        Every worker must call it, with the same file, before its next push, and waits until all have: the servers take
        rank 0's word, and an optimizer in the file replaces each worker's. MXNetError if the file is cut short or is of
        another model or optimizer; then everything is as before. MXNet's format is a pickle: load only files that you
        trust.
        """
        self.store.saved_states.load(fname)

    @property
    def _updater(self):
        """Trainer looks for its `optimizer`."""
        return self.store.updates.updater

    # The job

    @call
    def members(self, round=None, state=None):
        """The ranks of all workers that are part of the job, the same on every worker: all, without those that have
        departed where lost workers do not end it (P3_ON_WORKER_LOSS=continue). All call it at the same point, between
        two steps, as before each epoch, and it waits for them.

        With `round`, how many epochs or steps are behind all of them, a process may join the job here (P3_JOIN; `p3
        join`, `p3 run --rejoin`), in the place of a worker that has departed or, up to P3_MAX_WORKERS, as a further
        one. It has the round and the first worker's `state`, as snapshot() takes it, from resume(), and begins with
        this very call; the Trainers that resume() was told of are handed on, too. Or a process may take the place of a
        lost server (P3_ON_SERVER_LOSS=continue; `p3 join --server`). It waits for all rounds under way, and until who
        joins stands beside the others.

        MXNetError for a state that no snapshot could hold; in a process that joins also if its script is another one:
        then the others go on without it. And after P3_WAIT_TIMEOUT_S, which names who has not called it.
        """
        mx.nd.waitall()  # MXNet's engine may still hold rounds back
        session = self.store.session
        if round is None:
            return session.agree_on_members()
        return entering.members(_held_stores(session), round, state)

    @call
    def _barrier(self):
        self.store.session.barrier()

    @call
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


def _held(session):
    """By the script, in the order in which they were made."""
    return sorted((one for one in _kvstores if one.store.session is session), key=lambda one: one.store.number)


def _held_stores(session):
    return [one.store for one in _held(session)]


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


changes.plug_in(mx, P3KVStore)
