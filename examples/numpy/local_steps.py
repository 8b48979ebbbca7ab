"""Linear regression with local steps: each worker trains by itself, and they share their weights once in ten steps.

    python examples/numpy/local_steps.py                    # embedded, in one process
    p3 run -n 2 -s 2 python examples/numpy/local_steps.py   # two workers, two servers
"""

import numpy as np

import p3

STEPS, SAMPLES, LEARNING_RATE = 200, 64, 0.2
TRUE = np.linspace(-1, 1, 8, dtype=np.float32)

if __name__ == "__main__":
    with p3.Session.open() as session:
        local = p3.LocalSteps(session, {"weight": np.zeros_like(TRUE)}, every=10)
        arrays = local.arrays
        data = np.random.RandomState(session.rank)  # different samples on every worker
        for _ in range(STEPS):
            x = data.uniform(-1, 1, (SAMPLES, len(TRUE))).astype(np.float32)
            gradient = x.T @ (x @ arrays["weight"] - x @ TRUE) / SAMPLES
            arrays = local.step({"weight": arrays["weight"] - np.float32(LEARNING_RATE) * gradient})
        error = float(np.abs(local.take_global()["weight"] - TRUE).max())
        print("worker %d of %d: error %.4f" % (session.rank, session.num_workers, error))
