"""A worker that counts the bytes through its host's network card over some rounds of one key: KIND ALPHA ROUNDS, and
for a dense one a compression (p3/measure/compressions.py).

KIND: `dense`; `whole`, a dense weight with row_sparse gradients; `rows`, a row_sparse weight whose rows are fetched.
Prints JSON: bytes of the value, in and out of the card, packets of it, and how many rows were pushed by this worker and
by all.
"""

import json
import sys

import numpy as np

from p3 import codecs
from p3.measure import compressions
from p3.worker.session import Session

ROWS, LENGTH = 20000, 64
TIMEOUT_S = 60


def counted(what):
    """By the card, in and out."""
    return sum(int(open("/sys/class/net/eth0/statistics/%s_%s" % (way, what)).read()) for way in ("rx", "tx"))


def rows_of(rank, workers, round_, alpha):
    """Half of what each worker touches is touched by all."""
    count = round(ROWS * alpha)
    common = np.random.RandomState(round_).permutation(ROWS)
    own = common[count // 2 :][rank * (count - count // 2) :][: count - count // 2]
    return np.sort(np.concatenate([common[: count // 2], own]))


def main(kind, alpha, rounds, compression="exact"):
    with Session.open() as session:
        encoded = compressions.parse(compression)
        for option, value in (encoded.options if encoded else {}).items():
            if value is not None:
                session.set_option(0, option, codecs.complete(value, of_mxnet=True))
        gradient = np.random.RandomState(session.rank).randn(ROWS, LENGTH).astype("float32")
        key = session.declare("w", (ROWS, LENGTH), "float32", sparse=kind != "dense")
        first = np.zeros((ROWS, LENGTH), "float32")
        landing = None if kind == "rows" else np.empty((ROWS, LENGTH), "float32")
        session.init(key, first if session.rank == 0 else None, landing).wait(TIMEOUT_S)
        if not (encoded and encoded.up.startswith("lowrank")):  # whose sums the workers get
            session.set_optimizer(0, {"name": "sgd", "momentum": 0.0, "clip_gradient": -1.0, "multi_precision": False})
        if kind == "dense":  # in the first round lowrank gives its matrices their first values
            session.pushpull(key, gradient, landing, lr=1.0).wait(TIMEOUT_S)
        session.barrier()
        before, pushed, union = [counted("bytes"), counted("packets")], 0, 0
        session.barrier()  # nobody's first round before everybody has looked
        for round_ in range(rounds):
            if kind == "dense":
                session.pushpull(key, np.roll(gradient, round_), landing, lr=1.0).wait(TIMEOUT_S)
                continue
            everyone = [rows_of(rank, session.num_workers, round_, alpha) for rank in range(session.num_workers)]
            mine = everyone[session.rank]
            values = np.ones((len(mine), LENGTH), "float32")
            session.pushpull(key, (mine, values), landing, lr=1.0).wait(TIMEOUT_S)
            if kind == "rows":
                session.fetch(key, values, ids=mine).wait(TIMEOUT_S)
            pushed += len(mine)
            union += len(np.unique(np.concatenate(everyone)))
        session.barrier()
        card, packets = counted("bytes") - before[0], counted("packets") - before[1]
        values = {"value": 4 * ROWS * LENGTH, "card": card, "packets": packets, "pushed": pushed, "union": union}
        print(json.dumps(values))


main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
