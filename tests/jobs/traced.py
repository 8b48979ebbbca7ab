"""A worker with three keys in three rounds. Worker 1 has its gradient of "late" later than worker 0.

Keys have priorities in forward order; but for that one, their gradients come in backward order. With the argument
`marks` the waits of a forward pass are marked.
"""

import sys
import time

import numpy as np

from p3.worker.session import Session

KEYS = {"first": 120000, "late": 70001, "last": 10}
ROUNDS = 3
LATE_S = 0.4

with Session.open() as session:
    keys = {name: session.declare(name, (elements,), "float32") for name, elements in KEYS.items()}
    arrays = {name: (np.ones(elements, "float32"), np.zeros(elements, "float32")) for name, elements in KEYS.items()}
    session.wait([session.init(keys[name], *arrays[name]) for name in KEYS])
    for _ in range(ROUNDS):
        session.barrier()  # so that only what is meant to be late is
        operations = {}
        for name in ("last", "late", "first") if session.rank == 0 else ("last", "first", "late"):
            if name == "late" and session.rank == 1:
                time.sleep(LATE_S)
            operations[name] = session.pushpull(keys[name], *arrays[name], priority=-list(KEYS).index(name))
        for name in KEYS:
            begin_ns = time.monotonic_ns()
            operations[name].wait(60)
            if "marks" in sys.argv:
                session.mark_stall(keys[name], begin_ns, time.monotonic_ns())
