"""A worker with a key of rows, beside a dense one. It goes over to other partitions after the second of four rounds."""

import time

import numpy as np

from p3.worker.session import Session

ROWS, COLUMNS = 100, 1000
ROUNDS, PARTITIONS = 4, 5

with Session.open() as session:
    table = session.declare("table", (ROWS, COLUMNS), "float32", sparse=True)
    dense = session.declare("w", (9,), "float32")
    weight, landing = np.zeros((ROWS, COLUMNS), "float32"), np.zeros(9, "float32")
    session.wait([session.init(table, weight, weight), session.init(dense, landing, landing)])
    ids = np.arange(session.rank, ROWS, 2)
    for number in range(1, ROUNDS + 1):
        if number == 2 and session.rank == 0:
            before = session.keys.agreed[0, "table"].plan.wire_key
            session.repartition(table, PARTITIONS)
            agreed = lambda: session.keys.agreed[0, "table"].plan.wire_key != before  # noqa: E731
            session.wait_until(agreed, "for the plan")
        rows = session.pushpull(table, (ids, np.ones((len(ids), COLUMNS), "float32")), weight)
        session.pushpull(dense, landing, landing).wait(30)
        begin_ns = time.monotonic_ns()
        rows.wait(30)
        session.mark_stall(table, begin_ns, time.monotonic_ns())
        if number == 3:
            session.init(table, weight, weight).wait(30)
