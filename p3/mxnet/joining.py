"""P3KVStore.join: what becomes of the others' rounds here, which p3/frontend/serving.py takes part in."""

import mxnet as mx
from mxnet.base import MXNetError

from p3.frontend.serving import Served, serve_others
from p3.mxnet import store_snapshots
from p3.mxnet.keys.dense import DenseKey
from p3.mxnet.keys.rows import ServerRowKey
from p3.mxnet.optimizers.descriptions import counted, follow_in_steps

_NEEDS_UPDATE = (
    "join: this store hands its sums to the script, which must apply those of the others' steps as well: call "
    "join(update=lambda store: trainer.update(batch_size))"
)


class _Held(Served):
    """A store that the script still holds."""

    def __init__(self, store, update):
        entries = store.keys.values()
        in_step = [one for one in entries if one.in_steps]
        self._hands_out_sums = store.updates.hands_out_sums
        super().__init__(entries, in_step if self._hands_out_sums or store.updates.in_order else (), store.norm)
        self._store, self._update = store, update
        self.follow, self.take_last = store.follow, store.take_last

    def landed(self, entry):
        if not self._hands_out_sums:
            return
        if self._update is None:
            raise MXNetError(_NEEDS_UPDATE)
        if not entry.in_steps:
            raise MXNetError(
                f"join: another worker has pushed key {entry.id!r}, which this worker never has, so its sum cannot be "
                "applied here. Take at least one step before join, or create the Trainer with update_on_kvstore=True"
            )

    def end_step(self, is_changed):
        if is_changed and self._hands_out_sums:
            self._update()
        self._store.end_step()


def _dropped(engine, keys, norm):
    """A store that the script has dropped. What others may still push lands and is forgotten. `keys`: the store's, of
    Session.stores.keys_by_name. Memory that nothing lands in stays untouched."""
    return Served(((ServerRowKey if key.sparse else DenseKey)(engine, id, key) for id, key in keys.items()), norm=norm)


def join(store, updates):
    """P3KVStore.join of `store`. `updates`: of all stores that the script still holds, and that nothing may use
    meanwhile, what it wants called behind the others' steps, or None."""
    session = store.session
    if not store.keys:
        raise MXNetError(
            "join: this worker has no keys to serve the others' rounds with. Trainer makes them in its first step, "
            "so every worker must take at least one; or call init"
        )
    if updates[store] is None and store.updates.hands_out_sums and store.pushed_keys():
        raise MXNetError(_NEEDS_UPDATE)
    for one in updates:
        one.take_new_values()
        for entry in list(one.keys.values()):  # this worker may have no step of its own before it joins
            store_snapshots.restore(one, entry)
            if one.updates.here or (one.updates.hands_out_sums and entry.in_steps):
                entry.begin_sums()
    stores = {one.number: _Held(one, update) for one, update in updates.items()}
    for number, keys in enumerate(session.stores.keys_by_name):
        if number not in stores:
            stores[number] = _dropped(store.engine, keys, session.stores.norms.get(number))
    before = {one: counted(one.updates.optimizer) for one in updates if one.updates.on_servers}
    serve_others(session, [stores[number] for number in sorted(stores)], mx.nd.waitall)  # skips go past MXNet's engine
    for one in before:
        follow_in_steps(one.updates.optimizer, one.keys, before[one])  # they have landed in any order
