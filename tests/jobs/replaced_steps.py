"""A worker with two stores, keys that are not pushed in every step, and join() at each epoch's end, which dies where it
is told: python replaced_steps.py STEPS EPOCH MARKS DIRECTORY RANK:STEP:MOMENT ...

As in a GAN each step is one of a store and then one of the other, which reads what the first has led to. Each push adds
the worker's own bit, 1 << rank, to all elements. EPOCH 0: no join(). MARKS 1: kv.snapshot() after each step.
A moment is how many pushes of the step the worker has called by then; "step": all are behind; "join": in join(), or
soon behind it. Deaths of one rank come in their order; DIRECTORY keeps how many have been.
"""

import os
import random
import signal
import sys
import threading
import time

SHAPES = [{"a": (3, 50), "b": (70000,), "third": (4,)}, {"c": (7,), "d": (20000,), "second": (5, 5)}]
LATER = 12  # the step in which one more key is pushed for the first time


def keys_of(store, step):
    keys = [key for key in SHAPES[store] if key not in ("third", "second")]
    if store == 0 and step % 3 == 2:
        keys.append("third")
    if store == 1 and step % 2 == 1 and step >= LATER:
        keys.insert(1, "second")
    return keys


class Deaths:
    def __init__(self, directory, rank, deaths):
        mine = [death.split(":")[1:] for death in deaths if death.split(":")[0] == str(rank)]
        self.record = os.path.join(directory, f"deaths-{rank}")
        done = os.path.getsize(self.record) if os.path.exists(self.record) else 0
        self.step, self.moment = mine[done] if done < len(mine) else (None, None)
        self.rank = rank
        self.now = None

    def at(self, step, moment):
        self.now = step
        if str(step) == self.step and str(moment) == self.moment:
            if moment == "join":
                threading.Timer(random.random() / 50, self.die).start()
            else:
                time.sleep(random.choice([0, random.random() / 300]))
                self.die()

    def die(self):
        with open(self.record, "a") as record:
            record.write(".")
        print("rank", self.rank, "dies in step", self.now, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


def main(steps, epoch, marks, directory, deaths):
    import mxnet as mx
    import p3  # noqa: F401

    stores = [mx.kv.create("p3_sync") for _ in range(2)]
    rank = stores[0].rank
    deaths = Deaths(directory, rank, deaths)
    first, _ = stores[0].resume()
    weights = [{key: mx.nd.zeros(shape) for key, shape in shapes.items()} for shapes in SHAPES]
    bits = [{key: mx.nd.full(shape, -(1 << rank)) for key, shape in shapes.items()} for shapes in SHAPES]
    for store, its in zip(stores, weights):
        store.set_optimizer(mx.optimizer.SGD(learning_rate=1.0, wd=0.0, rescale_grad=1.0))
        store.broadcast(list(its), list(its.values()), out=list(its.values()))
    stores[0]._barrier()
    mx.nd.waitall()
    print("rank", rank, "process", os.getpid(), "begins", first, flush=True)
    for step in range(first, steps):
        pushed = 0
        for number, store in enumerate(stores):
            keys = keys_of(number, step)
            for key in keys:
                deaths.at(step, pushed)
                store.pushpull(key, bits[number][key], out=weights[number][key], priority=-pushed)
                pushed += 1
            if number == 0:
                weights[0]["a"].wait_to_read()  # what the second step needs of the first
        deaths.at(step, pushed)
        mx.nd.waitall()
        print("rank", rank, "step", step, flush=True)
        deaths.at(step, "step")
        if marks:
            stores[0].snapshot(step + 1)
        if epoch and (step + 1) % epoch == 0:
            deaths.at(step, "join")
            stores[step // epoch % 2].join()
            stores[0].pull("a", out=weights[0]["a"])
    stores[0]._barrier()
    mx.nd.waitall()
    for its in weights:
        for key, weight in its.items():
            value = weight.asnumpy()
            print("rank", rank, "key", key, "holds", int(value.min()), int(value.max()), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5:])
