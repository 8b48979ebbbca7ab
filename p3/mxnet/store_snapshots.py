"""Snapshots of MXNet stores: what a worker itself knows of its stores and Trainers, and how it comes back.

The servers' copies are the values of all keys, and the optimizer's arrays where the servers update. What is left, a
worker writes into its own part: the numbers of its optimizers (rounds counted, learning rate, ...), what compression
has left out so far, and where the workers update, weights and states. Arrays are copied by MXNet's engine, behind what
it has yet to write to them.

A key takes its value back at its first init (first_value), and the rest before its first push (restore); an optimizer,
when the store gets it (restore_optimizer). A process that joins a running job takes the same from the first worker
(entering.py).
"""

import copy

import mxnet as mx
import numpy as np
from mxnet.base import MXNetError

from p3._core import LEFT_OUT, MASTER, Completions
from p3.frontend import waiting
from p3.snapshots import tree


def to_mxnet(array, stype="default"):
    with mx.util.np_shape(True):  # or MXNet takes a length of 0, and the empty shape, for "not known yet"
        made = mx.nd.array(array, dtype=array.dtype)
    return made if stype == "default" else made.tostype(stype)


tree.register(
    "mxnet",
    tree.ArrayKind(
        mx.nd.NDArray,
        lambda array: array.stype,
        lambda array: array.asnumpy(),
        to_mxnet,
        lambda array: array.copy(),  # by MXNet's engine
    ),
)


def take(stores, round, state, trainers):
    """Of all stores of this process, in their order."""
    session = stores[0].session
    is_due = session.snapshots.due(round)
    if not is_due:
        return
    state = tree.checked({} if state is None else state, "state")
    session.snapshots.wait_for_last(round)
    for store in stores:
        store.take_new_values()
    entries = [(store, entry) for store in stores for entry in store.keys.values()]
    for store, entry in entries:
        restore(store, entry)  # or one without a round since the last snapshot would lose what that had of it
    completions = Completions()
    residuals = [
        entry.operations.capture(round, entry.priority, completions, number)
        for number, (_, entry) in enumerate(entries)
    ]
    own = {
        "state": state,
        "stores": {store.number: own_of_store(store) for store in stores},
        "trainers": [own_of_trainer(trainer) for trainer in trainers],
    }
    for (store, entry), residual in zip(entries, residuals):
        if residual is not None:
            own["stores"][store.number]["residuals"][entry.id] = np.frombuffer(residual, "float32")

    operations = []
    for _, entry in entries:
        if session.updates_here(entry.declared):
            entry.wait()  # as its rounds go through MXNet's engine, and copies do not
    replicas = session.snapshots.copy_replicas([entry.declared for _, entry in entries], operations)

    def copied():
        _wait(session, completions, len(entries))
        session.wait(operations)

    def describe():
        return [session.keys.describe(entry.declared, entry.id) for _, entry in entries]

    session.snapshots.write(round, describe, copied, own, replicas)


def _wait(session, completions, count):
    for _ in range(count):
        if waiting.next_of(session, completions, session.wait_timeout_s) is None:
            raise TimeoutError("%s: waited %g s for the copies of a snapshot" % (session.label, session.wait_timeout_s))


def own_of_store(store):
    """What the servers do not have."""
    own = {"residuals": {}, "weights": {}, "states": None, "optimizer": _numbers(store.updates.optimizer)}
    if store.updates.here:
        own["states"] = _states(store.updates.updater)
        own["in_steps"] = [entry.id for entry in store.keys.values() if entry.in_steps]
        # The first one's init tells the others; where a job resumes that is who gets the part of the lowest rank.
        if store.session.is_first or store.session.rank == min(store.session.members):
            weights = {entry.id: entry.weight for entry in store.keys.values() if entry.weight is not None}
            own["weights"] = {id: weight.copy() for id, weight in weights.items()}
    return own


