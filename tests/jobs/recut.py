"""Rounds of keys whose strategy changes between them, several times in a row: recut.py ROUNDS [CHANGE...]

Each CHANGE, in JSON, is [behind how many rounds, a strategy]. Rank 0 prints a digest of all that has landed, what each
server holds at the end, and on which servers the keys were at last. Without MXNet."""

import hashlib
import json
import sys

import numpy as np

from p3.plan import strategy as strategies
from p3.worker.session import Session

ELEMENTS = {"first": 1001, "second": 40_000, "empty": 0, "last": 10}
COMPRESSED = ("second", {"compression": {"type": "2bit", "threshold": 0.5}})

with Session.open() as session:
    rounds, changes = int(sys.argv[1]), dict(map(json.loads, sys.argv[2:]))
    norm = session.declare_norm(1)
    keys, landings = [], []
    for store, names in ((0, ELEMENTS), (1, ("first", "second"))):
        for name in names:
            options = COMPRESSED[1] if store == 0 and name == COMPRESSED[0] else None
            key = session.declare(name, (ELEMENTS[name],), "float32", store, options=options)
            keys.append(key)
            landings.append(np.zeros(ELEMENTS[name], "float32"))
            session.init(key, landings[-1] if session.is_first else None, landings[-1]).wait(60)
    rows = session.declare("rows", (64, 4), "float32", 0, sparse=True)
    of_rows = np.zeros((64, 4), "float32")
    session.init(rows, of_rows if session.is_first else None, of_rows).wait(60)
    of_norm, digest = np.zeros(norm.shape, "float64"), hashlib.md5()
    session.init(norm, of_norm if session.is_first else None, of_norm).wait(60)
    for number in range(rounds):
        if number in changes:
            given = strategies.given(changes[number]) or strategies.Strategy()
            changed = session.change_strategy([0, 1], given if session.is_first or number % 2 else None)
            assert changed is not session.change_strategy([0, 1], given), "again it is no change"
        operations = []
        for key, landing in zip(keys, landings):
            random = np.random.RandomState(100 * number + 10 * session.rank + len(key.name))
            if key.name == "last" and number % 3 == session.rank:
                operations.append(session.skip(key, landing, goes_on=True))
            else:
                operations.append(session.pushpull(key, random.randn(*key.shape).astype("float32"), landing))
        one_row = (np.array([session.rank]), np.ones((1, 4), "float32"))
        operations.append(session.pushpull(rows, one_row, of_rows))
        operations.append(session.skip(norm, of_norm, goes_on=True))
        session.wait(operations)
        for landing in (*landings, of_rows):
            digest.update(landing.tobytes())
        squares = sum(float((landing.astype("float64") ** 2).sum()) for landing in landings[-2:])
        assert np.isclose(of_norm[:, 0].sum(), squares, rtol=1e-9), (number, of_norm, squares)
    held = [one["value_bytes"] for one in session.server_counters()]
    session.barrier()
    if session.rank == 0:
        servers = {"%d %s" % key.identity: session.keys.agreed[key.identity].plan.servers for key in keys}
        print(json.dumps({"landed": digest.hexdigest(), "held": held, "servers": servers}))
