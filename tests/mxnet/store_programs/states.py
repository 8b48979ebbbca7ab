"""Optimizers of programs, and the files of their states."""

import pickle

import mxnet as mx
import numpy as np
from optimizer_cases import runnable

ON_WORKERS = ("lamb",)
NOT_IN_DESCRIPTIONS = ("learning_rate", "wd", "lazy_update", "halved_every")  # free to change: docs of set_optimizer


def make_optimizer(spec, **more):
    """With float32 master copies: without, MXNet updates float16 weights in float16, and servers in float32."""
    settings = {name: value for name, value in spec.items() if name not in ("name", "halved_every")}
    if "halved_every" in spec:
        rate = settings["learning_rate"]
        more["lr_scheduler"] = mx.lr_scheduler.FactorScheduler(spec["halved_every"], 0.5, base_lr=rate)
    return mx.optimizer.create(spec["name"], multi_precision=True, **settings, **more)


def updates_rows_alone(spec):
    return spec["name"] == "adagrad" or bool(spec.get("lazy_update"))


def kind_of(spec):
    """Equal for those that a store's servers cannot tell apart."""
    return {name: value for name, value in spec.items() if name not in NOT_IN_DESCRIPTIONS}


class Saved:
    """A file that P3 has written, and what the reference has in its place."""

    def __init__(self, path, kind, states, optimizer):
        self.path = str(path)
        self.kind = kind  # of optimizer
        self.states = states  # {position of key or name: state}
        self.optimizer = optimizer  # pickled; None if the file has none


def load_refusal(saved, optimizer, on_servers, keys, made, has_rows):
    """Why P3 must not load what was `saved` (None: nothing was) into a store whose optimizer is of that spec, and
    `made`. `keys`: {name: spec}. `has_rows`: the servers have updated rows alone."""
    if saved is None:
        return "missing file"
    if saved.optimizer is not None:
        same = kind_of(saved.kind) == kind_of(optimizer)
        if not (same if on_servers else saved.kind["name"] == optimizer["name"]):
            return "other kind"
        if has_rows and not updates_rows_alone(saved.kind):
            return "all rows"
    if saved.states.keys() - keys.keys():
        return "other model"
    for name, state in saved.states.items():
        weight = mx.nd.zeros(tuple(keys[name]["shape"]), dtype=keys[name]["dtype"])
        own = runnable(made, weight, made.create_state_multi_precision(name, weight))
        if _shapes(own) != _shapes(state):
            return "other state"
    return None


def compare_files(saved):
    """(name, got, expected) of the states in a file as MXNet's own updater loads them, and of the optimizer."""
    probe = mx.optimizer.get_updater(mx.optimizer.SGD())
    with open(saved.path, "rb") as file:
        probe.set_states(file.read())
    got = probe.states
    yield "keys in the file", _as_text(got), _as_text(saved.states)
    for key in sorted(got.keys() & saved.states.keys(), key=repr):
        mine, others = _leaves(got[key]), _leaves(saved.states[key])
        yield "number of states of %r" % (key,), np.array(len(mine)), np.array(len(others))
        for number, (one, other) in enumerate(zip(mine, others)):
            yield "state %d of %r" % (number, key), one.asnumpy(), other.asnumpy()
    if saved.optimizer is not None:
        mine, other = probe.optimizer, pickle.loads(saved.optimizer)
        counts = [_as_text(one._index_update_count.items()) for one in (mine, other)]
        yield "counts in the file", *counts
        yield "numbers in the file", np.array(_numbers(mine)), np.array(_numbers(other))


def _as_text(keys):
    return np.array(str(sorted(keys, key=repr)))


def _numbers(optimizer):
    return [optimizer.num_update, optimizer.learning_rate, optimizer.wd, getattr(optimizer, "m_schedule", 1.0)]


def tune(optimizer, operation, key):
    field, value = operation["field"], operation["value"]
    if field == "lr":
        if optimizer.lr_scheduler is not None:
            optimizer.lr_scheduler.base_lr = value
        else:
            optimizer.set_learning_rate(value)
    elif field in ("lr_mult", "wd_mult"):
        getattr(optimizer, "set_" + field)({key: value})
    elif field == "rescale_grad" or not isinstance(optimizer, mx.optimizer.AdaGrad):  # no decay of rows in MXNet's
        setattr(optimizer, field, value)


def _leaves(state):
    if isinstance(state, (tuple, list)):
        return [leaf for part in state for leaf in _leaves(part)]
    return [] if state is None else [state]


def _shapes(state):
    if isinstance(state, (tuple, list)):
        return [_shapes(part) for part in state]
    return None if state is None else (state.shape, str(np.dtype(state.dtype)))
