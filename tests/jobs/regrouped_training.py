"""regrouped_training.py STEPS KILL_AT KIND...: Gluon in a job that comes back with another number of workers.

Every kind of training of resumed_runs.py has a store and a Trainer of its own. All workers have the same batches, so
with 1, 2 or 4 of them the mean gradient has the same bits; but from the first step on each worker has running
statistics of its own. The last rank is killed behind step KILL_AT, once its snapshot is complete; 0: nobody is.
"""

import hashlib
import sys

import numpy as np
import p3  # noqa: F401
import mxnet as mx
from mxnet import autograd
from regrouped import kill_self_behind
from resumed_runs import KINDS, net_of, trainer_of


def batch_of(kind, step):
    random = np.random.RandomState(step)
    return random.randint(0, 40, (8, 5)) if kind == "sparse" else random.rand(8, 5)


def digests(nets):
    """Of all weights, and of all running statistics."""
    weights, statistics = hashlib.sha256(), hashlib.sha256()
    for net in nets:
        for parameter in net.collect_params().values():
            digest = statistics if parameter.grad_req == "null" else weights
            digest.update(parameter.data().asnumpy().tobytes())
    return "weights %s statistics %s" % (weights.hexdigest()[:16], statistics.hexdigest()[:16])


def main():
    steps, kill_at, names = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    stores = [mx.kv.create("p3_sync") for _ in names]
    kv = stores[0]
    mx.random.seed(1)
    nets = [net_of(name) for name in names]
    trainers = [trainer_of(KINDS[name], net, store) for name, net, store in zip(names, nets, stores)]
    resumed = round, state = kv.resume(trainer=trainers)
    if round:
        print("worker %d at %d of %d: %s" % (kv.rank, round, resumed.workers, digests(nets)), flush=True)
        assert state == {"rank": resumed.from_rank}, state
    for step in range(round, steps):
        for name, net, trainer in zip(names, nets, trainers):
            with autograd.record():
                loss = (net(mx.nd.array(batch_of(name, step), dtype=KINDS[name].dtype)) ** 2).mean()
            loss.backward()
            trainer.step(kv.num_workers)
            for parameter in net.collect_params(".*running_mean").values() if step == 0 else ():
                parameter.set_data(parameter.data() + kv.rank)  # now, as worker 0's were sent to all in the first step
        kv.snapshot(step + 1, {"rank": kv.rank}, trainer=trainers)
        if step + 1 in (kill_at, steps):
            print("worker %d behind %d: %s" % (kv.rank, step + 1, digests(nets)), flush=True)
            if step + 1 == kill_at and kv.rank == kv.num_workers - 1:
                kill_self_behind(kill_at)


if __name__ == "__main__":
    main()
