"""join(): a worker that has taken its last step serves the others' rounds until every worker has.

It takes part in each round of each key with a skip: a push without a gradient. The new value lands as in any other
round, and the key is skipped again. Once all workers skip a round of a key, it completes without a new value: no worker
will push that key any more. So nobody counts steps, and the servers know of no joined workers, only of skips.

All workers must serve the same keys, or they would wait for each other: those of every store that this process has
made. Which of them a script still holds, and when Python takes the others away, is each worker's own affair.
"""

import mxnet as mx
from mxnet.base import MXNetError

from p3._core import Completions
from p3.mxnet.keys import DenseKey
from p3.mxnet.row_keys import ServerRowKey

NEEDS_UPDATE = (
    "join: this store hands its sums to the script, which must apply those of the others' steps as well: call "
    "join(update=lambda store: trainer.update(batch_size))"
)
_LOOK_UP_S = 0.5  # so often a script that waits here can be interrupted


class DroppedStore:
    """Stands for a store that this worker's script has dropped. What others may still push lands and is forgotten."""

    def __init__(self, engine, keys):
        """`keys`: the store's, of Session.keys_of_stores. Memory that nothing lands in stays untouched."""
        self._keys = {id: (ServerRowKey if key.sparse else DenseKey)(engine, id, key) for id, key in keys.items()}

    def _hands_out_sums(self):
        return False

    def _follow(self, entry):
        pass


def serve_others(session, stores, check, update):
    """Returns when every worker is here. `check` raises the job's failure; `update` is join's, called with a store.

    `stores`: all that were made, also those that the script has dropped. Of a store: _keys, _hands_out_sums(),
    _follow(entry). Nothing may be using the stores meanwhile.
    """
    keys = [(store, entry) for store in stores for entry in store._keys.values()]
    landed = {store: [] for store in stores}  # the numbers of keys whose sums wait for the rest of their step
    completions = Completions()

    def skip(numbers):
        mx.nd.waitall()  # skips go past MXNet's engine
        for number in numbers:
            entry = keys[number][1]
            session.progress.skip(entry.declared)
            entry.operations.skip(entry.priority, completions, number)

    skip(range(len(keys)))
    still_pushed = len(keys)
    while still_pushed:
        completed = completions.next(_LOOK_UP_S)
        check()
        if completed is None:
            continue
        number, updated = completed
        if not updated:
            still_pushed -= 1
            continue
        store, entry = keys[number]
        if not store._hands_out_sums():
            store._follow(entry)
            skip([number])
            continue
        if update is None:
            raise MXNetError(NEEDS_UPDATE)
        if not entry.in_steps:
            raise MXNetError(
                f"join: another worker has pushed key {entry.id!r}, which this worker never has, so its sum cannot be "
                "applied here. Take at least one step before join, or create the Trainer with update_on_kvstore=True"
            )
        store._follow(entry)
        landed[store].append(number)
        if len(landed[store]) == sum(one.in_steps for one in store._keys.values()):
            update(store)
            skip(landed[store])
            landed[store] = []
