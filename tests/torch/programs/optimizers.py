"""The optimizers and schedulers that a program can name."""

import torch

optim = torch.optim


class Halving(optim.Optimizer):
    """Of a user's own: looks at all gradients at once."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        tensors = [tensor for group in self.param_groups for tensor in group["params"] if tensor.grad is not None]
        norm = sum(tensor.grad.square().sum() for tensor in tensors) ** 0.5 + 1
        for tensor in tensors:
            tensor.add_(tensor.grad / norm, alpha=-self.param_groups[0]["lr"])
        return loss


# With an epsilon that keeps what rounding leaves of a gradient of zero from becoming a step.
OPTIMIZERS = {
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "dampened": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3),
    "nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.5, nesterov=True),
    "maximize": lambda p: optim.SGD(p, lr=0.01, momentum=0.9, maximize=True),
    "adam": lambda p: optim.Adam(p, lr=0.05, eps=1e-4),
    "adam_decayed": lambda p: optim.Adam(p, lr=0.05, eps=1e-4, weight_decay=0.1, amsgrad=True),
    "adamw": lambda p: optim.AdamW(p, lr=0.05, eps=1e-4, weight_decay=0.1),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.05, lr_decay=0.1, initial_accumulator_value=0.1),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.01, eps=1e-4, weight_decay=0.01),
    "rmsprop_centered": lambda p: optim.RMSprop(p, lr=0.01, eps=1e-3, momentum=0.5, centered=True),
    "adamax": lambda p: optim.Adamax(p, lr=0.01, eps=1e-4),
    "nadam": lambda p: optim.NAdam(p, lr=0.01, eps=1e-4),
    "own": lambda p: Halving(p, lr=0.1),
}
SYNCHRONOUS = ("own",)  # whatever the options say
ON_SERVERS = [name for name in OPTIMIZERS if name not in ("adamax", "nadam", "own")]

SCHEDULERS = {
    "step": lambda o: optim.lr_scheduler.StepLR(o, 1, 0.5),
    "lambda": lambda o: optim.lr_scheduler.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "exponential": lambda o: optim.lr_scheduler.ExponentialLR(o, 0.9),
    "cosine": lambda o: optim.lr_scheduler.CosineAnnealingLR(o, 5),
    "restarts": lambda o: optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "warmup": lambda o: optim.lr_scheduler.SequentialLR(
        o, [optim.lr_scheduler.LinearLR(o, 0.1, total_iters=2), optim.lr_scheduler.PolynomialLR(o, 4)], milestones=[2]
    ),
    "plateau": lambda o: optim.lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5),
    "swa": lambda o: optim.swa_utils.SWALR(o, swa_lr=0.02, anneal_epochs=2),
    "onecycle": lambda o: optim.lr_scheduler.OneCycleLR(o, 0.1, 50, cycle_momentum=_has_momentum(o)),
    "cyclic": lambda o: optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, 2, cycle_momentum=_has_momentum(o)),
}


def make_optimizer(program, parameters):
    return OPTIMIZERS[program["optimizer"]](parameters)


def make_scheduler(kind, optimizer):
    return SCHEDULERS[kind](optimizer)


def _has_momentum(optimizer):
    return "momentum" in optimizer.defaults or "betas" in optimizer.defaults
