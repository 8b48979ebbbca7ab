"""One worker of `p3 bench leaders`: rounds of a part of a model, and of the whole, when the benchmark is ready.

    python -m p3.measure.micro.leaders_worker --model vgg19 --sizes 0.1,1 --rounds 10,1 --repeats 3

The worker of rank 0 tells the benchmark (as of cards_worker.py) when all are about to begin the rounds of one size, and
when they have ended. Each size has a warm-up of one round before all.
"""

from __future__ import annotations

import argparse
import itertools

import numpy as np

from p3.measure.arguments import list_of
from p3.measure.micro.cards_worker import control
from p3.measure.replay import models
from p3.worker.session import Session

TIMEOUT_S = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m p3.measure.micro.leaders_worker")
    parser.add_argument("--model", required=True)
    parser.add_argument("--sizes", type=list_of(float), required=True)
    parser.add_argument("--rounds", type=list_of(int), required=True)
    parser.add_argument("--repeats", type=int, required=True)
    options = parser.parse_args()
    with Session.open() as session, control(session) as ask:
        parts = [Part(session, options.model, size) for size in options.sizes]
        for part in parts:
            part.warm_up()
        for _, (part, rounds) in itertools.product(range(options.repeats), zip(parts, options.rounds)):
            session.barrier()  # all have ended the rounds before
            ask({"bytes": part.bytes})
            for _ in range(rounds):
                part.round()
            session.barrier()
            ask({})


class Part:
    """The model, with so much of its parameters."""

    def __init__(self, session: Session, name: str, size: float):
        self._session = session
        self._rounds = []
        tensors = models.load(name, size).tensors
        self.bytes = sum(tensor.bytes for tensor in tensors)
        for number, tensor in enumerate(tensors):
            value = np.zeros(tensor.shape, "float32")
            key = session.declare(f"{size:g} {number}", tensor.shape, "float32")
            session.init(key, value if session.rank == 0 else None, value).wait(TIMEOUT_S)
            self._rounds.append((key, np.ones(tensor.shape, "float32"), value, -number))

    def round(self) -> None:
        """The last layers first, as a backward pass has them."""
        pushed = [
            self._session.pushpull(key, gradient, value, priority=priority)
            for key, gradient, value, priority in reversed(self._rounds)
        ]
        for completion in pushed:
            completion.wait(TIMEOUT_S)

    def warm_up(self) -> None:
        self.round()
        workers = self._session.num_workers
        if not all((value == workers).all() for _, _, value, _ in self._rounds):
            raise SystemExit("wrong sums")


if __name__ == "__main__":
    main()
