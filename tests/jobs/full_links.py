"""Rounds without staleness of any bound, of which many are always under way: links are full all the time.

It never ends: the test ends it.
"""

from __future__ import annotations

import math

import numpy as np

from p3.worker.session import Session

KEYS, ELEMENTS = 16, 100_000
TIMEOUT_S = 60.0
SGD = {"name": "sgd", "momentum": 0.0, "clip_gradient": -1.0, "multi_precision": False}


def main() -> None:
    with Session.open() as session:
        gradient = np.ones(ELEMENTS, "float32")
        landings = [np.zeros(ELEMENTS, "float32") for _ in range(KEYS)]
        keys = [session.declare(f"key {i}", (ELEMENTS,), "float32", staleness=math.inf) for i in range(KEYS)]
        for key, landing in zip(keys, landings):
            session.init(key, landing if session.rank == 0 else None, landing).wait(TIMEOUT_S)
        session.set_optimizer(0, SGD)
        session.barrier()
        pushed = [session.pushpull(key, gradient, landing, lr=0.1) for key, landing in zip(keys, landings)]
        while True:
            for i, (key, landing) in enumerate(zip(keys, landings)):
                pushed[i].wait(TIMEOUT_S)
                pushed[i] = session.pushpull(key, gradient, landing, lr=0.1)


if __name__ == "__main__":
    main()
