"""Workers that train p3.frontend.weights.Weights, as JAX's do, whose servers die (struck.py), and who train on. Each
prints a digest of its weights."""

import hashlib

import frontend_weights
import numpy as np
import struck

import p3
from p3.frontend import snapshots
from p3.frontend.weights import Weights

STEPS = 12


def first_weights():
    random = np.random.RandomState(1)
    return {name: random.uniform(-1, 1, (300, 200)).astype(np.float32) for name in ("first", "last")}


def main():
    with p3.Session.open() as session:
        weights = Weights(session, first_weights(), frontend_weights.SGD)
        marks = struck.key_of_marks(session)

        def mark(step):
            snapshots.members(session, step, None)

        struck.begin(session)
        for step in range(STEPS):
            if struck.MARKS and step % struck.MARKS == 0:
                struck.until_all_are_back(session, marks, step, mark)
            random = np.random.RandomState(1000 * step + session.rank)
            for name in ("first", "last"):
                gradient = weights[name] * 0.1 + random.uniform(-1, 1, (300, 200)).astype(np.float32)
                weights.push(name, gradient, frontend_weights.LR)
            weights.end_step(frontend_weights.LR)
        if struck.MARKS:
            struck.until_all_are_back(session, marks, STEPS, mark)
        digest = hashlib.sha256(b"".join(weights[name].tobytes() for name in ("first", "last")))
        print("worker %d: %s" % (session.rank, digest.hexdigest()), flush=True)
        session.barrier()


if __name__ == "__main__":
    main()
