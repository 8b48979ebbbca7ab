"""on_ray.py FOLDER STEPS [DIE_AT]: a worker on a Ray cluster, without a framework.

Leaves what it is told of its place in FOLDER/RANK, trains STEPS steps with snapshots where the job takes them, and
prints a digest of what it has. Rank 1 is killed after step DIE_AT, unless the job has resumed. With STEPS 0 it goes on
until it is ended; a minute at most.
"""

import os
import sys

from launched import Training, leave
from p3.worker.session import Session

TOLD = ("DMLC_PS_ROOT_PORT", "DMLC_NODE_HOST", "P3_LOCAL_RANK", "P3_LOCAL_SIZE", "P3_SECRET", "OMP_NUM_THREADS",
        "CUDA_VISIBLE_DEVICES")  # fmt: skip


def main():
    folder, steps, die_at = sys.argv[1], int(sys.argv[2]), int((sys.argv + ["0"])[3])
    with Session.open() as session:
        training = Training(session)
        leave(folder, session, {name: os.environ.get(name) for name in TOLD})
        training.run(steps, die_at)
        print("worker %d began at %d and has %08x" % (session.rank, training.resumed.round, training.digest))
        print("and that is all", file=sys.stderr)


if __name__ == "__main__":
    main()
