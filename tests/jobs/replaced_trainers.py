"""Two Trainers of a GAN in one process, killed at any time: replaced_trainers.py STEPS OPTIMIZER KIND MARKS EPOCH

The first layer of the first net rests in every fourth step, the second net in every third; a layer of it is frozen
until step 10. The learning rate falls by a schedule,
and once by the script's word. KIND: of compression, down for that of what comes back, or none. EPOCH 0: no join(),
MARKS 1: kv.snapshot() after each step.
At the end it prints a fingerprint of each weight, and how often the optimizers have counted.
"""

import hashlib
import os
import sys


def main(steps, optimizer, compression, marks, epoch):
    import mxnet as mx
    import p3  # noqa: F401
    from mxnet import autograd, gluon

    stores, nets, trainers = [], [], []
    for number in range(2):
        kv = mx.kv.create("p3_sync")
        if compression != "none":
            kv.set_gradient_compression({"down": "int8"} if compression == "down" else {"type": compression})
        mx.random.seed(100 * number + kv.rank)  # the first values are rank 0's
        net = gluon.nn.HybridSequential()
        net.add(gluon.nn.Dense(16, in_units=8, activation="relu"), gluon.nn.Dense(300, in_units=16))
        net.initialize(mx.init.Xavier())
        schedule = mx.lr_scheduler.FactorScheduler(step=7, factor=0.9, base_lr=0.01)
        options = {"learning_rate": 0.01, "lr_scheduler": schedule if number == 0 else None}
        if optimizer == "sgd":
            options["momentum"] = 0.9
        trainer = gluon.Trainer(net.collect_params(), optimizer, options, kvstore=kv, update_on_kvstore=True)
        stores.append(kv), nets.append(net), trainers.append(trainer)
    rank = stores[0].rank
    first, _ = stores[0].resume(trainer=trainers)
    print("rank", rank, "process", os.getpid(), "begins", first, flush=True)
    for step in range(first, steps):
        for layer, learns in ((nets[0][0], step % 4 != 3), (nets[1][1], step >= 10)):
            for parameter in layer.collect_params().values():
                parameter.grad_req = "write" if learns else "null"
        for number, (net, trainer) in enumerate(zip(nets, trainers)):
            if number == 1 and step % 3 == 2:
                continue
            mx.random.seed(1000 * step + 10 * number + rank)
            with autograd.record():
                loss = (net(mx.nd.random.uniform(shape=(4, 8))) ** 2).sum()
            loss.backward()
            trainer.step(4)
            if number == 0:
                loss.wait_to_read()
        if step == 15:
            trainers[1].set_learning_rate(0.005)
        mx.nd.waitall()
        print("rank", rank, "step", step, flush=True)
        if marks:
            stores[0].snapshot(step + 1, trainer=trainers)
        if epoch and (step + 1) % epoch == 0:
            stores[0].join()
    for number, net in enumerate(nets):
        for parameter in net.collect_params().values():
            digest = hashlib.sha256(parameter.data().asnumpy().tobytes()).hexdigest()[:16]
            print("rank", rank, "key", parameter.name, "holds", digest, digest, flush=True)
        counts = trainers[number].optimizer._index_update_count
        updates = trainers[number].optimizer.num_update
        counted = "-".join(str(counts[key]) for key in sorted(counts)) + "-of-%d" % updates
        print("rank", rank, "key", f"counts{number}", "holds", counted, counted, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], *map(int, sys.argv[4:]))
