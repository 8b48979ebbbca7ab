"""Survives failures: killed at any moment and run again, it ends with the same bits as an uninterrupted run.

    p3 run -n 2 -s 2 --restarts 3 --snapshot-dir /tmp/digits --snapshot-every 20 python examples/resume.py

What it adds to train_digits.py: resume() before the first step, and snapshot() after each, with the script's own state:
here, the position in the data, from which another number of workers can continue, too. All sources of random
numbers are seeded, or their state is included.
"""

import argparse
import hashlib

import digits
import p3
import mxnet as mx
from mxnet import autograd, gluon

SEED = 1


def make_net():
    net = gluon.nn.HybridSequential()
    net.add(
        gluon.nn.Conv2D(8, 3, padding=1),
        gluon.nn.BatchNorm(),
        gluon.nn.Activation("relu"),
        gluon.nn.MaxPool2D(),
        gluon.nn.Dense(10),
    )
    mx.random.seed(SEED)
    net.initialize(mx.init.Xavier())
    net.hybridize()
    return net


def digest_of(net):
    """Of all weights and running statistics: equal if and only if all bits are."""
    digest = hashlib.sha256()
    for parameter in net.collect_params().values():
        digest.update(parameter.data().asnumpy().tobytes())
    return digest.hexdigest()[:16]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=50, help="images per step, of all workers together")
    options = parser.parse_args()

    kv = mx.kv.create("p3_sync")
    train, _ = digits.load()
    dataset = gluon.data.ArrayDataset(*train)
    share = max(1, options.batch_size // kv.num_workers)
    sampler = p3.SplitSampler(len(dataset))
    batches = gluon.data.DataLoader(dataset, share, sampler=sampler, last_batch="discard")
    net = make_net()
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.002}, kvstore=kv)

    step, state = kv.resume(trainer=trainer)  # (0, {}) at the first start
    if step:
        print(f"worker {kv.rank} goes on after step {step}", flush=True)
        sampler.load_state_dict(state["data"])
    while step < options.steps:
        for number, (images, labels) in enumerate(batches):
            if step == options.steps:
                break
            with autograd.record():
                loss = loss_of(net(images), labels)
            loss.backward()
            trainer.step(share * kv.num_workers)
            step += 1
            kv.snapshot(step, {"data": sampler.state_dict((number + 1) * share)}, trainer=trainer)
    print(f"worker {kv.rank}: {step} steps, weights and statistics {digest_of(net)}")


if __name__ == "__main__":
    main()
