"""One worker of `p3 bench soak`:  python -m p3.measure.micro.processes.soak_worker SLICES MEAN_DELAY_MS SEED RECONNECTS

Pushes until all workers together have pushed so many slices, and checks every element of every sum. In the rounds in
which it is to be lost it kills itself; the process that takes its place goes on from there.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from typing import Dict, List, Optional

import numpy as np

from p3.worker.session import Session

TENTHS = 10  # at each of which it tells how it goes
SIZES = [50_000, 30_001, 999, 1, 20_000]
ROWS = (400, 8)


def main(slices: int, delay_ms: float, seed: int, reconnects: int) -> None:
    with Session.open() as session:
        rng = random.Random(seed * 1000 + session.rank)
        landings = [np.zeros(size, np.float32) for size in SIZES]
        keys = [session.declare(number, (size,), "float32") for number, size in enumerate(SIZES)]
        rows = session.declare("rows", ROWS, "float32", sparse=True)
        row_landing = np.zeros(ROWS, np.float32)
        first = [session.init(key, np.zeros_like(landing), landing) for key, landing in zip(keys, landings)]
        first.append(session.init(rows, np.zeros_like(row_landing), row_landing))
        session.wait(first)

        # By each worker; rows, in whose frames the number depends on what was touched, are not counted.
        pushed_per_round = sum(-(-size // session.slice_elements) for size in SIZES)
        rounds = max(TENTHS, -(-slices // (pushed_per_round * session.num_workers)))
        tenths = [rounds * tenth // TENTHS for tenth in range(1, TENTHS + 1)]
        losses = draw_losses(rounds, tenths, session.num_workers, reconnects, seed)
        cuts = [range(session.slice_elements, size, session.slice_elements) for size in SIZES]
        partitions = session.partitions(rows)
        row_cuts = [ROWS[0] * partition // partitions for partition in range(1, partitions)]

        def push(round_: int, key):
            if key == "rows":
                return session.pushpull(rows, row_gradient(round_, session.rank), row_landing)
            values = gradient(round_, key, session.rank, SIZES[key])
            return session.pushpull(keys[key], values, landings[key], priority=-key)

        def check_sums(round_: int) -> int:
            lost, ranks = losses.get(round_), range(session.num_workers)
            lacking = 0
            for key, landing in enumerate(landings):
                gradients = [gradient(round_, key, rank, landing.size) for rank in ranks]
                lacking += check(landing, gradients, lost, cuts[key], round_, key)
            return lacking

        behind = session.rejoined_at or 0
        if behind:  # the sums of that round came as first values
            print(json.dumps({"soak": {"lacking": check_sums(behind)}}), flush=True)
        for round_ in range(1, rounds + 1):
            if round_ > behind:
                order = rng.sample([*range(len(keys)), "rows"], len(keys) + 1)
                is_lost = losses.get(round_) == session.rank and round_ > behind + 1  # not again in the round behind
                dies_after = rng.choice(order) if is_lost else None
                operations = []
                for key in order:
                    hesitate(rng, delay_ms)
                    operations.append(push(round_, key))
                    if key == dies_after:
                        die(rng)
                session.wait(operations)
                check_sums(round_)
                touched = [dense(*row_gradient(round_, rank)) for rank in range(session.num_workers)]
                check(row_landing, touched, losses.get(round_), row_cuts, round_, "rows")
            if round_ in tenths:
                session.barrier()  # of a round that is behind: returns at once, if the predecessor had entered it
                if session.rank == 0 and round_ >= behind:
                    report(session, round_ * pushed_per_round * session.num_workers)


def draw_losses(rounds: int, tenths: List[int], workers: int, reconnects: int, seed: int) -> Dict[int, int]:
    """Round -> rank of the worker that is lost in it.

    No two rounds follow each other, and none follows a tenth: so a process that has rejoined can tell where its
    predecessor was lost.
    """
    rng = random.Random(seed)
    possible = [round_ for round_ in range(2, rounds, 2) if round_ - 1 not in tenths]
    if reconnects > len(possible):
        raise ValueError("%d reconnects do not fit into %d rounds; push more slices" % (reconnects, rounds))
    return {round_: rng.randrange(workers) for round_ in rng.sample(possible, reconnects)}


def die(rng: random.Random) -> None:
    """While the core is sending."""
    time.sleep(rng.random() / 1000)
    os.kill(os.getpid(), signal.SIGKILL)


def hesitate(rng: random.Random, delay_ms: float) -> None:
    if rng.random() < 0.05:
        time.sleep(rng.expovariate(1000 / delay_ms))


def gradient(round_: int, key: int, rank: int, size: int) -> np.ndarray:
    """Small integers that tell a wrong round, key, rank or place."""
    return ((np.arange(size) * 7 + round_ * 31 + key * 11 + rank * 3) % 101).astype(np.float32)


def row_gradient(round_: int, rank: int):
    ids = np.arange((round_ * 5 + rank) % 7, ROWS[0], 3 + rank, dtype=np.int64)
    return ids, np.full((ids.size, ROWS[1]), (round_ + rank) % 101 + 1, np.float32)


def dense(ids: np.ndarray, values: np.ndarray) -> np.ndarray:
    rows = np.zeros(ROWS, np.float32)
    rows[ids] = values
    return rows


def check(total: np.ndarray, gradients: List[np.ndarray], lost: Optional[int], cuts, round_: int, key) -> int:
    """How many of the slices lack the lost worker's gradient. AssertionError if one is anything but whole or that."""
    whole = sum(gradients)
    if np.array_equal(total, whole):
        return 0
    lacking = 0
    without_lost = whole if lost is None else whole - gradients[lost]
    for slice_, *allowed in zip(*(np.split(array, cuts) for array in (total, whole, without_lost))):
        if not any(np.array_equal(slice_, sum_) for sum_ in allowed):
            raise AssertionError("the sum of key %r is wrong in round %d" % (key, round_))
        lacking += not np.array_equal(slice_, allowed[0])
    return lacking


def report(session: Session, slices: int) -> None:
    servers: List[dict] = session.server_counters()
    sums = {name: sum(server[name] for server in servers) for name in ("buffer_bytes", "held_bytes", "queued_slices")}
    print(json.dumps({"soak": dict(sums, slices=slices)}), flush=True)
    # The processes must be there when they are looked at.
    with open(os.environ["SOAK_SAMPLED"], "rb", buffering=0) as sampled:
        sampled.read(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
