"""Trains with float16 weights and gradients; the servers keep float32 master copies of the weights.

    python examples/mixed_precision.py                     # alone, in one process
    p3 run -n 2 -s 2 python examples/mixed_precision.py    # two workers and two servers

Only half the bytes are sent. The servers sum and update in float32 (multi_precision), so that small steps are not
rounded away, and the loss is scaled up, so that small gradients are not.
"""

import argparse
import os

import digits
import p3
import mxnet as mx
from mxnet import autograd, gluon

SEED = 1  # all workers start with the same weights
LOSS_SCALE = 128
GPUS = mx.context.num_gpus()
DEVICE = mx.gpu(int(os.environ.get("P3_LOCAL_RANK", 0)) % GPUS) if GPUS else mx.cpu()


class Dense(gluon.nn.Dense):
    """MXNet multiplies float16 matrices only on GPUs (on a CPU contrib.amp fails, too); elsewhere we use float32."""

    def hybrid_forward(self, F, x, weight, bias):
        if GPUS:
            return super().hybrid_forward(F, x, weight, bias)
        product = super().hybrid_forward(F, x.astype("float32"), weight.astype("float32"), bias.astype("float32"))
        return product.astype("float16")


def make_net():
    net = gluon.nn.HybridSequential()
    net.add(Dense(128, activation="relu"), Dense(64, activation="relu"), Dense(10))
    net.cast("float16")
    mx.random.seed(SEED)
    net.initialize(mx.init.Xavier(), ctx=DEVICE)
    net.hybridize(static_alloc=True, static_shape=True)
    return net


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=50, help="images per step, of all workers together")
    options = parser.parse_args()

    kv = mx.kv.create("p3_sync")
    train, (test_images, test_labels) = digits.load()
    dataset = gluon.data.ArrayDataset(*train)
    share = max(1, options.batch_size // kv.num_workers)
    batches = gluon.data.DataLoader(dataset, share, sampler=p3.SplitSampler(len(dataset)), last_batch="discard")
    net = make_net()
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    settings = {"learning_rate": 0.1, "momentum": 0.9, "multi_precision": True}
    trainer = gluon.Trainer(net.collect_params(), "sgd", settings, kvstore=kv)

    for _ in range(options.epochs):
        for images, labels in batches:
            images = images.as_in_context(DEVICE).astype("float16")
            with autograd.record():
                output = net(images).astype("float32")
                loss = loss_of(output, labels.as_in_context(DEVICE)) * LOSS_SCALE
            loss.backward()
            trainer.step(share * kv.num_workers * LOSS_SCALE)

    output = net(mx.nd.array(test_images, DEVICE, "float16"))
    accuracy = (output.argmax(axis=1).asnumpy() == test_labels).mean()
    print(f"worker {kv.rank} of {kv.num_workers}: accuracy {accuracy:.4f} with {net[0].weight.dtype} weights")


if __name__ == "__main__":
    main()
