"""losing_updating_servers.py STEPS: workers of NumPy whose stores have optimizers, whose servers die, and who go on.

Two stores, of SGD with momentum and of Adam, with keys of float32, whose gradient and value may share one array, of
float16 with a master, and of float32 that leave as int8 and come back as bf16. The last worker has no gradient in two
of the steps, and follows by what the others push. Between two steps one key gets another value, and another state.
Takes snapshots where the job does, and goes on from one.

Each worker prints a digest of all values of all steps, and of the states in the end; and worker 0 one of the keys that
travel as they are, which are the same whoever updates. Who dies, and when: struck.py.
"""

import hashlib
import sys

import numpy as np
import struck

import p3
from p3._core import DTYPES, MASTER, state_parts
from p3.frontend import states

ELEMENTS = 90_000
SGD = {"name": "sgd", "momentum": 0.9, "clip_gradient": -1.0, "multi_precision": True}
ADAM = {"name": "adam", "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "clip_gradient": 0.5, "multi_precision": True}
BOTH_WAYS = {"compression": {"type": "int8"}, "value_compression": {"type": "bf16"}}
PLAIN = ("float32", {})
KINDS = {"plain": PLAIN, "in place": PLAIN, "half": ("float16", {}), "coded": ("float32", BOTH_WAYS)}


def main():
    steps = int(sys.argv[1])
    with p3.Session.open() as session:
        resumed = session.resume()
        keys, values = [], []
        for optimizer in (SGD, ADAM):
            store = session.new_store()
            session.set_optimizer(store, optimizer)
            for name, (dtype, options) in KINDS.items():
                keys.append(session.declare(name, (ELEMENTS,), dtype, store, options=options))
                values.append(np.zeros(ELEMENTS, dtype))
                begin(session, keys[-1], values[-1])
        marks = struck.key_of_marks(session)
        struck.begin(session)
        digests = resumed.state or {"all": np.zeros(32, np.uint8), "plain": np.zeros(32, np.uint8)}
        for step in range(resumed.round, steps):
            if struck.MARKS and step % struck.MARKS == 0:
                struck.until_all_are_back(session, marks, step)
            if step == 4:
                give_another(session, keys[0], values[0])
            session.wait([one_round(session, key, value, step) for key, value in zip(keys, values)])
            digests = digested(digests, zip(keys, values))
            session.snapshot(step + 1, keys, digests)
        if struck.MARKS:
            struck.until_all_are_back(session, marks, steps)
        for key in keys:
            digests = digested(digests, [(key, array) for array in states_of(session, key).values()])
        print("worker %d: %s" % (session.rank, bytes(digests["all"]).hex()), flush=True)
        if session.is_first:
            print("of plain keys: %s" % bytes(digests["plain"]).hex(), flush=True)
        session.barrier()


def begin(session, key, value):
    first = session.resumed_value(key)
    if first is None and session.is_first:
        seed = 10 * key.store + list(KINDS).index(key.name)
        first = np.random.RandomState(seed).uniform(-1, 1, ELEMENTS).astype(key.dtype)
    session.init(key, first, value).wait(60)
    session.restore(key)


def one_round(session, key, value, step):
    if session.rank == session.num_workers - 1 and step in (2, 7):
        return session.skip(key, value, goes_on=step == 2)
    random = np.random.RandomState(1000 * step + 10 * key.store + session.rank)
    gradient = random.uniform(-1, 1, ELEMENTS).astype(key.dtype)
    if key.name == "in place":
        value[:] = gradient  # the next value lands there
        gradient = value
    numbers = dict(lr=0.1 / (step + 1), wd=0.01, rescale=1 / session.num_workers, updates=step + 1.0)
    return session.pushpull(key, gradient, value, priority=-len(key.name), **numbers)


def give_another(session, key, value):
    session.barrier()  # as somebody may lack what the round before made of it
    session.init(key, np.ones_like(value) if session.is_first else None, value).wait(60)
    for _ in states.between_barriers(session, "give_another()"):
        if states.has_a_say(session, key):
            states.give(session, [(key, 1, np.full(ELEMENTS, 0.25, np.float32), 0)])


def states_of(session, key):
    dtype = "float32" if key.dtype == "float16" else key.dtype
    parts = [part for part in state_parts(session.option(key.store, "optimizer"), DTYPES[key.dtype]) if part > 0]
    arrays = {part: np.empty(ELEMENTS, dtype) for part in parts}
    states.fetch(session, [(key, part, array) for part, array in arrays.items()])
    assert (MASTER in arrays) == (key.dtype == "float16")
    return arrays


def digested(digests, arrays):
    """`digests`, with these arrays of keys."""
    made = {name: hashlib.sha256(bytes(digest)) for name, digest in digests.items()}
    for key, array in arrays:
        made["all"].update(array.tobytes())
        if KINDS[key.name] == PLAIN:
            made["plain"].update(array.tobytes())
    return {name: np.frombuffer(digest.digest(), np.uint8) for name, digest in made.items()}


if __name__ == "__main__":
    main()
