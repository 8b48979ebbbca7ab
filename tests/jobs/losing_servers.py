"""losing_servers.py STEPS: workers of NumPy whose servers die, and who go on. With P3_ON_SERVER_LOSS=continue.

Four kinds of keys, whose sums the workers have: of whole numbers, of float32 (whose gradient and sum share one array),
of float16, and of float32 that leave as int8, with what that leaves out. And the norm of all. Takes snapshots where the
job does, and goes on from one: its state is a digest of all sums of all steps, which each worker prints. Each checks
the sums of whole numbers, which tell who took part, and the norms.

Who dies, and when: struck.py. P3S_EARLY: counted from before the first values.
"""

import hashlib
import os
import sys

import numpy as np
import struck

import p3

ELEMENTS = 120_000  # three slices, or twelve with more than two servers
KINDS = {"bits": ("int64", {}), "plain": ("float32", {}), "half": ("float16", {}),
         "int8": ("float32", {"compression": {"type": "int8"}})}  # fmt: skip


def main():
    steps = int(sys.argv[1])
    with p3.Session.open() as session:
        resumed = session.resume()
        store = session.new_store()
        norm = session.declare_norm(store)
        norms = np.zeros(norm.shape)
        session.init(norm, norms if session.is_first else None, norms).wait(60)
        marks = struck.key_of_marks(session)
        keys, sums = {}, {}
        for name, (dtype, options) in KINDS.items():
            keys[name] = session.declare(name, (ELEMENTS,), dtype, store, options=options)
            sums[name] = np.zeros(ELEMENTS, dtype)
        if os.environ.get("P3S_EARLY"):
            struck.begin(session)
        for name, key in keys.items():
            first = session.resumed_value(key)
            if first is None and session.is_first:
                first = sums[name].copy()
            session.init(key, first, sums[name]).wait(60)
            session.restore(key)
        if not os.environ.get("P3S_EARLY"):
            struck.begin(session)
        state = resumed.state.get("digest", np.zeros(32, np.uint8))
        for step in range(resumed.round, steps):
            if struck.MARKS and step % struck.MARKS == 0:
                struck.until_all_are_back(session, marks, step)
            random = np.random.RandomState(1000 * step + session.rank)
            gradient = random.uniform(-1, 1, ELEMENTS)
            operations = []
            for number, (name, key) in enumerate(keys.items()):
                own = sums[name] if name == "plain" else np.empty_like(sums[name])  # or in place
                own[:] = 1 << session.rank if name == "bits" else gradient
                operations.append(session.pushpull(key, own, sums[name], priority=-number))
            operations.append(session.skip(norm, norms, priority=-len(keys), goes_on=True))
            session.wait(operations)
            everybody = (1 << session.num_workers) - 1
            took_part = np.unique(sums["bits"])
            if not os.environ.get("P3S_WORKER_DIES"):
                assert took_part.tolist() == [everybody], (step, took_part)
                together = sum(float(np.square(value.astype(np.float64)).sum()) for name, value in sums.items()
                               if name != "bits")  # fmt: skip
                assert abs(norms[:, 0].sum() - together) <= 1e-6 * together, (step, norms, together)
            digest = hashlib.sha256(bytes(state))
            for value in (*sums.values(), norms):
                digest.update(value.tobytes())
            state = np.frombuffer(digest.digest(), np.uint8)
            session.snapshot(step + 1, list(keys.values()), {"digest": state})
        if struck.MARKS:
            struck.until_all_are_back(session, marks, steps)
        print("worker %d: %s" % (session.rank, bytes(state).hex()), flush=True)
        session.barrier()


if __name__ == "__main__":
    main()
