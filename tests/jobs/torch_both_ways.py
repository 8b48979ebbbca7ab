"""Jobs whose gradients and weights travel encoded, a function for each: torch_both_ways.py [--staged] NAME ARGUMENT...

A reference computes all workers' gradients here, encodes them as the documentation says, and keeps exact weights beside
those that are published.
"""

import sys

import torch
from compressions import sender
from torch import nn
from torch_steps import losses_behind

import p3.torch
from p3 import codecs
from p3.torch.parameters import arrays

RANK, SIZE = p3.torch.rank(), p3.torch.size()
SLICE = 50_000
MAX_NORM = 0.05
WAYS = {
    "int8": "int8",
    "bf16": "bf16",
    "fp16": "fp16",
    "down": {"down": "int8"},
    "each": {"up": "fp16", "down": {"type": "int8"}},
    "1bit": {"up": "int8", "down": "1bit"},
    "mixed": lambda name, shape: None if len(shape) < 2 else MIXED[name],
    "grouped": "bf16",  # and the first layer is of a group that has int8
}
MIXED = {"0.weight": {"up": {"type": "topk", "ratio": 0.2}, "down": "int8"}, "2.weight": {"up": "1bit", "down": "bf16"}}
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.5),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.005),
    "adamax": lambda parameters: torch.optim.Adamax(parameters, lr=0.01),  # on the workers
}


def made():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 50), nn.Tanh(), nn.Linear(50, 3))


def ways_of(way):
    """Of each parameter."""
    if way == "grouped":
        return [codecs.Ways.of(one) for one in ("int8", "int8", "bf16", "bf16")]
    given = WAYS[way]
    return [codecs.Ways.of(given(name, tuple(one.shape)) if callable(given) else given)
            for name, one in made().named_parameters()]  # fmt: skip


def trained_of(model, way):
    """What an optimizer takes."""
    if way != "grouped":
        return model.parameters()
    return [{"params": model[0].parameters(), "compression": "int8"}, {"params": model[2].parameters()}]


def loss_of(model, worker, step):
    generator = torch.Generator().manual_seed(100 * worker + step)
    x = torch.randn(8, 6, generator=generator)
    return (model(x) - x[:, :3].sin()).square().mean()


class Encoded:
    """One way of one parameter. `None`: as it is."""

    def __init__(self, compression, keeps=True):
        self.compression, self.keeps = compression, keeps
        self._send = self._sender()

    def _sender(self):
        if self.compression is None:
            return lambda flat: flat
        options = {name: value for name, value in self.compression.items() if name != "type"}
        return sender(self.compression["type"], SLICE, **options)

    def __call__(self, tensor):
        send = self._send if self.keeps else self._sender()
        return torch.from_numpy(send(tensor.detach().numpy().ravel())).view_as(tensor)


class Reference:
    """`published`: what all workers compute with."""

    def __init__(self, ways, make, updates_here, options):  # `ways`: of each parameter
        self.published, exact = made(), made()
        self.exact = list(exact.parameters())
        self.updates_here = updates_here
        self.clips, self.is_synchronous = "clipped" in options, "synchronous" in options
        self.plain = make(list(self.published.parameters()) if updates_here else self.exact)
        parameters = list(self.published.parameters())
        self.up = [[Encoded(each.up) for each in ways] for _ in range(SIZE)]
        self.down = [Encoded(each.down if one.dim() > 1 else None, keeps=updates_here)
                     for one, each in zip(parameters, ways)]  # fmt: skip

    def step(self, loss):
        parameters = list(self.published.parameters())
        sums = [torch.zeros_like(one) for one in parameters]
        for worker, up in enumerate(self.up):
            self.published.zero_grad()
            loss(self.published, worker).backward()
            for total, one, encoded in zip(sums, parameters, up):
                total += encoded(one.grad)
        if not self.updates_here:
            for one, total in zip(self.exact, sums):
                one.grad = total / SIZE
            self.plain.step()
            with torch.no_grad():
                for one, exact, encoded in zip(parameters, self.exact, self.down):
                    one.copy_(one + encoded(exact - one) if one.dim() > 1 else exact)
            return
        for one, total, encoded in zip(parameters, sums, self.down):
            one.grad = encoded(total / SIZE)
        if self.clips:
            nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        self.plain.step()