def own_of_trainer(trainer):
    """Weights and optimizer where this Trainer updates; everywhere what no gradient changes: running statistics."""
    updates = trainer._kv_initialized and not trainer._update_on_kvstore
    own = {"arrays": {}, "states": [], "optimizer": None, "scale": trainer._scale}
    own["loss_scaler"] = _plain(getattr(trainer, "_amp_loss_scaler", None))
    for number, parameter in enumerate(trainer._params):
        if parameter._data is not None and parameter._stype == "default" and (updates or parameter.grad_req == "null"):
            own["arrays"][number] = [array.copy() for array in parameter.list_data()]
    if updates:
        own["optimizer"] = _numbers(trainer._optimizer)
        own["states"] = [_states(updater) for updater in trainer._updaters]
    return own


def restore_trainers(session, trainers):
    """Gives each Trainer its keys, and with them the snapshot's weights, and what it had itself. `trainers`: each
    with its store."""
    saved = session.saved.own["trainers"]
    if len(saved) != len(trainers):
        raise ValueError(
            "resume: %d Trainers are given, but the snapshot was taken with %d; give both the same, in one order"
            % (len(trainers), len(saved))
        )
    source = session.saved.source
    for (trainer, store), own in zip(trainers, saved):
        give_keys(trainer, lambda number, store=store: (source.key(store.number, number) or {}).get("shape"))
        restore_trainer(trainer, own)
        know_sums(trainer, own)


def restore_trainer(trainer, own):
    """What own_of_trainer() gave. Devices that there were none of then get what the first one had."""
    devices = trainer._contexts

    def of_each(saved):
        return zip(devices, saved + [copy.deepcopy(one) for one in saved[:1] for _ in devices[len(saved) :]])

    for number, arrays in own["arrays"].items():
        for device, value in of_each(arrays):
            value.copyto(trainer._params[number].data(device))
    for updater, (_, states) in zip(trainer._updaters, of_each(own["states"])):
        _restore_states(updater, states)
    _restore_numbers(trainer._optimizer, own["optimizer"], devices)
    trainer._scale = own["scale"]
    _restore_plain(getattr(trainer, "_amp_loss_scaler", None), own["loss_scaler"])


def know_sums(trainer, own):
    """If it updates: where the sums of its steps go, for a worker that calls join() before its first one."""
    for number, parameter in enumerate(trainer._params):
        if own["states"] and parameter.grad_req != "null":
            entry = trainer._kvstore.store.keys[number]
            entry.in_steps, entry.outs, entry.parameter = True, parameter.list_grad(), parameter


def give_shapes(trainer, shape_of):
    """`shape_of(number)`: of a parameter, which the first batch would have told; None: nobody knows."""
    for number, parameter in enumerate(trainer._params):
        shape = shape_of(number)
        if parameter._deferred_init and shape is not None:
            parameter.shape = tuple(shape)
            parameter._finish_deferred_init()


def give_keys(trainer, shape_of):
    give_shapes(trainer, shape_of)
    if not trainer._kv_initialized:
        trainer._init_kvstore()
    trainer._init_params()


def restore_optimizer(store):
    """When the store has got its updater: the optimizer's numbers, and where it updates here, the states. One that the
    script sets behind the first push takes the place of that optimizer, and has its own."""
    if store.pushed_keys():
        return
    own = saved(store)
    if own is not None:
        _restore_numbers(store.updates.optimizer, own["optimizer"])
        if store.updates.here:
            _restore_states(store.updates.updater, own["states"])


def first_value(store, entry, arrays):
    """What the snapshot has as the first value of a new key; None if it has none.

    `arrays`: the script's own of this key, which must be given the value before anything is computed with them.
    """
    session, own = store.session, saved(store)
    if session.entrance.barrier:
        is_known = own is not None and entry.id in own["keys"]
    else:
        is_known = own is not None and session.saved.source.key(store.number, entry.id) is not None
    if is_known and any(array._fresh_grad for array in arrays):
        raise MXNetError(
            f"key {entry.id!r}: its first gradient was computed before the job's weights were there. Give the "
            "Trainer to resume, before the first step: kv.resume(trainer=trainer)"
        )
    if session.entrance.barrier:
        return None  # the servers have it
    store.resuming[entry.id] = True
    if not is_known:
        return None
    if entry.id in own["weights"]:
        return own["weights"][entry.id]
    value = session.resumed_value(entry.declared, entry.id)
    return None if value is None else to_mxnet(value)


