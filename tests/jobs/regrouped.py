"""regrouped.py KINDS STEPS KILL_AT: a job, without MXNet, that comes back with another number of workers.

Each kind has a store of two keys: "plain", or with a compression; "-average" and "-mean" where servers divide sums by
the number of workers. The workers' gradients are whole numbers whose sum does not depend on how many there are, so
plain training ends with the same bits whoever took part. The last rank is killed behind step KILL_AT, once its snapshot
is complete; 0: nobody is. With STEPS 0 the job takes one more snapshot of what it has resumed, and no step.
"""

import os
import signal
import sys
import time

import numpy as np
from p3.snapshots import files
from p3.worker.session import Session

SGD = {"name": "sgd", "momentum": 0.5, "clip_gradient": -1.0, "multi_precision": False}
DGC = {"type": "dgc", "ratio": 0.25, "warmup_steps": 8, "clip_norm": 0.0, "masking": True}
COMPRESSIONS = {
    "2bit": {"type": "2bit", "threshold": 3.0},
    "1bit": {"type": "1bit"},
    "int8": {"type": "int8"},
    "int4": {"type": "int4"},
    "topk": {"type": "topk", "ratio": 0.2, "value_bits": 4},
    "dgc": DGC,
}
SHAPE, ROWS = (7, 3), np.array([1, 2, 5], "int64")


def share(step, rank, workers, shape):
    """This worker's part of the step's gradient."""
    random = np.random.RandomState([step, workers])
    shares = [random.randint(-9, 10, shape) for _ in range(workers - 1)]
    whole = np.random.RandomState([step]).randint(-9, 10, shape)
    return [*shares, whole - sum(shares)][rank].astype("float32")


def wait_for_snapshot(round):
    deadline = time.monotonic() + 30
    while max(files.rounds(os.environ["P3_SNAPSHOT_DIR"]), default=0) < round and time.monotonic() < deadline:
        time.sleep(0.01)


def kill_self_behind(round):
    wait_for_snapshot(round)
    os.kill(os.getpid(), signal.SIGKILL)


def main():
    kinds, steps, kill_at = sys.argv[1].split(","), int(sys.argv[2]), int(sys.argv[3])
    with Session.open() as session:
        rank, workers = session.rank, session.num_workers
        resumed = session.resume()
        states = [resumed.state_of(other) for other in range(resumed.workers)]
        keys, landings = [], []
        for kind in kinds:
            store = session.new_store()
            compression, _, reduction = kind.partition("-")
            if compression in COMPRESSIONS:
                session.set_option(store, "compression", COMPRESSIONS[compression])
            if reduction:
                session.set_option(store, "reduction", {"type": reduction})
            keys.append(session.declare("w", SHAPE, "float32", store))
            keys.append(session.declare("r", (9, 2), "float32", store, sparse=True))
            session.set_optimizer(store, SGD)
        for key in keys:
            landings.append(np.empty(key.shape, key.dtype))
            value = session.resumed_value(key) if resumed.round else np.ones(key.shape, key.dtype)
            session.init(key, value if rank == 0 else None, landings[-1]).wait(60)
            session.restore(key)
        if steps == 0:
            session.snapshot(resumed.round + 1, keys)
        for step in range(resumed.round, steps):
            under_way = []
            for key, landing in zip(keys, landings):
                gradient = share(step, rank, workers, (len(ROWS), 2) if key.sparse else SHAPE)
                if key.sparse:
                    under_way.append(session.pushpull(key, (ROWS, gradient), landing, lr=0.125))
                else:
                    under_way.append(session.pushpull(key, gradient, landing, lr=0.125))
            session.snapshot(step + 1, keys, {"rank": rank, "of": workers})
            session.wait(under_way)
            if step + 1 == kill_at and rank == workers - 1:
                kill_self_behind(kill_at)
        values = "".join(landing.tobytes().hex() for landing in landings)
        print("from %d of %d, rank %d: %s" % (resumed.round, resumed.workers, resumed.from_rank, values))
        print("state %s of %s" % (resumed.state, states), flush=True)


if __name__ == "__main__":
    main()
