"""on_ray.py FOLDER STEPS [DIE_AT]: a worker on a Ray cluster, without a framework.

Leaves what it is told of its place in FOLDER/RANK, trains STEPS steps with snapshots where the job takes them, and
prints a digest of what it has. Rank 1 is killed after step DIE_AT, unless the job has resumed. With STEPS 0 it goes on
until it is ended; a minute at most.
"""

import json
import os
import signal
import sys
import time
import zlib

import numpy as np

from p3.worker.session import Session

LONG_S = 60
TOLD = ("DMLC_PS_ROOT_PORT", "DMLC_NODE_HOST", "P3_LOCAL_RANK", "P3_LOCAL_SIZE", "P3_SECRET", "OMP_NUM_THREADS",
        "CUDA_VISIBLE_DEVICES")  # fmt: skip


def say(folder, session):
    told = {"pid": os.getpid(), **{name: os.environ.get(name) for name in TOLD}}
    path = os.path.join(folder, str(session.rank))
    with open(path + ".part", "w") as file:
        json.dump(told, file)
    os.rename(path + ".part", path)


def main():
    folder, steps, die_at = sys.argv[1], int(sys.argv[2]), int((sys.argv + ["0"])[3])
    with Session.open() as session:
        resumed = session.resume()
        total = resumed.state.get("total", np.zeros(1000, np.float32))
        key, landing = session.declare("w", (1000,), "float32"), np.empty(1000, np.float32)
        value = session.resumed_value(key)
        if value is None and session.rank == 0:
            value = np.zeros(1000, np.float32)
        session.wait([session.init(key, value, landing)])
        session.restore(key)
        session.barrier()
        say(folder, session)
        step, deadline = resumed.round, time.monotonic() + LONG_S
        while step < steps or steps == 0 and time.monotonic() < deadline:
            gradient = np.random.RandomState(1000 * step + session.rank).rand(1000).astype(np.float32)
            session.wait([session.pushpull(key, gradient, landing)])
            total += landing
            step += 1
            session.snapshot(step, [key], {"total": total})
            if step == die_at and resumed.round == 0:
                session.snapshots.finish()
                session.barrier()
                if session.rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
        session.barrier()
        print("worker %d began at %d and has %08x" % (session.rank, resumed.round, zlib.crc32(total.tobytes())))
        print("and that is all", file=sys.stderr)


if __name__ == "__main__":
    main()
