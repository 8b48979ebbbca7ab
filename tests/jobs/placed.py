"""Rounds of dense keys, and of one with rows; rank 0 prints what landed, and what each server holds of it:
placed.py [STRATEGY...]. Without MXNet. Each worker gives its stores one of these, in JSON: a path, or what it has."""

import hashlib
import json
import sys

import numpy as np

from p3.plan import strategy as strategies
from p3.worker.session import Session

ADAM = {"name": "adam", "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "clip_gradient": -1.0, "multi_precision": False}
ELEMENTS = {"first": 1001, "second": 4000, "last": 10}
ROWS = (64, 8)

with Session.open() as session:
    landed = {}
    given = strategies.given(json.loads(sys.argv[1 + session.rank]) if len(sys.argv) > 1 else None)
    for store in (0, 1):
        session.set_strategy(store, given)
    session.set_option(0, "optimizer", ADAM)
    for name, elements in ELEMENTS.items():
        key, landing = session.declare(name, (elements,), "float32", 0), np.zeros(elements, "float32")
        session.init(key, landing if session.rank == 0 else None, landing).wait(60)
        for step in range(3):
            gradient = np.random.RandomState(10 * session.rank + step).randn(elements).astype("float32")
            session.pushpull(key, gradient, landing, 0, 0.1, 0.0, 1.0, 1.0 + step, 1.0).wait(60)
        landed[name] = hashlib.md5(landing).hexdigest()
    held = [one["value_bytes"] for one in session.server_counters()]
    rows, landing = session.declare("rows", ROWS, "float32", 1, sparse=True), np.zeros(ROWS, "float32")
    session.init(rows, landing if session.rank == 0 else None, landing).wait(60)
    session.barrier()
    with_rows = [one["value_bytes"] for one in session.server_counters()]
    session.barrier()
    if session.rank == 0:
        print(json.dumps({"landed": landed, "held": held, "with_rows": with_rows}))
