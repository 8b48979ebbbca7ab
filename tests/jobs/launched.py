"""launched.py FOLDER STEPS [DIE_AT]: a worker that any launcher may start, without a framework.

Leaves its place and process in FOLDER/RANK once the job runs, trains STEPS steps with snapshots where the job takes
them, and prints a digest of what it has. Rank 1 is killed after step DIE_AT, unless the job has resumed. With STEPS 0
it goes on for a minute: the test, or the end of another process, ends it. "stuck" instead of STEPS: it does not even
notice that. "patient": it waits for SIGTERM, and then comes to an orderly end.
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


class Training:
    """Of one key, on every worker; goes on from the job's snapshot."""

    def __init__(self, session):
        self.session, self.resumed = session, session.resume()
        self.total = self.resumed.state.get("total", np.zeros(1000, np.float32))
        self.key, self.landing = session.declare("w", (1000,), "float32"), np.empty(1000, np.float32)
        value = session.resumed_value(self.key)
        if value is None and session.rank == 0:
            value = np.zeros(1000, np.float32)
        session.wait([session.init(self.key, value, self.landing)])
        session.restore(self.key)
        session.barrier()

    def run(self, steps, die_at):
        """`steps` of the job, 0: for LONG_S. Rank 1 is killed after step `die_at`, unless the job has resumed."""
        session, step, deadline = self.session, self.resumed.round, time.monotonic() + LONG_S
        while step < steps or steps == 0 and time.monotonic() < deadline:
            gradient = np.random.RandomState(1000 * step + session.rank).rand(1000).astype(np.float32)
            session.wait([session.pushpull(self.key, gradient, self.landing)])
            self.total += self.landing
            step += 1
            session.snapshot(step, [self.key], {"total": self.total})
            if step == die_at and self.resumed.round == 0:
                session.snapshots.finish()
                session.barrier()
                if session.rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
        session.barrier()

    @property
    def digest(self):
        return zlib.crc32(self.total.tobytes())


def leave(folder, session, told):
    """What a worker tells of itself, whole or not at all."""
    path = os.path.join(folder, str(session.rank))
    with open(path + ".part", "w") as file:
        json.dump({"pid": os.getpid(), **told}, file)
    os.rename(path + ".part", path)


def main():
    folder, steps, die_at = sys.argv[1], sys.argv[2], int((sys.argv + ["0"])[3])
    told = []
    if steps == "patient":
        signal.signal(signal.SIGTERM, lambda *_: told.append(True))
    with Session.open() as session:
        training = Training(session)
        given = ("P3_LOCAL_RANK", "P3_LOCAL_SIZE", "OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK")
        place = {name: os.environ.get(name) for name in given}
        leave(folder, session, {"parent": os.getppid(), "port": os.environ["DMLC_PS_ROOT_PORT"], **place})
        if steps == "stuck":
            time.sleep(LONG_S)
        deadline = time.monotonic() + LONG_S
        if steps == "patient":
            while not told and time.monotonic() < deadline:
                time.sleep(0.05)
            steps = "2"
        training.run(int(steps), die_at)
        # In one piece: print() may write the line and its end one after the other.
        sys.stdout.write("worker %d of %d with %d servers began at %d and has %08x\n" % (
            session.rank, session.num_workers, session.num_servers, training.resumed.round, training.digest
        ))  # fmt: skip


if __name__ == "__main__":
    main()
