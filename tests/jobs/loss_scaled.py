"""Trainings whose loss is scaled, with compression that keeps what it leaves out: loss_scaled.py mxnet|torch.

Each is done twice: with steps in which one worker's gradients of one layer overflow, and without them. Weights must be
the same to the bit. Scales are powers of two, so that without rounding a scale changes nothing; 2bit's threshold does
not change with the scale, so that there the other training gets the same scales by hand.
"""

import sys

import numpy as np

import p3

STEPS, BAD, BATCH = 7, 3, 4
KINDS = {
    "1bit": {"type": "1bit"}, "2bit": {"type": "2bit", "threshold": 40.0}, "int8": {"type": "int8"},
    "int4": {"type": "int4"}, "topk": {"type": "topk", "ratio": 0.1, "value_bits": 8},
    "int8 and bf16": {"type": "int8", "down": "bf16"},
}  # fmt: skip


def data(rank, step):
    return np.random.RandomState(100 * rank + step).uniform(-1, 1, (BATCH, 6)).astype("float32")


def train_with_mxnet(compression, overflows, same_scales):
    import mxnet as mx
    from mxnet import gluon
    from mxnet.contrib import amp

    kv = mx.kv.create("p3_sync")
    mx.random.seed(3)
    layers = [gluon.nn.Dense(5, in_units=6) for _ in range(2)]
    parameters = gluon.parameter.ParameterDict()
    for layer in layers:
        layer.initialize(mx.init.Uniform(0.5))
        parameters.update(layer.collect_params())
    settings = {"learning_rate": 0.05, "momentum": 0.9}
    trainer = gluon.Trainer(parameters, "sgd", settings, kvstore=kv, compression_params=compression)
    amp.init_trainer(trainer)
    scaler = trainer._amp_loss_scaler = amp.loss_scaler.LossScaler()
    scaler._loss_scale = scaler._next_loss_scale = 256.0

    def step(number, factor=1.0):
        x = mx.nd.array(data(kv.rank, number))
        with mx.autograd.record():
            loss = (layers[0](x) ** 2).sum() + (layers[1](x) ** 2).sum() * factor
            with amp.scale_loss(loss, trainer) as scaled:
                mx.autograd.backward(scaled)
        trainer.step(BATCH * kv.num_workers)

    for number in range(STEPS):
        if number == BAD and overflows:
            before = [parameter.data().asnumpy() for parameter in parameters.values()]
            step(99, float("inf") if kv.rank == 0 else 1.0)
            for parameter, weight in zip(parameters.values(), before):
                np.testing.assert_array_equal(parameter.data().asnumpy(), weight)
            assert scaler._next_loss_scale == 128.0
        elif number == BAD and same_scales:
            scaler._next_loss_scale = 128.0
        step(number)
    return [parameter.data().asnumpy() for parameter in parameters.values()]


def train_with_torch(compression, overflows, same_scales):
    import torch

    import p3.torch

    torch.manual_seed(3)
    model = torch.nn.ModuleList(torch.nn.Linear(6, 5) for _ in range(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    if compression is not None and "down" in compression:
        compression = {"up": compression["type"], "down": compression["down"]}
    p3.torch.DistributedOptimizer(optimizer, model, synchronous=True, compression=compression, grad_scaler=scaler)
    rank, last = p3.torch.rank(), p3.torch.size() - 1

    def step(number, factor=1.0, is_idle=False):
        x = torch.from_numpy(data(rank, number))
        optimizer.zero_grad()
        loss = model[0](x).square().sum() + model[1](x).square().sum() * factor
        if not is_idle:
            scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.step(optimizer)
        scaler.update()

    for number in range(STEPS):
        if number == BAD and overflows:
            before = [parameter.detach().clone() for parameter in model.parameters()]
            # Worker 0, which encodes for its machine, may have no gradient itself.
            for bad, is_idle, scale in ((0, False, 128.0), (last, last > 0 and rank == 0, 64.0)):
                step(99, float("inf") if rank == bad else 1.0, is_idle)
                for parameter, weight in zip(model.parameters(), before):
                    assert torch.equal(parameter, weight)
                assert scaler.get_scale() == scale
        elif number == BAD and same_scales:
            scaler.update(new_scale=64.0)
        step(number)
    return [parameter.detach().numpy() for parameter in model.parameters()]


def main(framework):
    if framework == "mxnet":
        from mxnet.contrib import amp

        amp.init("float16", target_precision_ops=[])  # a CPU has few of half precision
    train = {"mxnet": train_with_mxnet, "torch": train_with_torch}[framework]
    for kind, compression in KINDS.items():
        undisturbed = train(compression, overflows=False, same_scales=kind == "2bit")
        disturbed = train(compression, overflows=True, same_scales=False)
        exact = train(None, overflows=False, same_scales=False)
        for weight, expected, uncompressed in zip(disturbed, undisturbed, exact):
            assert np.isfinite(weight).all(), (kind, weight)
            np.testing.assert_array_equal(weight.view("uint32"), expected.view("uint32"), err_msg=kind)
            assert not np.array_equal(weight, uncompressed)
        print(f"{kind}: as if there had been no overflow", flush=True)


if __name__ == "__main__":
    assert p3
    main(sys.argv[1])
