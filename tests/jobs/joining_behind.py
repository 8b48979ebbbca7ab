"""joining_behind.py STEPS FOLDER: workers of NumPy who apply sums themselves, in jobs that lose workers and servers;
and others join. With P3_ON_WORKER_LOSS=continue and P3_ON_SERVER_LOSS=continue.

Gradients are small whole numbers that follow from rank and step, so all is exact. All agree on their members before
every fifth step; before that they wait for a file "go-STEP" in FOLDER, and say so, and one that joins for "go-on". Each
prints who took part in each step, and leaves its weights in FOLDER.
"""

import os
import sys
import time

import numpy as np

import p3

ELEMENTS = 200_000  # of each key: slices on each server


def gradient_of(rank, step):
    return np.random.RandomState(1000 * rank + step).randint(-8, 9, ELEMENTS).astype(np.float32)


def say(text, *values):
    sys.stdout.write(text % values + "\n")  # in one piece: print() may write the line and its end one after the other
    sys.stdout.flush()


def wait_for(name, rank, folder):
    say("worker %d waits for %s", rank, name)
    while not os.path.exists(os.path.join(folder, name)):
        time.sleep(0.01)


def main():
    steps, folder = int(sys.argv[1]), sys.argv[2]
    with p3.Session.open() as session:
        rank = session.rank
        first, state = session.resume()
        weight = np.zeros(ELEMENTS, np.float32) if first == 0 else state["weight"].copy()
        store = session.new_store()
        sums = {"bits": np.zeros(ELEMENTS, np.int64), "plain": np.zeros(ELEMENTS, np.float32)}
        keys = {name: session.declare(name, value.shape, str(value.dtype), store) for name, value in sums.items()}
        for name, key in keys.items():
            session.init(key, sums[name].copy() if session.is_first else None, sums[name]).wait(60)
        for step in range(first, steps):
            if step % 5 == 0:
                is_first = step == first and "P3_JOIN" in os.environ
                wait_for("go-on" if is_first else "go-%d" % step, rank, folder)
                members = session.agree_on_members(step, {"weight": weight})
                say("worker %d at %d knows %s", rank, step, list(members))
            gradients = {"bits": np.full(ELEMENTS, 1 << rank, np.int64), "plain": gradient_of(rank, step)}
            session.wait([session.pushpull(key, gradients[name], sums[name]) for name, key in keys.items()])
            weight -= sums["plain"]
            say("worker %d step %d: %s", rank, step, np.unique(sums["bits"]).tolist())
        np.save(os.path.join(folder, "%d.npy" % rank), weight)
        session.barrier()


if __name__ == "__main__":
    main()
