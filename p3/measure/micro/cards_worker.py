"""One worker of `p3 bench cards`: rounds of a dense key, and of its factors, when the benchmark has read the cards.

    python -m p3.measure.micro.cards_worker --outputs 1024 --inputs 1024 --rows 300

The worker of rank 0 connects to the socket at $CARDS_CONTROL, and says there when all are about to begin the next of
the two rounds, and when all is over; one byte in answer lets them go on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
from typing import Callable, Iterator

import numpy as np

from p3.worker.key import FactorShape
from p3.worker.session import Session

CONTROL_VARIABLE = "CARDS_CONTROL"
WAYS = ("dense", "factors")
_TIMEOUT_S = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m p3.measure.micro.cards_worker")
    for name in ("outputs", "inputs", "rows"):
        parser.add_argument("--" + name, type=int, required=True)
    options = parser.parse_args()
    shape = FactorShape(options.rows, options.outputs, options.inputs)
    with Session.open() as session:
        weight = np.zeros((shape.outputs, shape.inputs), "float32")
        dense = session.declare("w", weight.shape, "float32")
        session.init(dense, weight if session.rank == 0 else None, weight).wait(_TIMEOUT_S)
        factored = session.declare_factors("w (factors)", shape)
        session.init(factored, None, weight).wait(_TIMEOUT_S)
        pushed = {"dense": np.ones_like(weight), "factors": np.ones((shape.rows, shape.width), "float32")}
        keys = dict(zip(WAYS, (dense, factored)))
        with control(session) as ask:
            for way in WAYS:
                ask({"placement": session.placement, "slice_elements": session.slice_elements})
                session.barrier()  # for rank 0, which may go on
                session.pushpull(keys[way], pushed[way], weight).wait(_TIMEOUT_S)
            ask({})


@contextlib.contextmanager
def control(session: Session) -> Iterator[Callable[[dict], None]]:
    """A function that on rank 0 tells the benchmark that all have come so far, and waits until the cards are read."""
    if session.rank != 0:
        yield lambda _message: session.barrier()
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as control:
        control.settimeout(_TIMEOUT_S)
        control.connect(os.environ[CONTROL_VARIABLE])

        def ask(message: dict) -> None:
            session.barrier()
            control.sendall(json.dumps(message).encode())
            control.recv(1)

        yield ask


if __name__ == "__main__":
    main()
