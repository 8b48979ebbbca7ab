"""One worker of `soak.py`:  soak_worker.py SLICES MEAN_DELAY_MS SEED

Pushes until all workers together have pushed so many slices, and checks every element of every sum.
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import List

import numpy as np

from p3.worker.session import Session
from soak import TENTHS

SIZES = [50_000, 30_001, 999, 1, 20_000]
ROWS = (400, 8)


def main(slices: int, delay_ms: float, seed: int) -> None:
    with Session.open() as session:
        rng = random.Random(seed * 1000 + session.rank)
        landings = [np.zeros(size, np.float32) for size in SIZES]
        keys = [session.declare(number, (size,), "float32") for number, size in enumerate(SIZES)]
        rows = session.declare("rows", ROWS, "float32", sparse=True)
        row_landing = np.zeros(ROWS, np.float32)
        first = [session.init(key, np.zeros_like(landing), landing) for key, landing in zip(keys, landings)]
        first.append(session.init_rows(rows, np.zeros_like(row_landing), row_landing))
        session.wait(first)

        sent, round_, reported = 0, 0, 0
        while reported < TENTHS:
            round_ += 1
            operations = []
            gradients = [gradient(round_, key, session.rank, size) for key, size in enumerate(SIZES)]
            ids, values = row_gradient(round_, session.rank)
            for key in rng.sample(range(len(keys)), len(keys)):
                hesitate(rng, delay_ms)
                operations.append(session.pushpull(keys[key], gradients[key], landings[key], priority=-key))
            operations.append(session.pushpull_rows(rows, ids, values, row_landing))
            session.wait(operations)
            for key, landing in enumerate(landings):
                wanted = sum(gradient(round_, key, rank, landing.size) for rank in range(session.num_workers))
                require(np.array_equal(landing, wanted), round_, key)
            require(np.array_equal(row_landing, row_sum(round_, session.num_workers)), round_, "rows")
            # By each worker; rows, in whose frames the number depends on what was touched, are not counted.
            sent += pushed_per_round(session.slice_elements)
            if sent * session.num_workers >= slices * (reported + 1) // TENTHS:
                reported += 1
                session.barrier()
                if session.rank == 0:
                    report(session, sent * session.num_workers)


def pushed_per_round(slice_elements: int) -> int:
    return sum(-(-size // slice_elements) for size in SIZES)


def hesitate(rng: random.Random, delay_ms: float) -> None:
    if rng.random() < 0.05:
        time.sleep(rng.expovariate(1000 / delay_ms))


def gradient(round_: int, key: int, rank: int, size: int) -> np.ndarray:
    """Small integers that tell a wrong round, key, rank or place."""
    return ((np.arange(size) * 7 + round_ * 31 + key * 11 + rank * 3) % 101).astype(np.float32)


def row_gradient(round_: int, rank: int):
    ids = np.arange((round_ * 5 + rank) % 7, ROWS[0], 3 + rank, dtype=np.int64)
    return ids, np.full((ids.size, ROWS[1]), (round_ + rank) % 101 + 1, np.float32)


def row_sum(round_: int, workers: int) -> np.ndarray:
    total = np.zeros(ROWS, np.float32)
    for rank in range(workers):
        ids, values = row_gradient(round_, rank)
        total[ids] += values
    return total


def require(exact: bool, round_: int, key) -> None:
    if not exact:
        raise AssertionError("the sum of key %r is wrong in round %d" % (key, round_))


def report(session: Session, slices: int) -> None:
    servers: List[dict] = session.server_counters()
    sums = {name: sum(server[name] for server in servers) for name in ("buffer_bytes", "held_bytes", "queued_slices")}
    print(json.dumps({"soak": dict(sums, slices=slices)}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