def restore(store, entry):
    """Before this worker's first round of a key, once: the optimizer's state on the servers, and what compression has
    left out here."""
    session, own = store.session, saved(store)
    takes_states = store.resuming.pop(entry.id, None)
    if takes_states is None or own is None:
        return
    if store.updates.here and entry.id in own.get("in_steps", ()):
        entry.in_steps = True  # as of a push, for a worker that calls join() before its first one
    states = session.saved.states(entry.declared, entry.id, session.option(store.number, "optimizer"))
    if not takes_states:
        states = {part: content for part, content in states.items() if _is_of_compression(entry, part)}
    if states:
        entry.wait()
        session.wait([session.store(entry.declared, content, part) for part, content in states.items()])
    session.saved.restore_residual(entry.declared, lambda part: part["stores"][store.number]["residuals"].get(entry.id))


def states_to_come(store, entry):
    """The optimizer's that restore() will give the servers, by their part, on any worker."""
    if not store.resuming.get(entry.id) or saved(store) is None:
        return {}
    optimizer = store.session.option(store.number, "optimizer")
    states = store.session.saved.states_to_come(entry.declared, entry.id, optimizer)
    return {part: content for part, content in states.items() if not _is_of_compression(entry, part)}


def _is_of_compression(entry, part):
    """Of what the servers keep beside a value: not the optimizer's."""
    return part == LEFT_OUT or (part == MASTER and entry.declared.dtype == "float32")


def saved(store):
    """What own_of_store() gave: for the snapshot, or to a process that has joined a running job; None: nothing."""
    entrance = store.session.entrance
    whole = entrance.given if entrance.barrier else store.session.saved.own
    return None if whole is None else whole["stores"].get(store.number)


def _states(updater):
    return _checked(getattr(updater, "states", None))


def _checked(state):
    return tree.checked(state, "the optimizer's state")


def _restore_states(updater, states):
    if states is not None and hasattr(updater, "states"):
        updater.states = states
        updater.states_synced = dict.fromkeys(states, False)  # MXNet brings them to their devices


def _numbers(optimizer):
    """Every plain number of the optimizer and its scheduler, how often each device has updated each key, and what LBSGD
    has added up for its next update."""
    if optimizer is None:
        return None
    counts = optimizer._all_index_update_counts
    cumulated = {"cumulated": _checked(optimizer.cumgrads)} if hasattr(optimizer, "cumgrads") else {}
    return {
        **cumulated,
        "plain": _plain(optimizer),
        "scheduler": _plain(optimizer.lr_scheduler),
        "counts": {device: dict(updates) for device, updates in counts.items()},
        "device": next(device for device, updates in counts.items() if updates is optimizer._index_update_count),
    }


def _restore_numbers(optimizer, numbers, devices=()):
    """`devices`: those that update, if it is not the CPU alone."""
    if optimizer is None or numbers is None:
        return
    _restore_plain(optimizer, numbers["plain"])
    _restore_plain(optimizer.lr_scheduler, numbers["scheduler"])
    counts = {device: dict(updates) for device, updates in numbers["counts"].items()}
    for device in devices:
        counts.setdefault(device.device_id, dict(counts[numbers["device"]]))
    optimizer._all_index_update_counts, optimizer._index_update_count = counts, counts[numbers["device"]]
    if "cumulated" in numbers:
        optimizer.cumgrads = numbers["cumulated"]
        for one in optimizer.cumgrads.values():
            if devices and isinstance(one["cum_grad"], mx.nd.NDArray):
                one["cum_grad"] = one["cum_grad"].as_in_context(devices[0])


def _plain(thing):
    """NumPy's numbers, too, as a script's learning rate may be one."""
    values = {name: value.item() if isinstance(value, np.generic) else value
              for name, value in getattr(thing, "__dict__", {}).items()}  # fmt: skip
    return {name: value for name, value in values.items() if type(value) in (bool, int, float)}


def _restore_plain(thing, numbers):
    for name, value in numbers.items():
        if name in getattr(thing, "__dict__", {}) and type(value) in (bool, int, float):
            setattr(thing, name, value)
