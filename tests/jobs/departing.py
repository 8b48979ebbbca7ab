"""departing.py STEPS SEED: workers of NumPy of whom some die, each at a step of its own, and the others go
on. With P3_ON_WORKER_LOSS=continue.

Each worker pushes 1 << rank to a key that sums, so that the sum tells who took part; gradients that depend on rank and
step to one that servers update by the mean; and rows. Takes snapshots and resumes where the job does. Prints of each
step who took part, and at the end a digest of all weights, which it leaves in P3S_OUT. P3S_DEATHS, "RANK:STEP[.KEY]"
separated by commas: who dies in which step, before the push of which key. P3S_DEATH: how; "frozen" for ever, or killed,
and its "child" lives on; by default killed.
"""

import hashlib
import os
import signal
import subprocess
import sys

import numpy as np

import p3

SGD = {"name": "sgd", "momentum": 0.9, "clip_gradient": -1.0, "multi_precision": False}
ELEMENTS, ROWS = 120_000, 40  # three slices


def deaths(rank):
    for death in filter(None, os.environ.get("P3S_DEATHS", "").split(",")):
        who, _, when = death.partition(":")
        if int(who) == rank:
            step, _, key = when.partition(".")
            return int(step), int(key or 0)
    return -1, 0


def die():
    how = os.environ.get("P3S_DEATH")
    if how == "child":
        subprocess.Popen(["sleep", "60"])  # has the output of this process
    os.kill(os.getpid(), signal.SIGSTOP if how == "frozen" else signal.SIGKILL)


def declared(session, bits, weights):
    """The keys of these stores, by name, each with its landing array."""
    return {
        "bits": (session.declare("bits", (ELEMENTS,), "int64", bits), np.zeros(ELEMENTS, np.int64)),
        "weight": (session.declare("weight", (ELEMENTS,), "float32", weights), np.zeros(ELEMENTS, np.float32)),
        "rows": (session.declare("rows", (ROWS, 3), "float32", weights, sparse=True), np.zeros((ROWS, 3), np.float32)),
    }


def step_of(session, keys, step, gradient, ids, rows, lr, dies_before=None):
    """One of all keys; it dies before the push of that one. Prints who took part."""
    operations = []
    for number, (name, (key, landing)) in enumerate(keys.items()):
        if number == dies_before:
            die()
        if name == "bits":
            operations.append(session.pushpull(key, np.full(ELEMENTS, 1 << session.rank, np.int64), landing))
        else:
            operations.append(session.pushpull(key, gradient if name == "weight" else (ids, rows), landing, lr=lr))
    session.wait(operations)
    took_part = sorted(set(keys["bits"][1].tolist()))
    print("worker %d step %d: %s" % (session.rank, step, " ".join(map(str, took_part))), flush=True)


def main():
    steps, seed = int(sys.argv[1]), int(sys.argv[2])
    with p3.Session.open() as session:
        dies_at, dies_before = deaths(session.rank)
        resumed = session.resume()
        bits, weights = session.new_store(), session.new_store()
        session.set_option(weights, "reduction", {"type": "mean"})
        session.set_optimizer(weights, SGD)
        keys = declared(session, bits, weights)
        for key, value in keys.values():
            first = session.resumed_value(key)
            if first is None and session.is_first:
                first = value.copy()
            session.init(key, first, value).wait(60)
            session.restore(key)
        random = np.random.RandomState(1000 * seed + session.rank)
        for step in range(resumed.round, steps):
            gradient = random.uniform(-1, 1, ELEMENTS).astype(np.float32)
            ids = np.unique(random.randint(0, ROWS, 5))
            rows = random.uniform(-1, 1, (len(ids), 3)).astype(np.float32)
            step_of(session, keys, step, gradient, ids, rows, 0.1, dies_before if step == dies_at else None)
            if step % 5 == 4:
                members = session.agree_on_members()
                print("worker %d at %d knows %s" % (session.rank, step, " ".join(map(str, members))), flush=True)
            session.snapshot(step + 1, [key for key, _ in keys.values()], {"step": step})
        late = session.declare("late", (5,), "float32", weights)
        value = np.zeros(5, np.float32)
        session.init(late, np.ones(5, np.float32) if session.is_first else None, value).wait(60)
        session.pushpull(late, np.ones(5, np.float32), value, lr=0.5).wait(60)
        rows = np.zeros((ROWS, 3), np.float32)
        session.fetch(keys["rows"][0], rows).wait(60)
        digest = hashlib.sha256()
        for array in (keys["weight"][1], rows, value):
            digest.update(array.tobytes())
        print("worker %d: %s" % (session.rank, digest.hexdigest()), flush=True)
        if os.environ.get("P3S_OUT"):
            np.savez(os.path.join(os.environ["P3S_OUT"], str(session.rank)), weight=keys["weight"][1], rows=rows)


if __name__ == "__main__":
    main()
