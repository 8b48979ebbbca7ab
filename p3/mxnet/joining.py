"""P3KVStore.join: what becomes of the others' rounds here, which p3/frontend/serving.py takes part in."""

import mxnet as mx
from mxnet.base import MXNetError

from p3.frontend.serving import Served, serve_others
from p3.mxnet.keys.dense import DenseKey
from p3.mxnet.keys.rows import ServerRowKey

_NEEDS_UPDATE = (
    "join: this store hands its sums to the script, which must apply those of the others' steps as well: call "
    "join(update=lambda store: trainer.update(batch_size))"
)


class _Held(Served):
    """A store that the script still holds."""

    def __init__(self, store, update):
        entries = store._keys.values()
        in_steps = [one for one in entries if one.in_steps]
        super().__init__(entries, in_steps if store._hands_out_sums() or store._updates_in_order() else (), store._norm)
        self._store, self._update = store, update
        self.follow, self.take_last = store._follow, store._take_last

    def landed(self, entry):
        if not self._store._hands_out_sums():
            return
        if self._update is None:
            raise MXNetError(_NEEDS_UPDATE)
        if not entry.in_steps:
            raise MXNetError(
                f"join: another worker has pushed key {entry.id!r}, which this worker never has, so its sum cannot be "
                "applied here. Take at least one step before join, or create the Trainer with update_on_kvstore=True"
            )

    def end_step(self, is_changed):
        if is_changed and self._store._hands_out_sums():
            self._update(self._store)
        self._store._end_step()


def _dropped(engine, keys, norm):
    """A store that the script has dropped. What others may still push lands and is forgotten. `keys`: the store's, of
    Session.stores.keys_by_name. Memory that nothing lands in stays untouched."""
    return Served(((ServerRowKey if key.sparse else DenseKey)(engine, id, key) for id, key in keys.items()), norm=norm)


def join(store, held, update):
    """P3KVStore.join of `store`. `held`: all stores that the script still holds; nothing may use them meanwhile."""
    session = store._session
    if not store._keys:
        raise MXNetError(
            "join: this worker has no keys to serve the others' rounds with. Trainer makes them in its first step, "
            "so every worker must take at least one; or call init"
        )
    if update is None and store._hands_out_sums() and store._pushed_keys():
        raise MXNetError(_NEEDS_UPDATE)
    for one in held:
        for entry in list(one._keys.values()):  # this worker may have no step of its own before it joins
            one._resuming.restore(entry)
    stores = {one._store: _Held(one, update) for one in held}
    for number, keys in enumerate(session.stores.keys_by_name):
        if number not in stores:
            stores[number] = _dropped(store._engine, keys, session.stores.norms.get(number))
    serve_others(session, [stores[number] for number in sorted(stores)], mx.nd.waitall)  # skips go past MXNet's engine
