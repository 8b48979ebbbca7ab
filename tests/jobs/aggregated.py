"""Rounds of every kind in several stores, without MXNet; prints what landed and was sent: aggregated.py [STEPS ...].

STEPS: of each rank, in the store whose workers join; all take as many by default.
"""

import hashlib
import json
import sys

import numpy as np

from p3.worker.session import Session

ROUNDS = 3
ELEMENTS = 45_001  # three slices of 20,000, the last one short
ROWS = (3_000, 15)
SGD = {"name": "sgd", "momentum": 0.9, "clip_gradient": -1.0, "multi_precision": False}
ADAM = {"name": "adam", "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "clip_gradient": -1.0, "multi_precision": False}
STORES = [  # what they are for, type, options
    ("optimizer", "float32", {"optimizer": SGD}),
    ("sum", "float32", {}),
    ("halves", "float16", {}),
    ("average", "float32", {"reduction": {"type": "average"}}),
    ("joined", "float32", {"reduction": {"type": "average"}, "optimizer": SGD}),
    ("compressed", "float32", {"compression": {"type": "2bit", "threshold": 0.5}}),
]
ROW_STORES = [  # and whether all rows go, as slices; all workers touch the same rows, but in the last one
    ("rows", "float32", {"optimizer": ADAM}, False),
    ("row halves", "float16", {"reduction": {"type": "average"}}, False),
    ("rows as slices", "float32", {"optimizer": SGD}, True),
    ("scattered rows", "float32", {}, False),
]


def row_gradient(rank, step, what, dtype):
    random = np.random.RandomState(1000 * rank * (what == "scattered rows") + step)
    ids = random.randint(0, ROWS[0], random.choice([0, 500, 2000])).astype(np.int64)
    return ids, gradient(rank, step, dtype)[: ids.size * ROWS[1]]


def gradient(rank, step, dtype):
    random = np.random.RandomState(1000 * rank + step)
    return (random.randn(ELEMENTS) * 2.0 ** random.randint(-6, 6, ELEMENTS)).astype(dtype)


with Session.open() as session:
    landed, sent = {}, {}
    for store, (what, dtype, options) in enumerate(STORES):
        for option, value in options.items():
            session.set_option(store, option, value)
        key = session.declare("w", (ELEMENTS,), dtype, store)
        landing = np.zeros(ELEMENTS, dtype)
        session.init(key, landing if session.rank == 0 else None, landing).wait(60)
        session.barrier()
        before = session.counters()
        digest = hashlib.md5()
        steps = ROUNDS
        if what == "joined" and sys.argv[1:]:
            steps = int(sys.argv[1 + session.rank])
        for step in range(steps):
            session.pushpull(key, gradient(session.rank, step, dtype), landing, 3, lr=0.1).wait(60)
            digest.update(landing.tobytes())
        updated = what == "joined"
        while updated:
            skip = session.skip(key, landing)
            skip.wait(60)
            updated = skip.updated
        if what != "joined":  # there, each worker sees other values on the way
            landed[what] = digest.hexdigest()
        landed[what + ", last"] = hashlib.md5(landing.tobytes()).hexdigest()
        session.barrier()
        after = session.counters()
        sent[what] = [after["bytes_sent"] - before["bytes_sent"],
                      after["local"]["bytes_sent"] - before["local"]["bytes_sent"]]  # fmt: skip
    for store, (what, dtype, options, as_slices) in enumerate(ROW_STORES, len(STORES)):
        for option, value in options.items():
            session.set_option(store, option, value)
        key = session.declare("emb", ROWS, dtype, store, sparse=True)
        session.core.choose_route(key.handle, 0, as_slices)
        landing = np.zeros(ROWS, dtype)
        session.init(key, landing if session.rank == 0 else None, landing).wait(60)
        session.barrier()
        before = session.counters()
        digest = hashlib.md5()
        for step in range(5):
            ids, values = row_gradient(session.rank, step, what, dtype)
            session.pushpull(key, (ids, values), landing, 3, lr=0.1).wait(60)
            digest.update(landing.tobytes())
        landed[what] = digest.hexdigest()
        session.barrier()
        after = session.counters()
        sent[what] = [after["bytes_sent"] - before["bytes_sent"],
                      after["local"]["bytes_sent"] - before["local"]["bytes_sent"]]  # fmt: skip
    result = {"rank": session.rank, "local": [session.local_rank, session.local_size], "landed": landed, "sent": sent}
    sys.stdout.write(json.dumps(result) + "\n")  # in one piece: neighbours may share the pipe
