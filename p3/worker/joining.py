"""join(): a worker that has taken its last step serves the others' rounds until every worker has.

It takes part in each round of each key with a skip: a push without a gradient. The new value lands as in any other
round, and the key is skipped again. Once all workers skip a round of a key, it completes without a new value: no worker
will push that key any more. So nobody counts steps, and the servers know of no joined workers, only of skips.
"""

import mxnet as mx
from mxnet.base import MXNetError

from p3._core import Completions

_LOOK_UP_S = 0.5  # so often a script that waits here can be interrupted


def serve_others(stores, check, update):
    """Returns when every worker is here. `check` raises the job's failure; `update` is join's, called with a store.

    Of a store: _keys, _hands_out_sums(), _follow(entry). Nothing may be using the stores meanwhile.
    """
    for store in stores:
        if store._hands_out_sums() and update is None and any(entry.pushed for entry in store._keys.values()):
            raise MXNetError(
                "join: this store hands its sums to the script, which must apply those of the others' steps as well: "
                "call join(update=lambda store: trainer.update(batch_size))"
            )
    keys = [(store, entry) for store in stores for entry in store._keys.values()]
    landed = {store: [] for store in stores}  # the numbers of keys whose sums wait for the rest of their step
    completions = Completions()

    def skip(numbers):
        mx.nd.waitall()  # skips go past MXNet's engine
        for number in numbers:
            keys[number][1].skip(completions, number)

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
        store._follow(entry)
        if not store._hands_out_sums():
            skip([number])
            continue
        _require_pushed(entry)
        landed[store].append(number)
        if len(landed[store]) == sum(one.pushed for one in store._keys.values()):
            update(store)
            skip(landed[store])
            landed[store] = []


def _require_pushed(entry):
    if not entry.pushed:
        raise MXNetError(
            f"join: another worker has pushed key {entry.id!r}, which this worker never has, so its sum cannot be applied "
            "here. Take at least one step before join, or create the Trainer with update_on_kvstore=True"
        )
