"""joining.py STEPS FOLDER: workers of NumPy of whom some die, and others join. With P3_ON_WORKER_LOSS=continue.

As departing.py, with gradients of small whole numbers that follow from rank and step, so that sums are exact. All agree
on their members before every fifth step, and take snapshots and resume where the job does. P3S_DEATHS: as there.
P3S_GATES, steps separated by commas: before these they wait for a file "go-STEP" in FOLDER, and say so. P3S_DIES, in a
process that joins: "trial", before its first agree_on_members(); "frozen": it stops there; "late": it comes there after
3 s.
"""

import os
import signal
import sys
import time

import departing
import numpy as np
from departing import ELEMENTS, ROWS

import p3

SAMPLES = 90


def gradient_of(rank, step):
    random = np.random.RandomState(1000 * rank + step)
    ids = np.unique(random.randint(0, ROWS, 5))
    rows = random.randint(-8, 9, (len(ids), 3)).astype(np.float32)
    return random.randint(-8, 9, ELEMENTS).astype(np.float32), ids, rows


def main():
    steps, folder = int(sys.argv[1]), sys.argv[2]
    joins, dies = "P3_JOIN" in os.environ, os.environ.get("P3S_DIES")
    gates = [int(step) for step in filter(None, os.environ.get("P3S_GATES", "").split(","))]
    with p3.Session.open() as session:
        rank = session.rank
        dies_at, dies_before = (-1, 0) if joins else departing.deaths(rank)
        first, state = session.resume()
        bits, weights = session.new_store(of="bits"), session.new_store(of="weights")
        session.set_option(weights, "reduction", {"type": "mean"})
        session.set_optimizer(weights, departing.SGD)
        keys = departing.declared(session, bits, weights)
        for key, value in keys.values():
            given = session.resumed_value(key)
            session.init(key, value.copy() if given is None and session.is_first else given, value).wait(60)
            session.restore(key)
        sampler = p3.SplitSampler(SAMPLES, seed=3)
        if joins:
            assert state == {"step": first}, state
            if dies == "trial":
                os.kill(os.getpid(), signal.SIGKILL)
            if dies == "frozen":
                os.kill(os.getpid(), signal.SIGSTOP)
            if dies == "ends":
                return
            if dies == "late":
                print("worker %d has what it was given" % rank, flush=True)
                time.sleep(3)
        session.barrier()
        for step in range(first, steps):
            if step % 5 == 0:
                if step in gates:
                    print("worker %d waits for go-%d" % (rank, step), flush=True)
                    while not os.path.exists(os.path.join(folder, "go-%d" % step)):
                        time.sleep(0.01)
                members = session.agree_on_members(step, {"step": step})
                sampler.share_among(members)
                sampler.set_epoch(step // 5)
                said = "worker %d at %d knows %s, has %s"
                print(said % (rank, step, list(members), sorted(sampler)), flush=True)
            dies_now = dies_before if step == dies_at else None
            departing.step_of(session, keys, step, *gradient_of(rank, step), 0.125, dies_now)
            session.snapshot(step + 1, [key for key, _ in keys.values()], {"step": step})
        np.savez(os.path.join(folder, "%d.npz" % rank), **{name: value for name, (_, value) in keys.items()})


if __name__ == "__main__":
    main()
