"""DistributedOptimizer: one torch optimizer, whose parameters are trained by all workers of a job together.

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    optimizer = p3.torch.DistributedOptimizer(optimizer, model)

It stays the same object, of a subclass of its class, so learning rate schedulers and isinstance go on working. The
gradient of each parameter leaves when backward has computed it; step() waits for nothing; each module waits for its own
new weights before its next forward pass (forward.py).

Who updates: the servers, where they have the optimizer with torch's arithmetic (rules.py). Else the workers, from the
mean gradient: each parameter when its module needs it, if the optimizer looks at one parameter at a time, and else all
in step(), which then waits for all gradients: a *synchronous* optimizer.
"""

from __future__ import annotations

import functools
import pickle
from typing import Any, Callable, ContextManager, Dict, NoReturn, Optional, Sequence, Union

import torch

from p3.frontend.compression import Given
from p3.plan import choices
from p3.plan import strategy as strategies
from p3.torch.requirements import require_model, require_norm
from p3.torch.rounds.choice import compressions_of, rounds_of
from p3.torch.rounds.rounds import Rounds
from p3.torch.sites import site as sites


def DistributedOptimizer(  # a class to its users
    optimizer: torch.optim.Optimizer,
    model: Union[torch.nn.Module, Sequence[torch.nn.Module]],
    *,
    synchronous: bool = False,
    max_grad_norm: Optional[float] = None,
    compression: Given = None,
    staleness: Union[int, float] = 0,
    grad_scaler: Optional[torch.amp.GradScaler] = None,
    independent: bool = False,
    strategy: strategies.Given = None,
) -> torch.optim.Optimizer:
    """Has all workers train the optimizer's parameters together; returns the same object.

    `model` has them, or several models in a list. Call it on every worker at the same point, when the optimizer has all
    its groups and before the first step; it returns when every worker has rank 0's parameters and buffers. Gradients
    are averaged over the workers. Of parameters that another one trains, or this one already, that one is released.

    `synchronous`: step() waits for the mean gradients and updates here, and synchronize() brings them before, so that
    the script can look at them and change them: GradScaler, clipping by value.

    `max_grad_norm`: each step clips the mean gradients to that global norm; math.inf: by none, but clip_grad_norm_()
    may. step() waits for nothing, as without it, if the optimizer updates each parameter by itself: then the servers
    tell the norm before the gradients come, and the workers update. Steps with a norm that is not finite are left out.

    `compression`, the same on every worker: "int8", "bf16" or any other type of docs/compression.md. So the float32
    gradients leave in fewer bytes, and what comes back, too: of weights their changes, which the servers, who keep the
    exact weights, send to all workers alike; of the mean gradients, where the workers update, these. Each way its own:
    {"up": "int8", "down": "bf16"}, None for neither; a type with options: {"type": "2bit", "threshold": 0.01} in the
    place of its name. {"type": "int8"} alone: what leaves. {"type": "dgc", "ratio": 0.001}: deep gradient compression,
    of torch.optim.SGD. {"type": "lowrank", "rank": 4}: two thin matrices in the place of one; with any optimizer, that
    then runs on the workers. Parameters of one dimension come back exact. Or a function of a parameter's name and shape
    that returns any of these, the same on every worker: `lambda name, shape: "int8" if len(shape) > 1 else None`. A
    param group's own entry "compression", but no function, is that of its parameters.

    `grad_scaler`: the p3.torch.GradScaler that scales this optimizer's losses; so steps wait for nothing, as with
    max_grad_norm. Or torch's, with `synchronous`: compression that keeps what it leaves out must know of it, as that
    has the scale of the loss. Steps that it leaves out leave nothing behind; for that each worker keeps 4 bytes more
    for each parameter.

    `staleness`, the same on every worker: how many steps the fastest worker may be ahead of the slowest, or math.inf.
    Each gradient, divided by the number of workers, then updates the weights at once, and a step need not wait for the
    answer to the one before (docs/strategies.md): whoever keeps a gradient's memory calls synchronize() before writing
    there. Only where the servers update.

    `independent`: the optimizer, of a class that P3 does not know, updates each parameter by its gradient, state and
    its group alone, as Lion does, so each can be updated when its module needs it; else step() waits for all gradients.
    ValueError in a later step if an update has changed the group, or a number of the optimizer's own. Of torch's own
    optimizers it is known, and need not be said.

    `strategy`, the same on every worker: which servers hold what of these parameters, and how they are compressed where
    the script leaves that open; the path of a file that `p3 plan` has written, or a dict of what such a file has
    (docs/planning.md#the-file). It has entries for these parameters alone. With
    P3_STRATEGY, which is for all keys of a job, it must say the same. "auto": it is made while the job trains, and
    again when links change; then the workers update, and the weights have the same bits as with any other one.

    Raises ValueError for what cannot be trained so, ConfigError or RendezvousError if there is no job to join.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError("DistributedOptimizer takes a torch.optim.Optimizer, not a %s" % type(optimizer).__name__)
    if hasattr(optimizer, "_p3_local"):
        raise ValueError("DistributedOptimizer: this optimizer has LocalSteps: call its release() before")
    sites.refuse("DistributedOptimizer", choices.GRADIENTS)
    models = [model] if isinstance(model, torch.nn.Module) else list(model)
    for one in models:
        require_model(one)
    if max_grad_norm is not None:
        require_norm(max_grad_norm, "max_grad_norm")
    compressions = compressions_of(optimizer, compression)
    plan = strategies.AUTO if strategy == strategies.AUTO else strategies.given(strategy)
    if isinstance(optimizer, _Distributed):
        optimizer.release()
        optimizer.__class__ = type(optimizer).__bases__[1]
    optimizer._p3 = rounds_of(optimizer, models, synchronous, max_grad_norm, compressions, staleness, grad_scaler,
                              independent, plan)  # fmt: skip
    kind = type(optimizer)
    optimizer.__class__ = type(kind.__name__, (_Distributed, kind), {"__module__": kind.__module__})
    optimizer._patch_step_function()
    if "step" in vars(optimizer):  # a learning rate scheduler has bound the old one
        optimizer.step = _as_seen_by_scheduler(optimizer)
    return optimizer


class _Distributed:
    """What a distributed optimizer has beside the methods of its class. Threads: as any torch optimizer, one."""

    _p3: Rounds

    def step(self, closure: Optional[Callable] = None) -> Any:
        """Ends the step; a synchronous one waits and updates, any other returns at once. Returns the closure's loss.

        Afterwards gradients that are under way are None in their parameters.
        """
        return self._p3.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. After zero_grad(set_to_none=False) gradients that have left count as zero until there are others:
        momentum and weight decay go on."""
        self._p3.zero_grad(super().zero_grad, set_to_none)

    def synchronize(self, exact: bool = False) -> None:
        """Waits until every parameter has its new value; of a synchronous optimizer, every gradient its mean.

        Call it before reading or writing parameters other than by their modules. `exact`: where compression of what
        comes back keeps exact weights on the servers, parameters have those until the next step's forward pass, to
        evaluate with or to save them; by every worker at the same point.
        """
        self._p3.synchronize()
        if exact:
            self._p3.take_exact_weights()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """In the place of torch.nn.utils.clip_grad_norm_(), of all the optimizer's parameters, behind the step's last
        backward pass, by every worker. The norm of the mean gradients, before.

        It waits for nothing, nor does step(): who reads the tensor that it returns waits for the norm. Where that is
        not finite, no worker takes the step; or with `error_if_nonfinite` all raise RuntimeError when they wait for it.
        `norm_type` 2 or math.inf. `max_norm` may be another one in each step, the same on every worker. ValueError
        unless DistributedOptimizer was given a max_grad_norm, which may be math.inf, or synchronous=True.
        """
        return self._p3.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)

    def weigh(self, samples: Union[float, torch.Tensor]) -> None:
        """This worker's gradients of this step are of so many samples or tokens, and weigh so much in the mean.

        Before the step's last backward pass, on every worker in the same steps; the earlier the better, as the first
        gradient waits until all have called it. Whole numbers or others; 0: nothing of them counts, whatever they are.
        With no_sync() the number is that of the whole step. It holds for one step, and in a synchronous one up to
        synchronize(); a worker in join() counts as 0. Returns at once.

        A gradient that has left has its weight in it. ValueError if it is called when some have left, twice in a step,
        with staleness, or for what is no such number; and, a little later, if only some workers call it.
        """
        self._p3.weigh(samples)

    def change_strategy(self, strategy: strategies.Given) -> None:
        """From the next step on servers hold what `strategy` says, as DistributedOptimizer() takes it, but "auto";
        None: what they would without one.

        Between two steps, by every worker at the same point, where the workers update. It waits for the step under
        way, and until all have gone over. The weights have the same bits as without it, unless gradients are compressed
        and slices get another size. ValueError where it cannot be, ConfigError for a strategy that does not fit.
        """
        self._p3.change_strategy(strategies.given(strategy))

    def no_sync(self) -> ContextManager[None]:
        """Within it, backward passes add up gradients and send nothing."""
        return self._p3.no_sync()

    def broadcast(self) -> None:
        """Gives every worker rank 0's parameters and buffers, at the same point of every worker's program."""
        self._p3.broadcast()

    def join(self, after_step: Optional[Callable[[], Any]] = None) -> None:
        """For a worker that has no batches left: returns when every worker has called it. So steps may be uneven.

        Until then the others' steps go on without this worker's gradients, which count as zero in the mean.
        `after_step` is called after each of them: a learning rate scheduler's step, for example.
        """
        self._p3.join(after_step)

    def release(self) -> None:
        """Ends the distributed training of these parameters: model and parameters are plain torch's again, with the
        weights after the last step, the optimizer's state is in it, and the servers keep nothing of them.

        Every worker calls it at the same point; it returns when all have, and TimeoutError names who has not. Another
        DistributedOptimizer over the same parameters calls it by itself. Of a step without its step() nothing stays.
        From here on state_dict(), load_state_dict() and zero_grad() are torch's own, and step() is an error. Of dgc's
        momentum, which each worker has, nothing is left.
        """
        self._p3.release()

    def order_stats(self) -> Dict[str, float]:
        """How well the order in which gradients leave has foreseen the forward passes, {} without priorities.

        orders: how many there have been; passes: forward passes since the first. Of their pairs of parameters,
        `followed` is the share that were used in the order foreseen, `first` what it would be with the first pass's.
        """
        return self._p3.order_stats()

    def state_dict(self) -> Dict[str, Any]:
        """In torch's own layout, which the plain optimizer loads. Waits for the step under way, and for the servers."""
        return self._p3.with_states(super().state_dict)

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Takes over what state_dict() of this or of the plain optimizer gave; on every worker at the same point."""
        self._p3.load(super().load_state_dict, state_dict)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """GradScaler asks before it unscales the gradients and steps."""
        return self._p3.require_mean_gradients()

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, _value: bool) -> None:
        pass  # torch sets it for fused optimizers

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        raise pickle.PicklingError("a distributed optimizer cannot be copied or saved whole: save its state_dict()")

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        raise ValueError(
            "add_param_group comes before DistributedOptimizer: wrap the optimizer when it has all groups. In the "
            "middle of a training make a new optimizer with all of them on every worker, for DistributedOptimizer"
        )


def _as_seen_by_scheduler(optimizer: torch.optim.Optimizer) -> Callable:
    """A scheduler puts a wrapper into the optimizer that notes that step() was called, and calls what step() was."""
    mark = next((mark for mark in _MARKS_OF_SCHEDULERS if hasattr(optimizer.step, mark)), None)
    if mark is None:
        raise ValueError("the step() of this optimizer was replaced; wrap the optimizer in DistributedOptimizer before")
    step = type(optimizer).step

    @functools.wraps(step)
    def noted(*arguments, **keywords):
        optimizer._opt_called = True
        optimizer._step_count = getattr(optimizer, "_step_count", 0) + 1  # what torch looked at before 2.4
        return step(optimizer, *arguments, **keywords)

    setattr(noted, mark, True)
    return noted


_MARKS_OF_SCHEDULERS = ("_wrapped_by_lr_sched", "_with_counter")  # since torch 2.4, and before
