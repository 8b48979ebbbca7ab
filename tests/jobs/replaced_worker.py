"""A worker that trains with NumPy and may be killed at any time: python replaced_worker.py STEPS [LAST]

Every step pushes the worker's own bit, 1 << rank, into all elements of several keys; plain SGD on the servers adds all
up. So what a key holds tells exactly which pushes are in it: each is there, or, if the worker was lost in that
step, was perhaps never made. LAST: the step in which one that has replaced nobody waits for its death.
"""

import os
import sys
import time

import numpy as np

from p3.worker.session import Session

SHAPES = {"a": (3, 50), "b": (70000,), "c": (7,)}
SGD = {"name": "sgd", "momentum": 0.0, "clip_gradient": -1.0, "multi_precision": False}
WAIT_S = 50


def main(steps, last=None):
    session = Session.open()
    first, _ = session.resume()
    session.set_optimizer(0, SGD)
    landings = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    keys = {name: session.declare(name, shape, "float32") for name, shape in SHAPES.items()}
    for name, key in keys.items():
        session.init(key, np.zeros_like(landings[name]) if session.rank == 0 else None, landings[name]).wait(WAIT_S)
    session.barrier()
    print("rank", session.rank, "process", os.getpid(), "begins", first, flush=True)
    for step in range(first, steps):
        if step == last and first == 0:
            time.sleep(WAIT_S)
        operations = []
        for priority, (name, key) in enumerate(keys.items()):
            gradient = np.full_like(landings[name], -(1 << session.rank))  # a bit for each worker
            operations.append(session.pushpull(key, gradient, landings[name], -priority, lr=1.0))
        for operation in operations:
            operation.wait(WAIT_S)
        session.snapshot(step + 1, list(keys.values()))
        print("rank", session.rank, "step", step, flush=True)
    session.barrier()
    for name, landing in landings.items():
        print("rank", session.rank, "key", name, "holds", int(landing.min()), int(landing.max()), flush=True)
    session.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), *map(int, sys.argv[2:]))
