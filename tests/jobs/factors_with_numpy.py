"""Sufficient factors with NumPy alone: factors_with_numpy.py exact|disagree

exact     whole numbers, so that each weight is exactly what all workers' gradients make of it; and counts the bytes
disagree  worker 1 has another batch
"""

import hashlib
import os
import sys
import time

import numpy as np

from p3.placement import FRAME_BYTES
from p3.settings import Settings
from p3.plan.factor_shape import FactorShape
from p3.worker.session import Session

SHAPE = FactorShape(3, 40, 50)
STEPS = 6
SGD = {"name": "sgd", "momentum": 0.5, "clip_gradient": -1.0, "multi_precision": False}


def factors(rank, step):
    random = np.random.RandomState(100 * step + rank)
    return random.randint(-3, 4, (SHAPE.rows, SHAPE.width)).astype("float32")


def gradient(workers, step):
    each = [factors(rank, step) for rank in range(workers)]
    return sum(one[:, : SHAPE.outputs].T @ one[:, SHAPE.outputs :] for one in each)


def train_exactly(session):
    weight = np.arange(SHAPE.outputs * SHAPE.inputs, dtype="float32").reshape(SHAPE.outputs, SHAPE.inputs)
    expected, momentum = weight.copy(), np.zeros_like(weight)
    session.set_optimizer(0, SGD)
    key = session.declare_factors("w (factors)", SHAPE)
    session.init(key, None, weight).wait(30)
    before = [session.traffic_with(server) for server in range(session.num_servers)]
    for step in range(STEPS):
        session.pushpull(key, factors(session.rank, step), weight, lr=0.25).wait(30)
        momentum = np.float32(0.5) * momentum - np.float32(0.25) * gradient(session.num_workers, step)
        expected += momentum
        assert (weight == expected).all(), step
    check_bytes(session, before)
    state = np.empty_like(weight)
    session.fetch(key, state, 1).wait(30)
    assert (state == momentum).all()
    session.barrier()
    print("exact, digest", hashlib.sha256(weight.tobytes()).hexdigest()[:16], flush=True)


def check_bytes(session, before):
    """All are on one machine, whose first worker sends all their parts, of which none comes back; or if each pushes on
    its own, it sends its part, and gets the others'. Of each slice a header goes both ways."""
    part, workers = 4 * SHAPE.elements, session.num_workers
    headers = FRAME_BYTES * -(-SHAPE.elements // session.slice_size.of(SHAPE.elements)) * workers
    expected = {"bytes_sent": part + headers, "bytes_received": (workers - 1) * part + headers}
    if session.placement.aggregates:
        leads = session.local_rank == 0
        expected = {"bytes_sent": leads * (workers * part + headers), "bytes_received": leads * headers}
    heartbeats = FRAME_BYTES * 50
    deadline = time.monotonic() + 10
    for name, of_step in expected.items():
        bytes_ = crossed(session, before, name)
        while bytes_ < STEPS * of_step and time.monotonic() < deadline:  # what has left is counted a moment later
            bytes_ = crossed(session, before, name)
        assert 0 <= bytes_ - STEPS * of_step <= heartbeats, (name, bytes_, STEPS * of_step)


def crossed(session, before, name):
    return sum(session.traffic_with(server)[name] - early[name] for server, early in enumerate(before))


def main(what):
    with Session.open(Settings.from_env(os.environ)) as session:
        if what == "exact":
            return train_exactly(session)
        session.declare_factors("w (factors)", SHAPE._replace(rows=SHAPE.rows + session.rank))
        session.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