def take(model, trained, loss, reference, where):
    """One step, of which `loss(model, worker)` is each worker's."""
    trained.zero_grad()
    loss(model, RANK).backward()
    trained.step()
    reference.step(loss)
    if not reference.is_synchronous:  # else the weights are there, and this would be the next step's
        trained.synchronize()
    for (name, one), expected in zip(model.named_parameters(), reference.published.parameters()):
        difference = (one - expected).abs().max().item()
        assert difference < 2e-5, (where, name, difference)  # a code apart is more


def follows(way, optimizer, *options):
    """As the reference says, after each step. `options`: clipped, synchronous."""
    updates_here = optimizer == "adamax" or bool(options)
    given = {"max_grad_norm": MAX_NORM} if "clipped" in options else {}
    given["synchronous"] = "synchronous" in options
    reference = Reference(ways_of(way), OPTIMIZERS[optimizer], updates_here, options)
    model = made()
    trained = p3.torch.DistributedOptimizer(
        OPTIMIZERS[optimizer](trained_of(model, way)), model, compression=WAYS[way], **given
    )
    assert [one.comes_back_compressed for one in trained._p3.parameters] == [True, False, True, False]
    for step in range(8):
        take(model, trained, lambda model, worker, step=step: loss_of(model, worker, step), reference, step)
    if not updates_here:
        published = [one.detach().clone() for one in model.parameters()]
        trained.synchronize(exact=True)
        for one, exact in zip(model.parameters(), reference.exact):
            assert (one - exact).abs().max() < 2e-6, (way, optimizer)
        assert not torch.equal(model[0].weight, published[0])
        take(model, trained, lambda model, _worker: sum(one.sum() for one in model.parameters()), reference, "exact")
    print("worker %d follows" % RANK)


def scaled(way, *options):
    """A loss scaler, of which a step in the middle overflows on worker 0: as in plain torch, but for half precision.
    `options`: clipped, synchronous."""
    is_synchronous = "synchronous" in options
    given = {"max_grad_norm": MAX_NORM} if "clipped" in options else {}
    model, plain = made(), made()
    kind = torch.amp.GradScaler if is_synchronous else p3.torch.GradScaler
    scaler, reference = kind("cpu", init_scale=1024.0), torch.amp.GradScaler("cpu", init_scale=1024.0)
    trained = OPTIMIZERS["adamw"](model.parameters())
    trained = p3.torch.DistributedOptimizer(
        trained, model, compression=WAYS[way], synchronous=is_synchronous, grad_scaler=scaler, **given
    )
    of_plain = OPTIMIZERS["adamw"](plain.parameters())
    for step in range(8):
        factor = float("inf") if step == 4 else 1.0
        trained.zero_grad()
        scaler.scale(loss_of(model, RANK, step) * (factor if RANK == 0 else 1.0)).backward()
        if is_synchronous:
            trained.synchronize()
        scaler.step(trained)
        scaler.update()
        of_plain.zero_grad()
        losses = [loss_of(plain, worker, step) * (factor if worker == 0 else 1.0) for worker in range(SIZE)]
        reference.scale(sum(losses) / SIZE).backward()
        if given:
            reference.unscale_(of_plain)
            nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM)
        reference.step(of_plain)
        reference.update()
    trained.synchronize()
    assert scaler.get_scale() == reference.get_scale() == 512.0
    for (name, one), expected in zip(model.named_parameters(), plain.parameters()):
        assert (one - expected).abs().max() < 2e-3, (name, (one - expected).abs().max())  # a fifth of a step of AdamW
    print("worker %d has left out one step" % RANK)


def differs():
    """Worker 1's function chooses otherwise for one parameter."""
    model = made()
    p3.torch.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model,
        compression=lambda name, shape: "bf16" if name == "2.weight" and RANK == 1 else "int8",
    )  # fmt: skip


def learns(way, optimizer):
    """What it has lost after many steps is close to what plain training has."""
    first, losses = losses_behind(made, OPTIMIZERS[optimizer], loss_of, (None, WAYS[way]))
    print("worker %d: plain %.6f %s %.6f" % (RANK, losses[0], way, losses[1]))
    assert losses[0] < first / 5 and abs(losses[1] - losses[0]) < 0.05 * losses[0], (first, losses)
    print("worker %d has learned as much" % RANK)


if __name__ == "__main__":
    if sys.argv[1] == "--staged":
        arrays.DEVICES.add("cpu")
        del sys.argv[1]
    globals()[sys.argv[1]](*sys.argv[2:])
