"""A linear model over p3.frontend.weights, with NumPy: frontend_weights.py NAME FILE ARGUMENT...

Prints what tests look at; rank 0 writes the weights to FILE.
"""

import sys

import numpy as np
import p3
from p3.frontend.snapshots import resume, take
from p3.frontend.weights import Weights

SGD = {"name": "torch_sgd", "momentum": 0.9, "dampening": 0.0, "nesterov": False, "maximize": False,
       "multi_precision": False}  # fmt: skip
BATCH, LR = 8, 0.1


def first_weights():
    return {"last": np.ones((3, 2), np.float32), "first": np.full((4, 3), 0.5, np.float32)}


def gradients(weights, step, part, parts):
    """Of this part of the step's batch; a step reads "first" first."""
    x = np.random.RandomState(step).uniform(-1, 1, (BATCH, 4)).astype(np.float32)[part::parts]
    first, last = weights["first"].copy(), weights["last"].copy()
    hidden = x @ first
    dy = (hidden @ last - x[:, :2]) / len(x)
    return {"last": hidden.T @ dy, "first": x.T @ (dy @ last.T)}


def step_of(weights, step, part, parts):
    for name, gradient in gradients(weights, step, part, parts).items():
        weights.push(name, gradient, LR)
    weights.end_step(LR)


def steps(session, count):
    weights = Weights(session, first_weights(), SGD)
    for step in range(int(count)):
        step_of(weights, step, session.rank, session.num_workers)
    print("priorities", sorted(weights._weights, key=lambda name: -weights._weights[name].priority))
    return weights


def uneven(session, count):
    """Rank 1 has half the batches; the others' steps go on without its gradients."""
    weights, followed = Weights(session, first_weights(), SGD), []
    mine = int(count) // (2 if session.rank == 1 else 1)
    for step in range(mine):
        step_of(weights, step, session.rank, session.num_workers)
    weights.join(lambda: followed.append(weights["first"].sum()))
    print("worker %d followed %d of %d steps, sum %.5f"
          % (session.rank, len(followed), int(count), weights["first"].sum()))  # fmt: skip
    return weights


def apart(session, count):
    """Steps whose gradients update at once, until the error is small."""
    plain = dict(SGD, momentum=0.0)
    weights = Weights(session, first_weights(), plain, staleness=2)
    for step in range(int(count)):
        step_of(weights, step, session.rank, session.num_workers)
    weights.join()
    print("worker %d updates %d" % (session.rank, session.updates(weights._weights["first"].key)))
    return weights


def resumed(session, count):
    """Snapshots as P3_SNAPSHOT_EVERY says; goes on where the last one was taken."""
    done, state = resume(session)
    print("worker %d resumed at %d with %r" % (session.rank, done, state))
    weights = Weights(session, first_weights(), SGD)
    for step in range(done, int(count)):
        step_of(weights, step, session.rank, session.num_workers)
        take(session, step + 1, {"rank": session.rank})
    return weights


if __name__ == "__main__":
    name, path, *arguments = sys.argv[1:]
    with p3.Session.open() as session:
        weights = globals()[name](session, *arguments)
        if session.rank == 0:
            np.savez(path, **{name: weights[name] for name in first_weights()})
