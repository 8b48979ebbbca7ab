"""slow_link.py ELEMENTS STEPS: a key with momentum on the servers; waits may be far longer than P3_WAIT_TIMEOUT_S.

Each worker says how long it took to resume and to have the first value, and to train and write; then a digest of what
it has.
"""

import sys
import time
import zlib

import numpy as np

from p3.worker.session import Session

SGD = {"name": "sgd", "momentum": 0.9, "clip_gradient": -1.0, "multi_precision": False}


def main():
    elements, steps = map(int, sys.argv[1:])
    with Session.open() as session:
        began = time.monotonic()
        resumed = session.resume()
        key, landing = session.declare("w", (elements,), "float32"), np.empty(elements, "float32")
        value = session.resumed_value(key) if resumed.round else np.zeros(elements, "float32")
        session.wait([session.init(key, value if session.rank == 0 else None, landing)])
        session.set_optimizer(0, SGD)
        session.restore(key)
        session.barrier()
        ready = time.monotonic()
        for step in range(resumed.round, steps):
            gradient = np.random.RandomState(10 * step + session.rank).rand(elements).astype("float32")
            session.wait([session.pushpull(key, gradient, landing, lr=0.1)])
            session.snapshot(step + 1, [key])
        session.snapshots.finish()
        session.barrier()  # behind worker 0's word that it is complete
        times = "%.1f s to begin, %.1f s to train and write" % (ready - began, time.monotonic() - ready)
        print("from %d: %08x %s %s" % (resumed.round, zlib.crc32(landing.tobytes()), session.snapshots.counts, times))


if __name__ == "__main__":
    main()
