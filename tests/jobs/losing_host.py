"""losing_host.py FOLDER STEPS GONE_AT BACK_AT: plain training on hosts of tests/helpers/ssh_to_here.py.

Behind step GONE_AT the host "beta" goes, with all its processes. Behind step BACK_AT, if that is not 0, it is there
again, and worker 0 is killed. Both wait until that step's snapshot is complete. What every start ends with is said as
regrouped.py says it.
"""

import os
import signal
import sys
from pathlib import Path

import numpy as np
from p3.worker.session import Session
from regrouped import SGD, SHAPE, share, wait_for_snapshot
from ssh_to_here import lose


def main():
    folder, (steps, gone_at, back_at) = sys.argv[1], map(int, sys.argv[2:])
    on_beta = os.environ.get("HOST_OF_TEST", "").endswith("/beta")
    with Session.open() as session:
        rank, workers = session.rank, session.num_workers
        resumed = session.resume()
        key, landing = session.declare("w", SHAPE, "float32"), np.empty(SHAPE, "float32")
        value = session.resumed_value(key) if resumed.round else np.ones(SHAPE, "float32")
        session.init(key, value if rank == 0 else None, landing).wait(60)
        session.set_optimizer(0, SGD)
        session.restore(key)
        for step in range(resumed.round, steps):
            operation = session.pushpull(key, share(step, rank, workers, SHAPE), landing, lr=0.125)
            session.snapshot(step + 1, [key])
            operation.wait(60)
            if step + 1 == gone_at and on_beta and os.environ["P3_LOCAL_RANK"] == "0":
                wait_for_snapshot(gone_at)
                lose(folder, "beta")
            if step + 1 == back_at and rank == 0:
                wait_for_snapshot(back_at)
                Path(folder, "beta.up").touch()
                os.kill(os.getpid(), signal.SIGKILL)
        values = landing.tobytes().hex()
        print("from %d of %d, rank %d: %s" % (resumed.round, resumed.workers, resumed.from_rank, values), flush=True)


if __name__ == "__main__":
    main()
