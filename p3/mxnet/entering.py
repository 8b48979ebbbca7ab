"""Processes that join a running job of MXNet (p3/worker/entrance.py): what the first worker gives one, and what that
makes of it.

The values of keys come from the servers. Given is what a snapshot has beside them (store_snapshots.py), and how each
key has begun. Where the workers update, the servers have sums alone, and the weights are given, too.
"""

import weakref

from p3.mxnet import store_snapshots
from p3.snapshots import tree

_trainers = weakref.WeakKeyDictionary()  # by session: references to those that the script has told of


def tell_of(session, trainers):
    """The script's Trainers, whose part is given as well."""
    _trainers[session] = [weakref.ref(one) for one in trainers]


def members(stores, round, state):
    """P3KVStore.members() with a round, when MXNet's engine holds nothing back. `stores`: all that the script holds."""
    session = stores[0].session
    own = tree.checked({} if state is None else state, "state")
    for store in stores:
        store.take_new_values()
    if session.entrance.is_on_trial:
        _settle(session, stores)
    return session.entrance.agree(round, lambda: _given(session, stores, own))


# On the first worker


def _given(session, stores, state):
    trainers = [one for one in (reference() for reference in _trainers.get(session, ())) if one is not None]
    return {
        "state": state,
        "keys": {number: list(keys) for number, keys in enumerate(session.stores.keys_by_name) if keys},
        "stores": {store.number: {**store_snapshots.own_of_store(store), **_of_store(store)} for store in stores},
        "trainers": [{**store_snapshots.own_of_trainer(one), **_of_trainer(one)} for one in trainers],
    }


def _of_store(store):
    entries = store.keys.values()
    current = {entry.declared.identity for entry in entries}
    others = [key for key in store.session.keys.of(store.number) if not key.is_norm and key.identity not in current]
    return {
        "updates": _who_updates(store),
        "keys": {entry.id: _of_key(entry) for entry in entries},
        "former": [(key.name, key.shape, key.dtype, key.sparse, dict(key.options)) for key in others],
        "loaded": store.saved_states.own(),
    }


def _who_updates(store):
    """Whether the workers do; and by which optimizer, if by any."""
    optimizer = store.updates.optimizer
    return store.updates.here, None if optimizer is None else type(optimizer).__name__


def _of_key(entry):
    begun = {"name": entry.declared.name, "kind": type(entry).__name__, "shape": entry.shape}
    return {**begun, "pushed": entry.pushed, "in_steps": entry.in_steps}


def _of_trainer(trainer):
    """Of one without keys all weights: no server has them."""
    own = {"has_begun": trainer._kv_initialized, "by": type(trainer._optimizer).__name__}
    if not trainer._kv_initialized:
        own["arrays"] = {
            number: [array.copy() for array in parameter.list_data()]
            for number, parameter in enumerate(trainer._params)
            if parameter._data is not None and parameter._stype == "default"
        }
    return own


# In a process that has joined


def begin(session, stores, trainers):
    """In resume(): gives the optimizers, and the Trainers, each with its store, what the first worker's have."""
    for store in stores:
        store_snapshots.restore_optimizer(store)
    given = session.entrance.given["trainers"]
    if len(given) != len(trainers):
        _refuse(session, "gives %d Trainers to resume(), and that of the others %d" % (len(trainers), len(given)))
    for (trainer, store), own in zip(trainers, given):
        by, arrays, keys = type(trainer._optimizer).__name__, own["arrays"], _keys(store)
        if by != own["by"]:
            _refuse(session, "has a Trainer that updates by %s, and that of the others by %s" % (by, own["by"]))
        if own["has_begun"]:
            store_snapshots.give_keys(trainer, lambda number: keys[number]["shape"] if number in keys else None)
        else:
            store_snapshots.give_shapes(trainer, lambda number: arrays[number][0].shape if number in arrays else None)
        store_snapshots.restore_trainer(trainer, own)
        store_snapshots.know_sums(trainer, own)


def key_begun(store, id):
    """How the job's key has begun, as _of_key() tells; None: it had no such key when this process joined, or that has
    not joined."""
    return _keys(store).get(id)


def _keys(store):
    own = _own(store)
    return {} if own is None else own["keys"]


def _own(store):
    """What was given of this store."""
    return store_snapshots.saved(store) if store.session.entrance.barrier else None


def given_weight(store, id):
    """On trial: of a key by whose sums the workers update; else None."""
    own = _own(store) if store.session.entrance.is_on_trial else None
    return None if own is None else own["weights"].get(id)


def updates_here(store):
    """On trial: whether the job's workers update the weights of the store."""
    own = _own(store) if store.session.entrance.is_on_trial else None
    return own is not None and own["updates"][0]


def _settle(session, stores):
    """At the first members(): ValueError if the script is another one; else all stores are as those of the others."""
    for number, ids in session.entrance.given["keys"].items():
        lacking = [id for id in ids if id not in session.stores.keys_by_name[number]]
        if lacking:
            what = "has no key %r in store %d at its first members(), as the others have: make all stores that they "
            what += "have made, and give the Trainers to resume(trainer=)"
            _refuse(session, what % (lacking[0], number))
    for store in stores:
        own = _own(store)
        if own is None:
            continue
        if own["updates"] != _who_updates(store):
            wanted, mine = (_updating(*one) for one in (own["updates"], _who_updates(store)))
            _refuse(session, "has a store %d with %s, and that of the others %s" % (store.number, mine, wanted))
        for name, shape, dtype, is_sparse, options in own["former"]:
            session.declare(name, shape, dtype, store.number, is_sparse, options=options)
        for id, begun in own["keys"].items():
            entry = store.keys[id]
            entry.pushed = begun["pushed"]
            if not store.updates.hands_out_sums:  # else a Trainer has said so, or nobody knows where its sums go
                entry.in_steps = begun["in_steps"]
        store.saved_states.take(own["loaded"])
        own["weights"].clear()  # they are in place, and large
    for own in session.entrance.given["trainers"]:
        own["arrays"].clear()


def _updating(here, optimizer):
    if optimizer is None:
        return "an updater of the script's" if here else "no optimizer"
    return "%s on the %s" % (optimizer, "workers" if here else "servers")


def _refuse(session, what):
    raise ValueError("%s: this process has joined a running job, and its script %s" % (session.label, what))
