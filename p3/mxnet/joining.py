"""join(): a worker that has taken its last step serves the others' rounds until every worker has.

It takes part in each round of each key with a skip: a push without a gradient. The new value lands as in any other
round, and the key is skipped again. Once all workers skip a round of a key, it completes without a new value: no worker
will push that key any more. So nobody counts steps, and the servers know of no joined workers, only of skips.

Where the servers tell norms (clipping.py), the keys of a store are skipped together, with the round of its norm: for
there who steps has a round of each key in each step, which may be a skip as well. So it is the norm's round that tells
the end: all may skip all keys in a step, as when all layers are frozen, and there is another one behind it.

Where each worker updates by an optimizer whose updates of one key depend on those of others, the keys that this worker
has pushed count as a step: when the rounds of all have landed, they are updated in their order. For a small key's sum
may land before that of a large one, and the next step's before this one's.

All workers must serve the same keys, or they would wait for each other: those of every store that this process has
made. Which of them a script still holds, and when Python takes the others away, is each worker's own affair.
"""

import mxnet as mx
from mxnet.base import MXNetError

from p3._core import Completions
from p3.frontend import waiting
from p3.mxnet.keys.dense import DenseKey
from p3.mxnet.keys.rows import ServerRowKey

_NEEDS_UPDATE = (
    "join: this store hands its sums to the script, which must apply those of the others' steps as well: call "
    "join(update=lambda store: trainer.update(batch_size))"
)


class DroppedStore:
    """Stands for a store that this worker's script has dropped. What others may still push lands and is forgotten."""

    def __init__(self, engine, keys, norm):
        """`keys`: the store's, of Session.stores.keys_by_name. Memory that nothing lands in stays untouched."""
        self._norm = norm
        self._keys = {id: (ServerRowKey if key.sparse else DenseKey)(engine, id, key) for id, key in keys.items()}

    def _hands_out_sums(self):
        return False

    def _updates_in_order(self):
        return False

    def _follow(self, entry):
        pass

    _take_last = _follow


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
    stores = {one._store: one for one in held}
    for one in held:
        for entry in list(one._keys.values()):  # this worker may have no step of its own before it joins
            one._resuming.restore(entry)
    if session.progress.join():
        for number, keys in enumerate(session.stores.keys_by_name):
            if number not in stores:
                stores[number] = DroppedStore(store._engine, keys, session.stores.norms.get(number))
        _serve_others(session, [stores[number] for number in sorted(stores)], update)
        session.progress.joined()


def _serve_others(session, stores, update):
    """Returns when every worker is here. `stores`: all that were made, in their order."""
    keys = [(store, entry) for store in stores for entry in store._keys.values()]
    keys += [(store, None) for store in stores if store._norm is not None]
    landed = {store: [] for store in stores}  # the numbers of keys whose rounds wait for the rest of their step
    completions = Completions()

    def skip(numbers):
        mx.nd.waitall()  # skips go past MXNet's engine
        for number in numbers:
            store, entry = keys[number]
            if entry is None:
                store._norm.skip(completions, number)
                continue
            session.progress.skip(entry.declared)
            entry.operations.skip(entry.priority, completions, number)

    def take_sum(store, entry):
        if update is None:
            raise MXNetError(_NEEDS_UPDATE)
        if not entry.in_steps:
            raise MXNetError(
                f"join: another worker has pushed key {entry.id!r}, which this worker never has, so its sum cannot be "
                "applied here. Take at least one step before join, or create the Trainer with update_on_kvstore=True"
            )
        store._follow(entry)

    skip(range(len(keys)))
    changed, taken = set(), set()  # stores with norms: somebody has pushed a key in the step; has taken it
    still_pushed = len(keys)
    while still_pushed:
        number, updated = waiting.next_of(session, completions)
        store, entry = keys[number]
        if store._norm is not None:
            if updated and entry is None:
                taken.add(store)
            elif updated:
                changed.add(store)
                if store._hands_out_sums():
                    take_sum(store, entry)
            landed[store].append(number)
            if len(landed[store]) <= len(store._keys):
                continue
            numbers, landed[store] = landed[store], []
            if store in changed and store._hands_out_sums():
                update(store)
            store._norm.end_step()
            if store in taken:
                skip(numbers)
            else:
                still_pushed -= len(numbers)
            changed.discard(store)
            taken.discard(store)
            continue
        if not updated:
            still_pushed -= 1
            store._take_last(entry)
            continue
        if store._hands_out_sums():
            take_sum(store, entry)
        elif not (entry.in_steps and store._updates_in_order()):
            store._follow(entry)
            skip([number])
            continue
        landed[store].append(number)
        if len(landed[store]) == sum(one.in_steps for one in store._keys.values()):
            numbers, landed[store] = sorted(landed[store]), []
            if store._hands_out_sums():
                update(store)
            else:
                for number in numbers:
                    store._follow(keys[number][1])
            skip(numbers)
