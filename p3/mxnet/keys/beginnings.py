"""How a store's keys begin: the kind that suits each, and what a snapshot or the job has of it already.

The kind is known at init if the value is row_sparse, or if the Parameter's gradient is; else at the first push, before
which a key may be declared anew, as another kind. Every worker does so.
"""

import logging

from mxnet.base import MXNetError

from p3.mxnet import entering, store_snapshots
from p3.mxnet.arguments import checked, is_sparse
from p3.mxnet.clipping import StoreNorm
from p3.mxnet.keys.dense import DenseKey
from p3.mxnet.keys.factored import FactoredKey
from p3.mxnet.keys.rows import RowKey, ServerRowKey
from p3.mxnet.optimizers.descriptions import updates_rows_alone
from p3.plan import choices, combinations

log = logging.getLogger("p3")

_KINDS = {kind.__name__: kind for kind in (DenseKey, RowKey, ServerRowKey)}


def init(store, key, values, outs=()):
    """The store's key of that id, with rank 0's first value under way; `values` and `outs` are the call's."""
    if len(values) > 1:
        raise MXNetError(f"key {key!r} takes one first value, not {len(values)}")
    value = checked(values[0], key)
    entry = store.keys.get(key)
    if entry is not None:
        entry.require_shape(value, "initialised again with", and_type=True)
        if key not in store.outdated:
            return entry
        store.outdated.remove(key)
    else:
        arrays = (*values, *outs)
        kind, name = _first_kind(store, key, value, store.priorities.parameter_of(key, arrays))
        entry = _declare(store, kind, key, name, value.shape, value.dtype, is_sparse(value))
        store.priorities.add(entry, arrays)
        resumed = store_snapshots.first_value(store, entry, arrays)
        if resumed is not None:
            value = resumed
    _give_first_value(store, entry, value)
    store.saved_states.note_value(entry)
    return entry


def before_first_push(store, entry, gradients):
    """The key, or the one that takes its place now that the storage of its gradients and the optimizer are known."""
    store.session.entrance.require_no_push("a gradient of key %r" % (entry.id,))
    entry = _factored(store, entry, gradients) or _settled(store, entry, is_sparse(gradients[0]))
    store_snapshots.restore(store, entry)
    return entry


def _first_kind(store, key, value, parameter):
    """Of a new key, and what the job calls it."""
    begun = entering.key_begun(store, key)
    if begun is not None:
        return _KINDS[begun["kind"]], begun["name"]
    sparse_weight = is_sparse(value)
    sparse_gradient = getattr(parameter, "_grad_stype", "default") == "row_sparse"
    return _suitable_kind(store, sparse_weight, sparse_gradient, value.dtype), key


def _suitable_kind(store, sparse_weight, sparse_gradient, dtype):
    """Which kind of key suits the arrays and, as far as it is known, the optimizer."""
    if not sparse_weight and not sparse_gradient:
        return DenseKey
    if store.updates.optimizer is not None and not updates_rows_alone(store.updates.optimizer, dtype):
        return DenseKey
    return ServerRowKey if sparse_weight and not store.updates.here else RowKey


def _settled(store, entry, sparse_gradient):
    """`entry`; or if another kind suits it, the key declared anew as that, with the value that it has."""
    kind = _suitable_kind(store, entry.sparse_weight, sparse_gradient, entry.dtype)
    if kind is ServerRowKey and not store.updates.on_servers:
        kind = RowKey  # sums go to the workers
    if type(entry) is kind or (kind is DenseKey and not sparse_gradient):
        return entry
    if store.norm is not None:  # of which the key that is there is a part by now
        if entry.sparse_weight:
            raise MXNetError(
                f"key {entry.id!r} has a row_sparse weight, which the servers update, and with set_clipping() the "
                "Trainer updates: use a dense weight; its gradient may be row_sparse (Embedding(sparse_grad=True))"
            )
        raise MXNetError(
            f"key {entry.id!r} was declared for a dense gradient, and its gradient is row_sparse: with set_clipping() "
            "that must be known at init, as it is of the Parameters of a gluon.Trainer"
        )
    name, shape, dtype = _name_as(kind, entry.id), entry.shape, entry.dtype
    settled = _declare(store, kind, entry.id, name, shape, dtype, entry.sparse_weight, entry.landing)
    store.priorities.replace(entry, settled)
    _give_first_value(store, settled, entry.value(entry.priority) if store.session.is_first else None)
    settled.outs = entry.outs
    store.saved_states.give_loaded(entry.id)
    return settled


def _factored(store, entry, gradients):
    """The key of the weight's factors, if that is what its gradient arrays hold."""
    layer = getattr(entry.parameter or store.priorities.parameter_of(entry.id, gradients), "_p3_layer", None)
    strategy = store.session.strategy(store.number)
    if layer is None:
        strategy.require_no_factors(entry.id)
    if layer is None or layer.shape is None:
        return None
    layer.follow(strategy, entry.id)
    of_key = choices.of_staleness(entry.declared.staleness)
    combinations.require(f"{store.session.label}: key {entry.id!r}", of_key, choices.FACTORS)
    if layer.has_factors and store.norm is not None:
        combinations.require(f"{store.session.label}: key {entry.id!r}", choices.CLIPPING, choices.FACTORS)
    declared = layer.declare(entry.declared)
    if not layer.has_factors:
        return None
    factored = FactoredKey(store.engine, declared, entry, layer)
    store.priorities.replace(entry, factored)
    store.note(factored)
    store.saved_states.give_loaded(entry.id)
    store.after_operation()
    return factored


def _name_as(kind, key):
    """Of a key that was declared anew, as another kind; 3 and "3" are two keys."""
    is_digits = isinstance(key, str) and key.lstrip("-").isdecimal()
    return f"{key!r} ({kind.route})" if is_digits else f"{key} ({kind.route})"


def _declare(store, kind, key, name, shape, dtype, sparse_weight, landing=None):
    if store.clips and store.norm is None:
        store.norm = StoreNorm(store.session, store.engine, store.number)
    if store.norm is not None and store.norm.has_begun:
        raise MXNetError(
            f"key {key!r} comes after the first step, whose norm the servers have told: with set_clipping() all keys "
            "are initialised before. Run a forward pass of the whole net before the Trainer's first step"
        )
    strategy = store.session.strategy(store.number)
    rounds = store.staleness.of(key)
    if not store.keys and store.session.is_first and store.staleness:
        log.warning(store.staleness.describe())
    ways = strategy.ways(key, store.compression)
    where = f"{store.session.label}: key {key!r}{strategy.said_of(key)}"
    combinations.require(where, choices.of_compression(ways.up), choices.MXNET)
    own = None if ways == store.compression else ways.of_key
    declared = store.session.declare(name, shape, dtype, store.number, kind is not DenseKey, rounds, own)
    entry = kind(store.engine, key, declared, sparse_weight, landing)
    store.note(entry)
    return entry


def _give_first_value(store, entry, value):
    if store.session.entrance.is_on_trial:
        store.session.entrance.note_init(entry.declared)
        if entering.given_weight(store, entry.id) is not None:
            store.session.entrance.skip_value(entry.declared)
    entry.priority = store.priorities.at_init(entry)
    entry.init(value if store.session.is_first else None, entry.priority)
    if store.updates.here or entering.given_weight(store, entry.id) is not None:
        keep_weight(store, entry)
    store.after_operation()


def keep_weight(store, entry):
    """From now on the workers update it: what has landed; or what was given, where they have done so before."""
    entry.keep_weight()
    given = entering.given_weight(store, entry.id)
    if given is not None:
        entry.weight = given.copy()
