"""Workers whose sparse keys move amid all else that they do: moving.py move|stay. Each prints what it sees."""

import os
import sys
import warnings

import numpy as np

from p3.worker.session import Session

SGD = {"name": "sgd", "momentum": 0.9, "clip_gradient": -1.0, "multi_precision": False}
ROWS, WAIT_S = 11, 30
MOVES = sys.argv[1] == "move"

session = Session.open()
leads = session.rank == 0
is_last = session.rank == session.num_workers - 1
every_row = np.arange(ROWS, dtype=np.int64)


def values(number):
    return np.full((ROWS, 2), number, "float32")


def repartition(key, partitions):
    """The next push of rank 0 begins the move, or tells others of one that they have not heard of."""
    if not MOVES:
        return
    if leads:
        session.wait_until(lambda: not session.is_moving(key) and session.partitions(key), "for the last move")
        before = session.keys.agreed[key.store, key.name].plan.wire_key
        session.repartition(key, partitions)
        agreed = lambda: session.keys.agreed[key.store, key.name].plan.wire_key != before  # noqa: E731
        session.wait_until(agreed, "for the plan")


class Table:
    def __init__(self, name):
        self.key = session.declare(name, (ROWS, 2), "float32", sparse=True)
        self.weight = values(-1)

    def init(self, number):
        return session.init(self.key, values(number) if leads else None, self.weight)

    def push(self, rows=every_row):
        return session.pushpull(self.key, (rows, values(1 + session.rank)[: len(rows)]), self.weight, lr=0.1)

    def skip(self):
        return session.skip(self.key, self.weight)

    def state(self):
        momentum = values(0)
        session.fetch(self.key, momentum, part=1, ids=every_row).wait(WAIT_S)
        return momentum

    def show(self, what):
        print(what, self.weight.tolist(), self.state().tolist())


session.set_optimizer(0, SGD)

if leads:  # others hear of a key's second plan before they declare it
    late = Table("late")
    repartition(late.key, 4)
session.barrier()
if not leads:
    late = Table("late")
late.init(3)
late.push()
late.push(every_row[:5]).wait(WAIT_S)
late.show("late")

table = Table("table")
table.init(0)
table.push().wait(WAIT_S)

repartition(table.key, 5)
table.push()
table.init(7)
table.push().wait(WAIT_S)
table.show("init")

repartition(table.key, 1)
table.push()
if leads:
    session.store(table.key, values(0.5), part=1, ids=every_row)
table.push().wait(WAIT_S)
table.show("state")

repartition(table.key, ROWS)
for _ in range(3):
    operation = table.skip() if is_last else table.push(np.array([0, 3, 6, 9]))
operation.wait(WAIT_S)
table.skip().wait(WAIT_S)
table.show("skip")

repartition(table.key, 2)
operation = table.push()
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)  # Python 3.12 and later
child = os.fork()
if child == 0:
    os._exit(0)
os.waitpid(child, 0)
operation.wait(WAIT_S)
table.show("fork")

spare = Table("spare")
spare.init(1).wait(WAIT_S)
repartition(table.key, 3)
table.push()
repartition(late.key, 7)
late.push(every_row[:2]).wait(WAIT_S)  # and end, in the midst of two moves
print("end", late.weight.tolist(), flush=True)
repartition(spare.key, 1)  # which comes to nothing: there is no further push
