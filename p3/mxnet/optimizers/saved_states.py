"""The optimizer's states of a store: saved to a file and loaded, whether the servers hold them or this worker.

Waits for the network, at most P3_WAIT_TIMEOUT_S. What is fetched is consistent: a key's state changes only in a round,
and no round completes without this worker.
"""

import copy
import weakref

import numpy as np
from mxnet.base import MXNetError

from p3._core import DTYPES, MASTER, state_parts
from p3.frontend.states import between_barriers, fetch, give, has_a_say
from p3.mxnet import store_snapshots
from p3.mxnet.optimizers import states as optimizer_states
from p3.mxnet.optimizers.descriptions import describe, would_update_all_rows
from p3.plan import choices, combinations


class SavedStates:
    """Of one store, which has it. Threads: the store's caller, one at a time."""

    def __init__(self, store):
        self._store = weakref.proxy(store)
        self._loaded = {}  # of keys not pushed yet, in case they become of another kind
        self._begun = set()  # ids of keys whose states have begun anew, and which have had no round since

    def save(self, path, dump_optimizer):
        store, updates = self._store, self._store.updates
        optimizer = _optimizer_of(store, "saved")
        states = self._states_on_servers(optimizer) if updates.on_servers else updates.updater.states
        if dump_optimizer:
            optimizer = _with_servers_counts(store, optimizer)
        optimizer_states.write(path, states, optimizer if dump_optimizer else None)

    def _states_on_servers(self, optimizer):
        """{key: state as MXNet's Updater would hold it}; also of keys whose states a snapshot still has for them."""
        arrays = _fetch(self._store, optimizer, self._with_states())
        to_come = {one: store_snapshots.states_to_come(self._store, one) for one in self._store.keys.values()}
        arrays.update((entry, states) for entry, states in to_come.items() if states)
        return {entry.id: _made(optimizer, entry, its) for entry, its in arrays.items()}

    def load(self, path):
        store, updates, keys = self._store, self._store.updates, self._store.keys
        store.session.entrance.require_no_push("load_optimizer_states()")
        optimizer = _optimizer_of(store, "loaded")
        states, saved_optimizer = optimizer_states.read(path)
        if saved_optimizer is not None:
            _require_same_kind(store, optimizer, saved_optimizer, path)
        unknown = sorted(map(repr, states.keys() - keys.keys()))
        if unknown:
            raise MXNetError(f"{path} holds the state of another model: this store has no key {', '.join(unknown)}")
        arrays = {key: optimizer_states.from_mxnet(optimizer, key, keys[key].template, states[key]) for key in states}
        store.resuming = dict.fromkeys(store.resuming, False)  # the file's word comes later than the snapshot's
        if not updates.on_servers:
            updates.updater.states, updates.updater.states_synced = states, dict.fromkeys(states, False)
        else:
            begun = [entry for entry in store.pushed_keys() if entry.id not in arrays]
            arrays.update(self._begun_anew(begun, optimizer))
            self._give_between_barriers(arrays, saved_optimizer)
            self._loaded = {key: arrays[key] for key in arrays if not keys[key].pushed}
        if saved_optimizer is not None:
            saved_optimizer.param_dict = getattr(optimizer, "param_dict", {})
            updates.updater.optimizer = saved_optimizer

    def own(self):
        """For a process that joins the job, which has it take() that."""
        return {"loaded": self._loaded, "begun": list(self._begun)}

    def take(self, own):
        self._loaded, self._begun = own["loaded"], set(own["begun"])

    def begin_anew(self):
        """For an optimizer that takes the place of one of its kind: its states begin as MXNet would begin them."""
        store = self._store
        if choices.of_compression(store.compression.up) == choices.DGC:
            return  # each worker keeps its momentum
        begun, self._loaded = self._with_states(), {}
        if begun:
            self._give_between_barriers(self._begun_anew(begun, store.updates.optimizer), None)

    def _with_states(self):
        """The keys of which the servers have a state."""
        loaded = (self._store.keys[key] for key in self._loaded)
        return [*(entry for entry in loaded if not entry.pushed), *self._store.pushed_keys()]

    def _begun_anew(self, entries, optimizer):
        """Their states, as MXNet would begin them."""
        self._begun = {entry.id for entry in entries}
        return {entry.id: _fresh(optimizer, entry) for entry in entries}

    def note_round(self, key):
        self._begun.discard(key)

    def note_value(self, entry):
        """The key has another value: MXNet would make its state with the next update, and DCASGD's has the weight."""
        if entry.id in self._begun:
            self._give_between_barriers({entry.id: _fresh(self._store.updates.optimizer, entry)}, None)

    def give_loaded(self, key):
        """Of a key that has just become of another kind: what was loaded before."""
        store = self._store
        if key in self._loaded:
            _give(store, {key: self._loaded.pop(key)}, store.updates.optimizer)

    def _give_between_barriers(self, states, counted_by):
        for _ in between_barriers(self._store.session, "load_optimizer_states(), set_optimizer() or set_data()"):
            _give(self._store, states, counted_by)


