"""counting.py STEPS FAIL_AT...: two keys that SGD moves, without MXNet. Worker 1 ends with code 3 at the step FAIL_AT.

One that has resumed from the first FAIL_AT fails at the next, and so on, each when that snapshot is complete.
The last line says which round it began at, all bits of the values, and the state that came back.
"""

import os
import sys
import time

import numpy as np
from p3.snapshots import files
from p3.worker.session import Session

SGD = {"name": "sgd", "momentum": 0.9, "clip_gradient": -1.0, "multi_precision": False}


def fail_after(round):
    deadline = time.monotonic() + 30
    while round not in files.rounds(os.environ["P3_SNAPSHOT_DIR"]) and time.monotonic() < deadline:
        time.sleep(0.01)
    os._exit(3)


def main():
    steps, failures = int(sys.argv[1]), [int(text) for text in sys.argv[2:]]
    with Session.open() as session:
        resumed = session.resume()
        dense = session.declare("w", (7, 3), "float32")
        rows = session.declare("r", (9, 2), "float32", sparse=True)
        keys, landings = [dense, rows], [np.empty(key.shape, key.dtype) for key in (dense, rows)]
        for key, landing in zip(keys, landings):
            value = session.resumed_value(key) if resumed.round else np.ones(key.shape, key.dtype)
            session.init(key, value if session.rank == 0 else None, landing).wait(60)
        session.set_optimizer(0, SGD)
        for key in keys:
            session.restore(key)
        fail_at = next((step for step in failures if step > resumed.round), None)
        for step in range(resumed.round, steps):
            if step == fail_at and session.rank == 1:
                fail_after(step)
            random = np.random.RandomState(100 * step + session.rank)
            gradient = random.rand(7, 3).astype("float32")
            ids = random.choice(9, 4, replace=False).astype("int64")
            under_way = [
                session.pushpull(dense, gradient, landings[0], lr=0.1),
                session.pushpull(rows, (ids, gradient[:4, :2].copy()), landings[1], lr=0.1),
            ]
            session.snapshot(step + 1, keys, {"sums": landings[0].sum(), "rank": session.rank})
            session.wait(under_way)
        values = "".join(landing.tobytes().hex() for landing in landings)
        print("from %d: %s, rank %s" % (resumed.round, values, resumed.state.get("rank")), flush=True)


if __name__ == "__main__":
    main()
