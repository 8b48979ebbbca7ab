"""Workers of which one kills itself in the middle of a round; the others print what they get: killed.py RANK KIND.

KIND: of the key, "dense" or "rows". A second key never gets the gradient of the one that dies: however late that is,
the others are in the round.
"""

import os
import signal
import sys

import numpy as np

from p3._core import P3Error
from p3.worker.session import Session

ROWS = (40_000, 100)
gradient = np.ones(ROWS, "float32")

def slices_sent():
    counters = session.counters()
    return counters["slices_sent"] + counters["local"]["slices_sent"]


session = Session.open()
sparse = sys.argv[2] == "rows"
key = session.declare("w", ROWS, "float32", sparse=sparse)
landing = np.zeros(ROWS, "float32")
session.init(key, landing if session.rank == 0 else None, landing).wait(60)
last = session.declare("last", (10,), "float32")
landed = np.zeros(10, "float32")
session.init(last, landed if session.rank == 0 else None, landed).wait(60)


def start_round():
    if sparse:
        return session.pushpull(key, (np.arange(ROWS[0]), gradient), landing)
    return session.pushpull(key, gradient, landing)


for _ in range(2):
    start_round().wait(60)
try:
    session.barrier()
    before = slices_sent()
    operations = [start_round()]
    while session.rank == int(sys.argv[1]):
        if slices_sent() > before + 20:  # of 80 at least
            os.kill(os.getpid(), signal.SIGKILL)
    operations.append(session.pushpull(last, np.ones(10, "float32"), landed))
    for operation in operations:
        operation.wait(60)
    print("no error")
except P3Error as error:
    print(error)
