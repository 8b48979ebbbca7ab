"""regrouped_rest.py mxnet|torch: one step whose gradients, of this worker alone, are too small for 2-bit compression.

Once resumed, a step without any gradient, which leaves what was left out as it is. Each step is followed by a snapshot.
"""

import sys

COMPRESSION = {"type": "2bit", "threshold": 1.0}


def size_of_gradient(round, rank):
    return 0.125 * (rank + 1) if round == 0 else 0.0


def with_mxnet():
    import p3  # noqa: F401
    import mxnet as mx

    kv = mx.kv.create("p3_sync")
    kv.set_gradient_compression(COMPRESSION)
    round, _ = kv.resume()
    value = mx.nd.zeros(5)
    kv.init("w", value)
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=1.0))
    kv.pushpull("w", mx.nd.full(5, size_of_gradient(round, kv.rank)), out=value)
    kv.snapshot(round + 1)


def with_torch():
    import torch

    import p3.torch

    round, _ = p3.torch.resume()
    model = torch.nn.Linear(5, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = p3.torch.DistributedOptimizer(optimizer, model, compression=COMPRESSION)
    model(torch.full((1, 5), size_of_gradient(round, p3.torch.rank()))).sum().backward()
    optimizer.step()
    p3.torch.snapshot(round + 1)


if __name__ == "__main__":
    {"mxnet": with_mxnet, "torch": with_torch}[sys.argv[1]]()
