"""loaded_by_servers.py STEPS: several kinds of keys, trained with Adam on the servers; says what came from where.

The servers of a job that resumes load their own parts. Each worker says a digest of all values and states at the end;
worker 0 also how many bytes it had sent when all had their first values and states. No process has a file of the
snapshot open then, which others may remove.
"""

import os
import sys
import zlib

import numpy as np

from p3._core import MASTER
from p3.worker.session import Session

ADAM = {"name": "adam", "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "clip_gradient": -1.0, "multi_precision": True}
SHAPES = {"large": ((300, 1000), "float32"), "half": ((70000,), "float16"), "small": ((7,), "float32"),
          "empty": ((0,), "float32")}  # fmt: skip


def main(steps):
    with Session.open() as session:
        resumed = session.resume(servers_load=True)
        keys = {name: session.declare(name, *SHAPES[name]) for name in SHAPES}
        keys["rows"] = session.declare("rows", (50, 3), "float32", sparse=True)
        landings = {name: np.zeros(key.shape, key.dtype) for name, key in keys.items()}
        for name, key in keys.items():
            value = np.random.RandomState(len(name)).rand(*key.shape).astype(key.dtype)
            if resumed.round:
                value = session.first_value(key)
            session.wait([session.init(key, value if session.rank == 0 else None, landings[name])])
        session.set_optimizer(0, ADAM)
        for key in keys.values():
            session.restore(key)
        session.barrier()
        sent = session.counters()["bytes_sent"]
        if session.rank == 0:
            assert not files_open_in(os.environ["P3_SNAPSHOT_DIR"])
        for step in range(resumed.round, steps):
            chance, numbers = np.random.RandomState(10 * step + session.rank), {"lr": 0.1, "updates": step + 1.0}
            for name, key in keys.items():
                if key.sparse:
                    rows = chance.permutation(50)[:2], chance.rand(2, 3).astype("float32")
                    session.wait([session.pushpull(key, rows, landings[name], **numbers)])
                else:
                    gradient = chance.rand(*key.shape).astype(key.dtype)
                    session.wait([session.pushpull(key, gradient, landings[name], **numbers)])
            session.snapshot(step + 1, list(keys.values()))
        digest = zlib.crc32(b"".join(landing.tobytes() for landing in landings.values()))
        for name, parts in (("large", (1, 2)), ("half", (1, 2, MASTER))):
            state = np.zeros(keys[name].shape, "float32")
            for part in parts:
                session.wait([session.fetch(keys[name], state, part)])
                digest = zlib.crc32(state.tobytes(), digest)
        session.snapshots.finish()
        session.barrier()
        print("from %d: %08x after %d bytes" % (resumed.round, digest, sent), flush=True)


def files_open_in(folder):
    """By any process of this machine that may be looked at: (process, file)."""
    found = set()
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open("/proc/%s/maps" % process) as maps:
                paths = [line.split()[-1] for line in maps]
            paths += [os.readlink(each.path) for each in os.scandir("/proc/%s/fd" % process)]
        except OSError:
            continue  # it has ended
        found.update((process, path) for path in paths if path.startswith(folder + os.sep))
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]))
