"""Workers of which one kills itself in the middle of a round; the others print what they get: killed.py RANK."""

import os
import signal
import sys

import numpy as np

from p3._core import P3Error
from p3.worker.session import Session

ELEMENTS = 4_000_000



def slices_sent():
    counters = session.counters()
    return counters["slices_sent"] + counters["local"]["slices_sent"]


session = Session.open()
key = session.declare("w", (ELEMENTS,), "float32")
landing = np.zeros(ELEMENTS, "float32")
session.init(key, landing if session.rank == 0 else None, landing).wait(60)
for _ in range(2):
    session.pushpull(key, np.ones(ELEMENTS, "float32"), landing).wait(60)
try:
    session.barrier()
    before = slices_sent()
    operation = session.pushpull(key, np.ones(ELEMENTS, "float32"), landing)
    while session.rank == int(sys.argv[1]):
        if slices_sent() > before + 20:  # of 80 at least
            os.kill(os.getpid(), signal.SIGKILL)
    operation.wait(60)
    print("no error")
except P3Error as error:
    print(error)
