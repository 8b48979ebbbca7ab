"""Linear regression with NumPy: no framework, only p3.Session. Every worker ends with the same weights.

    python examples/numpy/regression.py                    # embedded, in one process
    p3 run -n 2 -s 2 python examples/numpy/regression.py   # two workers, two servers
"""

import numpy as np

import p3

STEPS, SAMPLES, LEARNING_RATE = 200, 64, 0.2
SGD = {"name": "sgd", "momentum": 0.0, "clip_gradient": -1.0, "multi_precision": False}
TRUE = np.linspace(-1, 1, 8, dtype=np.float32)

if __name__ == "__main__":
    with p3.Session.open() as session:
        session.set_optimizer(0, SGD)  # it runs on the servers
        key = session.declare("weight", TRUE.shape, "float32")
        weight = np.empty_like(TRUE)
        session.init(key, np.zeros_like(TRUE) if session.rank == 0 else None, weight).wait(60)
        data = np.random.RandomState(session.rank)  # different samples on every worker
        for _ in range(STEPS):
            x = data.uniform(-1, 1, (SAMPLES, len(TRUE))).astype(np.float32)
            gradient = x.T @ (x @ weight - x @ TRUE) / (SAMPLES * session.num_workers)
            session.pushpull(key, gradient, weight, lr=LEARNING_RATE).wait(60)
        error = float(np.abs(weight - TRUE).max())
        print("worker %d of %d: error %.4f" % (session.rank, session.num_workers, error))
