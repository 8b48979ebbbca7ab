"""Where a program runs: in plain torch on the joined batch of all workers, or with P3 on this worker's share of it.

Each operation (operations.py) is a method; what it returns is what a script can read there. Both arenas run the same
lines, except where a script that uses P3 has another line: `if self.p3`.
"""

from __future__ import annotations

import collections
import copy
import io
import math
import os
import warnings

import torch
from programs.model import Net, batch, inner
from programs.optimizers import SYNCHRONOUS, make_optimizer, make_scheduler
from weights import leaves

F = torch.nn.functional


class Arena:
    def __init__(self, program, p3, rank, workers):
        """`p3`: the module p3.torch; None: plain torch."""
        torch.manual_seed(1)
        self.p3, self.rank, self.workers = p3, rank, workers
        self.program, self.dtype = program, getattr(torch, program["dtype"])
        self.is_synchronous = program["synchronous"] or program["optimizer"] in SYNCHRONOUS
        self.model = Net(program["compiled"]).to(self.dtype)
        if program["compiled"] == "whole":
            self.model = torch.compile(self.model, backend="eager")
        left_out = {id(tensor) for tensor in inner(self.model).c.parameters()} if program["left_out"] else set()
        trained = [tensor for tensor in self.model.parameters() if id(tensor) not in left_out]
        self.kept = list(self.model.parameters())  # as a script may that looks at them later
        half = len(trained) // 2
        parts = [trained] if program["optimizers"] == 1 else [trained[:half], trained[half:]]
        self.optimizers = [make_optimizer(program, part) for part in parts]
        self.is_distributed = False
        self.spent = []  # optimizers that have stepped with their gradients, which nobody has cleared
        self.is_synchronized = False
        self.losses, self.saved, self.schedulers, self.handles = [], [], [], []
        self.average = self.shadow = self.stored = self.scaler = None
        self.samples = None  # of the workers' batches in this step; None: equally many
        self.calls, self.reached, self.is_paused = 0, collections.Counter(), False
        self.save()

    def run(self, operation):
        """What the script reads in it, by name: tensors and numbers."""
        name, arguments = operation
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read = getattr(self, name)(**arguments)
        return {where: _copied(value) for where, value in leaves(read or {})}

    def distribute(self):
        self.is_distributed = True
        if self.p3 is None:
            self._weights_are_written()
            return
        options = {key: self.program[key] for key in ("synchronous", "max_grad_norm")}
        if self.program["compression"]:
            options["compression"] = {"type": self.program["compression"]}
        if self.program["staleness"]:
            options["staleness"] = math.inf if self.program["staleness"] == "inf" else self.program["staleness"]
        self.optimizers = [self.p3.DistributedOptimizer(one, self.model, **options) for one in self.optimizers]

    def _shares(self):
        """(worker, its weight in the mean) whose batches run here."""
        if not self.is_distributed:
            return [(0, 1.0)]
        if self.p3 is not None:
            return [(self.rank, 1.0)]
        samples = self.samples or [1] * self.workers
        return [(worker, samples[worker] / sum(samples)) for worker in range(self.workers)]

    def _loss(self, ways, seed, worker, entry="forward"):
        forward = self.model if entry == "forward" else inner(self.model).other
        x, ids = batch(seed, worker, self.dtype)
        return forward(ways[worker], x, ids).square().mean()

    # A step, and its parts

    def train(self, ways, seed, zero="none", first=True, closure=False, entry="forward", samples=None):
        closure = closure and len(self.optimizers) == 1

        def compute():
            if first or closure:
                self._zero(zero)
            self._weigh(samples)
            return self.backward(ways, seed, entry=entry)

        if closure:
            read = self.step(closure=compute)
        else:
            read = compute()
            self.step()
        if not first:
            self._zero(zero)
        return read

    def backward(self, ways, seed, no_sync=False, scale=1.0, entry="forward"):
        self._forget_spent()
        losses = {}
        self.is_paused = no_sync
        with self._paused(no_sync):
            for worker, share in self._shares():
                losses[worker] = loss = self._loss(ways, seed, worker, entry)
                if share > 0:
                    self._backward(loss * share * scale, worker)
        self.own_loss = losses.get(self.rank, losses.get(0)).detach()
        self.mean_loss = sum(losses[worker] * share for worker, share in self._shares()).detach()
        return {"loss": self.own_loss}

    def _weigh(self, samples):
        samples = samples and samples[: self.workers]
        if not self.is_distributed or not samples or sum(samples) == 0:
            return
        if self.p3 is not None:
            for optimizer in self.optimizers:
                optimizer.weigh(samples[self.rank])
            return
        self._forget_spent()
        # What has no_sync() kept of this step? P3 gives that its weight as well, and here it is in the sum already.
        assert all(tensor.grad is None or not tensor.grad.any() for tensor in self.kept)
        self.samples = samples

    def _backward(self, loss, worker):
        self.is_synchronized = False
        if not loss.requires_grad:
            return
        if self.program["compression"] and self.p3 is None:
            self._require_within_float16(loss, worker)
        loss.backward()

    def _require_within_float16(self, loss, worker):
        """What a worker's gradients are at most; beyond that, they are documented as lost."""
        trained = [tensor for tensor in self.kept if tensor.requires_grad]
        gradients = torch.autograd.grad(loss, trained, retain_graph=True, allow_unused=True)
        largest = max(gradient.abs().max().item() for gradient in gradients if gradient is not None)
        self.reached[worker] += largest * self.workers
        assert self.reached[worker] < torch.finfo(torch.float16).max

    def forward(self, ways, seed):
        self.losses = [(self._loss(ways, seed, worker) * share, worker) for worker, share in self._shares()]

    def backward_of_forward(self):
        self._forget_spent()
        losses, self.losses = self.losses, []
        for loss, worker in losses:
            self._backward(loss, worker)

    def step(self, closure=None, which="all"):
        for optimizer in self._chosen(which):
            if closure is None:
                self._forget_spent()
                self._clip_by_norm(optimizer)
                optimizer.step()
            else:
                loss = optimizer.step(lambda: self._evaluate_closure(optimizer, closure))
        self.reached, self.samples = collections.Counter(), None
        self.spent = [*self.spent, *self._chosen(which)]
        if closure:
            is_mean = self.p3 is None and self.is_synchronous and self.is_distributed
            return {"loss": self.mean_loss if is_mean else loss}

    def _evaluate_closure(self, optimizer, closure):
        closure()
        self._clip_by_norm(optimizer)
        return self.own_loss

    def _clip_by_norm(self, optimizer):
        """What DistributedOptimizer(max_grad_norm=) does."""
        if self.p3 is None and self.is_distributed and self.program["max_grad_norm"] is not None:
            torch.nn.utils.clip_grad_norm_(_of(optimizer), self.program["max_grad_norm"])

    def train_clipped(self, ways, seed, norm, kind, reads):
        """A step that the script clips itself; it may read the norm, or not."""
        self._zero("none")
        read = self.backward(ways, seed)
        norms = []
        for optimizer in self.optimizers:
            if self._has_p3():
                norms.append(optimizer.clip_grad_norm_(norm, kind))
            else:
                norms.append(torch.nn.utils.clip_grad_norm_(_of(optimizer), norm, kind))
        if reads == "before":
            norms = [float(one) for one in norms]
        self.step()
        return read if reads == "never" else {**read, "norms": [float(one) for one in norms]}

    def _forget_spent(self):
        """With P3, gradients are None after step(), so a script has to clear them before it adds to them."""
        if self.spent and self.is_distributed and not self.is_synchronous:
            self._zero("none", self.spent)
        self.spent = []

    def zero_grad(self, zero="none"):
        self._zero(zero)

    def _zero(self, zero, optimizers=None):
        """`zero`: "none" or "zeros", by the optimizers, or by the model: "model_none" ..."""
        for one in [self.model] if zero.startswith("model") else optimizers or self.optimizers:
            one.zero_grad(set_to_none=zero.endswith("none"))
        self.spent, self.reached, self.is_synchronized = [], collections.Counter(), False

    def scaled(self, ways, seed, overflow=False):
        """A step with GradScaler, which leaves it out if a gradient is infinite."""
        self.scaler = self.scaler or torch.amp.GradScaler("cpu", init_scale=4.0)
        self._zero("none")
        for worker, share in self._shares():
            loss = self._loss(ways, seed, worker) * share * (float("inf") if overflow else 1.0)
            self._backward(self.scaler.scale(loss), worker)
        self.synchronize()
        for optimizer in self.optimizers:
            gradients = [tensor.grad for tensor in _of(optimizer) if tensor.grad is not None]
            if not gradients:
                continue
            if self.p3 is None:  # whose step() clips what the scaler has unscaled, and is left out if that overflows
                self.scaler.unscale_(optimizer)
                if all(gradient.isfinite().all() for gradient in gradients):
                    self._clip_by_norm(optimizer)
            self.scaler.step(optimizer)
        self.scaler.update()
        self.spent = self.optimizers
        return {"scale": self.scaler.get_scale()}

    def _paused(self, is_paused):
        import contextlib

        stack = contextlib.ExitStack()
        if is_paused and self._has_p3():
            for optimizer in self.optimizers:
                stack.enter_context(optimizer.no_sync())
        return stack

    # What P3 adds

    def synchronize(self):
        self.is_synchronized = True
        if self._has_p3():
            for optimizer in self.optimizers:
                optimizer.synchronize()

    def broadcast(self):
        self._weights_are_written()
        if self._has_p3():
            for optimizer in self.optimizers:
                optimizer.broadcast()

    def _has_p3(self):
        return self.p3 is not None and self.is_distributed

    def release(self):
        """Between two steps the training ends, and another begins with the same optimizers."""
        self.step()
        self.zero_grad()
        if self._has_p3():
            for optimizer in self.optimizers:
                optimizer.release()
        if self.is_distributed:
            self.distribute()

    def _weights_are_written(self):
        """With the values that they have; torch refuses graphs from before, and so plain torch must, too."""
        if self.p3 is None and self.is_distributed:
            for one in self.model.parameters():
                torch.autograd.graph.increment_version(one)

    # What a script changes

    def clip(self, how="norm", sync=False):
        """The gradients, between backward() and step()."""
        if sync:
            self.synchronize()
        gradients = [tensor.grad for tensor in self.kept if tensor.grad is not None]
        if self.spent or not gradients:
            return
        # What no_sync() has kept here is this worker's own, with DDP as with P3: a batch that is not joined.
        is_mean = self.is_synchronous and self.is_synchronized
        assert self.workers == 1 or not self.is_distributed or not self.is_paused or is_mean
        if how == "norm":
            torch.nn.utils.clip_grad_norm_(self.kept, 0.1)
        for gradient in gradients:
            if how == "value":
                gradient.clamp_(-0.01, 0.01)
            if how == "data":
                gradient.data.clamp_(-0.01, 0.01)

    def write(self, which, how="no_grad", sync=False, broadcast=False, of="parameters"):
        """Weights. `of`: whence the script has them."""
        if sync:
            self.synchronize()
        with torch.no_grad():
            for number, tensor in enumerate(self._list_of(of)):
                if number in which:
                    (tensor if how == "no_grad" else tensor.data).clamp_(-0.2, 0.2)
        if broadcast:
            self.broadcast()

    def _list_of(self, of):
        if of == "kept":
            return self.kept
        if of == "named":
            return [tensor for _, tensor in self.model.named_parameters()]
        return list(self.model.parameters())

    def set(self, field, value):
        for optimizer in self.optimizers:
            group = optimizer.param_groups[0]
            begins_momentum = field == "momentum" and "alpha" in group and not group[field]  # RMSprop cannot do that
            if field in group and not begins_momentum:
                group[field] = value

    def requires_grad(self, which, on):
        for number, tensor in enumerate(self.kept):
            if number in which:
                tensor.requires_grad_(on)

    def scheduler(self, kind):
        self.schedulers.append((kind, make_scheduler(kind, self.optimizers[0])))

    def schedule(self):
        for kind, scheduler in self.schedulers:
            scheduler.step(*([1.0] if kind == "plateau" else []))
        return self._lr()

    def _lr(self):
        return {"lr": [group["lr"] for one in self.optimizers for group in one.param_groups]}

    def hook(self, kind):
        """One of the script's own."""
        net = inner(self.model)
        if kind == "tensor":
            self.handles.append(net.a.weight.register_hook(lambda gradient: gradient * 0.5))
        elif kind == "accumulated":
            self.handles.append(net.b.weight.register_post_accumulate_grad_hook(self._count))
        elif kind == "forward":
            self.handles.append(net.a.register_forward_hook(lambda _module, _inputs, output: output * 2))
        elif kind == "forward_pre":
            self.handles.append(net.b.register_forward_pre_hook(lambda _module, inputs: (inputs[0] * 0.5,)))
        elif kind == "step_pre":
            self.handles.append(self.optimizers[0].register_step_pre_hook(self._count_step))
        elif kind == "step_post":
            self.handles.append(self.optimizers[0].register_step_post_hook(self._count_step))

    def _count(self, *_ignored):
        pass

    def _count_step(self, *_ignored):
        self.calls += 1

    def unhook(self):
        while self.handles:
            self.handles.pop().remove()
        return {"calls": self.calls}

    # What a script reads

    def evaluate(self, way, seed, mode="no_grad", entry="forward", of="model"):
        model = {"model": self.model, "inner": inner(self.model), "average": self.average or self.model}[of]
        x, ids = batch(seed, 9, self.dtype)
        context = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": torch.enable_grad}[mode]
        model.eval()
        try:
            with context():
                forward = model if entry == "forward" or of == "average" else inner(model).other
                return {"output": forward(way, x, ids).detach().clone()}
        finally:
            model.train()

    def look(self, at):
        net = inner(self.model)
        if at == "model":
            return {"model": self.model.state_dict()}
        if at == "inner":
            return {"inner": net.state_dict()}
        if at == "block":
            return {"block": inner(net.block).state_dict()}
        if at == "part":
            return {"part": net.a.state_dict()}
        if at == "optimizer":
            return {"optimizers": [one.state_dict() for one in self.optimizers]}
        if at in ("parameters", "named"):
            return {"parameters": [tensor.detach() for tensor in self._list_of(at)]}
        if at == "kept":
            self.synchronize()
            return {"parameters": [tensor.detach() for tensor in self.kept]}
        if at == "gradients" and self._sees_gradients():
            return {"gradients": [torch.zeros_like(one) if one.grad is None else one.grad for one in self.kept]}
        return self._lr()

    def _sees_gradients(self):
        is_mean = self.is_synchronous and self.is_synchronized
        return not self.spent and (is_mean or self.workers == 1 or not self.is_distributed)

    def everything(self):
        """At the end of each program. What was left of a step ends before."""
        self.step()
        self.zero_grad()
        read = {"scale": self.scaler.get_scale()} if self.scaler else {}
        for at in ("model", "inner", "optimizer", "kept", "lr"):
            read.update(self.look(at))
        return read

    def save(self):
        states = [one.state_dict() for one in self.optimizers]
        self.saved.append(copy.deepcopy((inner(self.model).state_dict(), states)))

    def load(self, slot, what="both", part="all", through="memory", sync=False, broadcast=False):
        """What save() took as number `slot`, the first being from before the first step; -1: from other training."""
        if sync:
            self.synchronize()
        model, optimizers = copy.deepcopy(self._plain() if slot < 0 else self.saved[slot % len(self.saved)])
        if part == "some":
            assert self.program["optimizer"] != "adagrad", "without its sum, torch's next step is a KeyError"
            model = {name: value for name, value in model.items() if name.startswith(("a.", "scale"))}
            for content in optimizers:
                content["state"] = {number: one for number, one in content["state"].items() if number % 2}
        if through == "file":
            model, optimizers = _through_file((model, optimizers))
        if what in ("model", "both"):
            inner(self.model).load_state_dict(model, strict=part == "all")
        if what == "layer":
            layer = {name[2:]: value for name, value in model.items() if name.startswith("a.")}
            inner(self.model).a.load_state_dict(layer)
        if what in ("optimizer", "both"):
            for optimizer, content in zip(self.optimizers, optimizers):
                optimizer.load_state_dict(content)
        if broadcast:
            self.broadcast()

    def _plain(self):
        other = Arena(dict(self.program, compiled=""), None, 0, 1)
        for seed in (7, 8):
            other.train(["abeh"], seed)
        other.save()
        return other.saved[-1]

    def copy(self, sync=False):
        if sync:
            self.synchronize()
        other = copy.deepcopy(self.model)
        return {"copy": other.state_dict()}

    def average_weights(self, sync=False):
        """torch's own moving average of the model."""
        if sync:
            self.synchronize()
        if self.average is None:
            self.average = torch.optim.swa_utils.AveragedModel(inner(self.model))
        self.average.update_parameters(inner(self.model))
        return {"average": self.average.module.state_dict()}

    def ema(self, action, sync=False, broadcast=False, of="parameters"):
        """A moving average as scripts write it: the weights give way to it for a while, through .data."""
        if sync:
            self.synchronize()
        weights = self._list_of(of)
        if action == "update" or self.shadow is None:
            values = [one.detach().clone() for one in weights]
            shadow = self.shadow or values
            self.shadow = [0.5 * (old + new) for old, new in zip(shadow, values)]
            return {"shadow": self.shadow}
        if action == "copy_to":
            self.stored = [one.detach().clone() for one in weights]
        values = self.shadow if action == "copy_to" else self.stored or [one.detach().clone() for one in weights]
        for one, value in zip(weights, values):
            one.data.copy_(value)
        if broadcast:
            self.broadcast()

    def pickle(self, what):
        if what == "states":
            return {"loaded": _through_file((self.model.state_dict(), [one.state_dict() for one in self.optimizers]))}
        torch.save(self.model if what == "model" else self.optimizers[0], io.BytesIO())

    def distributed_checkpoint(self):
        from torch.distributed.checkpoint.state_dict import get_state_dict

        if self.p3 is None:  # else torch takes a step that makes states of zeros; P3 makes none
            assert all(one.state for one in self.optimizers)
        self._zero("none")  # else torch makes no states, and P3 has given the gradients away
        return {"states": get_state_dict(self.model, self.optimizers)}

    def fork(self, way, seed, mode="no_grad"):
        """A child evaluates the model, as a worker process of a DataLoader may."""
        if self.p3 is None:
            return self.evaluate(way, seed, mode)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                with os.fdopen(writing, "wb") as out:
                    try:
                        torch.save(self.evaluate(way, seed, mode), out)
                    except Exception as error:
                        torch.save({"error": str(error)}, out)
            finally:
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as said:
            content = said.read()
        _, status = os.waitpid(child, 0)
        assert status == 0, "a forked child that runs the model has died with status %d" % status
        read = torch.load(io.BytesIO(content), weights_only=True)
        if "error" in read:
            raise RuntimeError(read["error"])
        return read

    def mistake(self):
        """Only with P3: the weights become others. No program draws it; it shows that the machine can find it."""
        if self.p3 is not None:
            with torch.no_grad():
                inner(self.model).a.weight.mul_(1.001)
            self.broadcast()

    def _chosen(self, which):
        return self.optimizers if which == "all" else [self.optimizers[which % len(self.optimizers)]]


def _of(optimizer):
    return [tensor for group in optimizer.param_groups for tensor in group["params"]]


def _through_file(content):
    file = io.BytesIO()
    torch.save(content, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def _copied(value):
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
