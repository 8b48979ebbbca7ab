"""Workers whose epochs have 3, 5 and 4 steps, with join() at their ends: replaced_uneven.py MARKS RANK EPOCH:MOMENT
FILE

The worker of that rank dies in that step of that epoch, or in its join(), unless FILE exists. Each push adds 10 **
rank.
"""

import os
import random
import signal
import sys
import threading

EPOCHS, LENGTHS = 4, [3, 5, 4]
LONGEST = max(LENGTHS)


def main(marks, victim, moment, record):
    import mxnet as mx
    import p3  # noqa: F401

    kv = mx.kv.create("p3_sync")
    first, _ = kv.resume()
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=1.0, wd=0.0, rescale_grad=1.0))
    weights = {key: mx.nd.zeros(3) for key in "ab"}
    kv.broadcast(list(weights), list(weights.values()), out=list(weights.values()))
    mx.nd.waitall()
    gradient = mx.nd.full(3, -(10**kv.rank))
    print("rank", kv.rank, "process", os.getpid(), "begins", first, flush=True)

    def die():
        if not os.path.exists(record):
            open(record, "w").close()
            print("rank", kv.rank, "dies", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    def is_at(epoch, step):
        return (kv.rank, f"{epoch}:{step}") == (victim, moment)

    for epoch in range(first // LONGEST if first % LONGEST else max(0, first // LONGEST - 1), EPOCHS):
        for step in range(LENGTHS[kv.rank]):
            if epoch * LONGEST + step < first:
                continue
            kv.pushpull("a", gradient, out=weights["a"])
            if is_at(epoch, step):
                die()
            kv.pushpull("b", gradient, out=weights["b"])
            mx.nd.waitall()
            if marks:
                kv.snapshot(epoch * LONGEST + step + 1)
        if is_at(epoch, "join"):
            threading.Timer(random.random() / 100, die).start()
        kv.join()  # where it is behind the job, it returns at once
    for key, weight in weights.items():
        kv.pull(key, out=weight)
        print("rank", kv.rank, "key", key, "holds", *[int(weight.asnumpy()[0])] * 2, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
