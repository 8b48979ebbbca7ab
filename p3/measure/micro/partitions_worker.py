"""One worker of `p3 bench partitions`: rounds of one key of rows, while partitions are searched, then with each number.

    python -m p3.measure.micro.partitions_worker ROWS LENGTH TOUCHED STEPS SWEEPS PARTITIONS,...

Words of a text are drawn by Zipf's law, the most frequent first, so a few contiguous rows are most of the load. Rank 0
prints JSON lines: what the search has found, and the time of each step of each number.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np

from p3.frontend.partitions import Partitions
from p3.worker.session import Session

TIMEOUT_S = 120
MOVING_STEPS = 6  # until another number of partitions counts; rows have moved by then, or the run is no result
ADAM = {"name": "adam", "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "clip_gradient": -1.0, "multi_precision": False}


def main(rows: int, length: int, touched: int, steps: int, sweeps: int, numbers) -> None:
    with Session.open() as session:
        random = np.random.RandomState(1 + session.rank)
        key = session.declare("words", (rows, length), "float32", sparse=True)
        landing = np.zeros((rows, length), "float32")
        session.init(key, landing if session.rank == 0 else None, landing).wait(TIMEOUT_S)
        session.set_optimizer(0, ADAM)
        chance = 1 / np.arange(1, rows + 1)
        edges = np.cumsum(chance / chance.sum())
        session.barrier()

        def step() -> float:
            ids = np.unique(np.searchsorted(edges, random.uniform(size=touched))).clip(0, rows - 1)
            values = np.ones((len(ids), length), "float32")
            start = time.monotonic()
            session.pushpull(key, (ids, values), landing, lr=0.001).wait(TIMEOUT_S)
            return time.monotonic() - start

        def say(**fields) -> None:
            if session.rank == 0:
                print(json.dumps(fields), flush=True)

        search = Partitions(session)
        searched = 0
        for _ in range(steps):
            if session.rank == 0 and not search.finished(key):
                search.pushed(key)
                searched += 1
            step()
        if session.rank == 0:
            assert search.finished(key), "more steps are needed"
        say(found=session.partitions(key), steps=searched)
        for sweep in range(sweeps):
            for number in numbers[sweep % len(numbers) :] + numbers[: sweep % len(numbers)]:
                if session.rank == 0 and session.partitions(key) != number:
                    session.repartition(key, number)
                for _ in range(MOVING_STEPS):
                    step()
                    time.sleep(0.02)  # the agreement, which does not wait for steps
                times = [step() for _ in range(12)]
                say(partitions=session.partitions(key), wanted=number, times=times)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:6]), [int(number) for number in sys.argv[6].split(",")])