def _fresh(optimizer, entry):
    arrays, master = optimizer_states.fresh(optimizer, entry.id, entry.template)
    return arrays, None if entry.landing is None else master  # the weight is on the servers, and its master copy there


def _optimizer_of(store, action):
    optimizer = store.updates.optimizer
    if optimizer is None:
        raise MXNetError(f"no optimizer was set on this store, so no states can be {action}; call set_optimizer")
    where, compression = f"{store.session.label}: store {store.number}", choices.of_compression(store.compression.up)
    combinations.require(where, compression, choices.STATE_FILES.said(f"to be {action}"))
    return optimizer


def _require_same_kind(store, optimizer, saved, path):
    kind, saved_kind = type(optimizer).__name__, type(saved).__name__
    same = type(saved) is type(optimizer)
    if same and store.updates.on_servers:
        kind, saved_kind = describe(optimizer), describe(saved)
        same = kind == saved_kind
    if not same:
        raise MXNetError(f"{path} holds the state of {saved_kind}, but this store's optimizer is {kind}")
    for entry in store.keys.values() if store.updates.on_servers else ():
        if would_update_all_rows(saved, entry):
            raise MXNetError(
                f"{path} holds the state of a {type(saved).__name__} that updates all rows, but this store's optimizer "
                f"is one that has updated those of key {entry.id!r} alone: load a file with lazy_update=True"
            )


def _fetch(store, optimizer, entries):
    """{entry: arrays by their part}"""
    description, fetched = describe(optimizer), {}

    def parts():
        for entry in entries:
            key = entry.declared
            dtype = "float32" if key.dtype == "float16" else key.dtype
            entry.wait()
            arrays = fetched[entry] = {}
            for part in state_parts(description, DTYPES[key.dtype]):
                if part > 0:
                    arrays[part] = np.empty(key.landing_shape, dtype)
                    yield key, part, arrays[part]

    fetch(store.session, parts())
    return fetched


def _made(optimizer, entry, arrays):
    states = [arrays[part] for part in sorted(arrays) if part != MASTER]
    return optimizer_states.to_mxnet(optimizer, entry.id, entry.template, states, arrays.get(MASTER))


def _with_servers_counts(store, optimizer):
    """A copy that has counted what the servers have, of keys with staleness: all workers' pushes."""
    counts = {
        entry.id: store.session.updates(entry.declared)
        for entry in store.pushed_keys() if entry.declared.staleness > 0
    }  # fmt: skip
    if counts:
        current, optimizer = optimizer._index_update_count, copy.copy(optimizer)
        optimizer._index_update_count = {**current, **counts}
        optimizer._all_index_update_counts = {  # MXNet goes by these, and the other is one of them
            device: optimizer._index_update_count if updates is current else updates
            for device, updates in optimizer._all_index_update_counts.items()
        }
    return optimizer


def _give(store, given, counted_by):
    """Makes rank 0's states the servers', of {key: (arrays, master) as optimizer_states.from_mxnet makes them}.

    Of keys that each worker updates, this worker takes its own. `counted_by`: the optimizer that has counted the
    updates in them, which the servers do with staleness; or None.
    """
    counts = getattr(counted_by, "_index_update_count", {})

    def parts():
        for name, (arrays, master) in given.items():
            entry = store.keys[name]
            if not has_a_say(store.session, entry.declared):
                continue
            entry.wait()
            contents = dict(enumerate(arrays, 1))
            if master is not None:
                contents[MASTER] = master
            for part, content in contents.items():
                yield entry.declared, part, np.ascontiguousarray(content), counts.get(name, 0)

    give(store.session, parts())
