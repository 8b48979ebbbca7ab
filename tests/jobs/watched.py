"""A training that takes steps until a file is there, for tests that watch it: watched.py FILE [SECONDS].

Each step of rank 1 takes SECONDS more. Rank 0 says when the first steps are done.
"""

import os
import sys
import threading

import numpy as np
from p3.frontend.weights import Weights
from p3.worker.session import Session

SGD = {"name": "torch_sgd", "momentum": 0.9, "dampening": 0.0, "nesterov": False, "maximize": False,
       "multi_precision": False}  # fmt: skip
LR = 0.1

session = Session.open()
first = {
    "%s.%d.weight" % (part, number): np.ones((40, 40), np.float32)
    for part in ("encoder", "decoder")
    for number in range(3)
}
gradient = np.full((40, 40), 1e-9, np.float32)
weights = Weights(session, first, SGD)
computes_s = float(sys.argv[2]) if sys.argv[2:] and session.rank == 1 else 0.01
step = 0
while not os.path.exists(sys.argv[1]):
    for name in first:
        weights[name]
    threading.Event().wait(computes_s)
    for name in reversed(list(first)):
        weights.push(name, gradient, LR)
    weights.end_step(LR)
    step += 1
    if step == 10 and session.rank == 0:
        print("steps", flush=True)
weights.join()
