"""Workers of NumPy that ask much of the scheduler: keys announced, stores made and released, barriers and counters, all
the way. Prints "step N" and at its end a digest of all weights, which is the same for every run.

    without_scheduler.py STEPS [PAUSE_S]
"""

import hashlib
import sys
import time

import numpy as np

import p3

SGD = {"name": "sgd", "momentum": 0.9, "clip_gradient": -1.0, "multi_precision": False}
ELEMENTS, NEW_KEY_EVERY, NEW_STORE_EVERY = 1000, 3, 5
STEPS, PAUSE_S = int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.0


def begun(session, name, store):
    key = session.declare(name, (ELEMENTS,), "float32", store=store)
    weight = np.zeros(ELEMENTS, np.float32)
    session.init(key, weight.copy() if session.rank == 0 else None, weight).wait(60)
    return key, weight


if __name__ == "__main__":
    with p3.Session.open() as session:
        first = session.new_store()
        session.set_optimizer(first, SGD)
        data = np.random.RandomState(session.rank)
        digest = hashlib.sha256()
        keys = [begun(session, "key 0", first)]
        for step in range(STEPS):
            for key, weight in keys:
                gradient = data.uniform(-1, 1, ELEMENTS).astype(np.float32)
                session.pushpull(key, gradient, weight, lr=0.1).wait(60)
            if step % NEW_KEY_EVERY == 0:
                keys.append(begun(session, "key %d" % len(keys), first))
            if step % NEW_STORE_EVERY == 0:
                store = session.new_store()
                session.set_optimizer(store, SGD)
                key, weight = begun(session, "of its own", store)
                session.pushpull(key, np.full(ELEMENTS, step, np.float32), weight, lr=0.1).wait(60)
                digest.update(weight.tobytes())
                session.release(store)
            session.barrier()
            assert len(session.server_counters()) == session.num_servers
            print("step %d" % step, flush=True)
            time.sleep(PAUSE_S)
        for _, weight in keys:
            digest.update(weight.tobytes())
        print("worker %d: %s" % (session.rank, digest.hexdigest()), flush=True)
