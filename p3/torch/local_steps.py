"""LocalSteps: a torch optimizer that trains on each worker by itself, and shares its weights now and then.

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    optimizer = p3.torch.LocalSteps(optimizer, model, every=30, fragments=6, delay=2, codec="int4")

It stays the same object, whose steps are torch's own: gradients, clipping, schedulers and scalers are the script's.
Behind each step p3/frontend/local_steps/, which has the algorithm, sends what is due and merges what has come.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import types
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, NoReturn, Optional, Sequence, Union

import torch

from p3.frontend.local_steps.options import Options
from p3.plan import choices
from p3.plan.strategy import Given
from p3.settings import Settings
from p3.torch.requirements import is_factored, parameters_of, require_model, require_parameters
from p3.torch.rounds.forward import named_parameters
from p3.torch.shared_weights import Ended, Parameter, Shared
from p3.torch.sites import site as sites
from p3.torch.sites.optimizer import OfSite


def LocalSteps(  # a class to its users
    optimizer: torch.optim.Optimizer,
    model: Union[torch.nn.Module, Sequence[torch.nn.Module]],
    *,
    every: int,
    fragments: int = 1,
    delay: int = 0,
    alpha: Optional[float] = None,
    codec: Union[None, str, Dict[str, Any]] = None,
    outer: Optional[Mapping[str, Any]] = None,
    strided: bool = False,
    strategy: Given = None,
    quorum: Optional[int] = None,
    grace: Optional[float] = None,
    **others: Any,
) -> torch.optim.Optimizer:
    """Lets each worker take steps of its own, and has them share their weights; returns the same object.

    `model` has the parameters, or several models in a list; in a site() as they are, or in DistributedDataParallel over
    its group. Call it on every worker, and there on every process, at the same point, before the first
    step; it returns when every worker has rank 0's parameters and buffers. All workers take the same number of steps.
    Buffers, as BatchNorm's, stay each worker's own from there on. `optimizer`: any of torch's, or of your own.

    `every`: the steps between two exchanges of a parameter. `fragments`: into so many, of about equal bytes, the model
    is cut by its layers, in the order in which they are registered; each is exchanged at a time of its own. With
    `strided` fragment p has every `fragments`-th layer instead. `delay`: so many steps behind an exchange's begin each
    worker merges the new global weights into its own, and waits for them only then.

    `alpha`: the share of the local weights in that; 0: the global ones take their place. None: 0.5, without a delay 0.

    `outer`: the servers' optimizer, SGD: {"lr": 0.7, "momentum": 0.9, "nesterov": True}, of which any may be left out.

    `codec`: "int4" or any other type of docs/compression.md but dgc and lowrank, both ways; or each its own, {"up":
    "int4", "down": "int8"}. Parameters of one dimension come back exact.

    `strategy`: as of DistributedOptimizer.

    `quorum`, `grace`: an exchange is over when so many workers have sent, and so many seconds later at the latest. What
    others send later counts in the next one. None: it waits for all workers.

    The same on every worker: ValueError where they differ, and for what cannot be trained so. ConfigError or
    RendezvousError if there is no job to join.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError("LocalSteps takes a torch.optim.Optimizer, not a %s" % type(optimizer).__name__)
    if hasattr(optimizer, "_p3") or isinstance(optimizer, _Local):
        raise ValueError("LocalSteps takes a plain optimizer, and this one is distributed already: call its release(), "
                         "and make a new one")  # fmt: skip
    options = Options.checked(every, fragments, delay, alpha, codec, outer, strided, strategy, quorum, grace)
    settings = Settings.from_env(os.environ)
    models = [model] if isinstance(model, torch.nn.Module) or not isinstance(model, Iterable) else list(model)
    site = sites.current()
    if site is not None:
        models = [site.unwrapped(one) for one in models]
    for one in models:
        require_model(one, "LocalSteps")
    found = [choices.FACTORS] * any(map(is_factored, parameters_of(optimizer))) + [choices.SITES] * (site is not None)
    options.require_together(settings, others, _ARGUMENTS, *found)
    shared = _shared(optimizer, models)
    if site is None:
        optimizer._p3_local = Shared(optimizer, models, shared, options, settings)
    else:
        optimizer._p3_local = OfSite(site, optimizer, models, shared, options, settings)
    kind = type(optimizer)
    content = {"__module__": kind.__module__, "step": _as_shared(kind.step)}
    optimizer.__class__ = type(kind.__name__, (_Local, kind), content)
    if "step" in vars(optimizer):  # a learning rate scheduler has bound the old one
        optimizer.step = types.MethodType(_as_shared(_without_self(optimizer.step)), optimizer)
    return optimizer


class _Local:
    """What such an optimizer has beside the methods of its class. Threads: as any torch optimizer, one."""

    _p3_local: Union[Shared, Ended]

    def synchronize(self) -> None:
        """Waits for all exchanges under way, which are merged when their time comes."""
        self._p3_local.synchronize()

    def take_global(self) -> None:
        """The parameters become the global ones, for good; on every worker, as at the end of a training. Waits for what
        is under way. Steps since a fragment's last exchange are not in it."""
        self._p3_local.take_global()

    @contextlib.contextmanager
    def global_weights(self) -> Iterator[None]:
        """Within it the parameters are the global ones, the same bits on all workers: to evaluate, or to save the
        model. Behind it they are this worker's own again. Any worker may do so alone; waits for what is under way."""
        with self._p3_local.global_weights():
            yield

    def broadcast(self) -> None:
        """Rank 0's parameters and buffers become all workers', and the global ones: on every worker at the same point,
        as behind model.load_state_dict() of a pretrained model. Momentum stays."""
        self._p3_local.broadcast()

    def weigh(self, samples: Union[float, torch.Tensor]) -> None:
        """The step under way trains on so many samples or tokens. This worker's differences weigh as much in the mean
        as all of them since the fragment's last exchange; at the end of that the count begins anew.

        Once in each step, before it, with the samples of all batches that it accumulates; the earlier the better, as
        they are told to the other workers at once. On every worker: ValueError, a little later, if some have called it
        since an exchange and others have not. Steps without it count nothing. 0: nothing counts, whatever the weights
        are. A step that a scaler leaves out is weighed again behind zero_grad(). Returns at once.
        """
        self._p3_local.weigh(samples)

    def zero_grad(self, *arguments: Any, **keywords: Any) -> None:
        super().zero_grad(*arguments, **keywords)
        self._p3_local.leave_out()

    def stats(self) -> Dict[str, float]:
        """step: this worker's; merges: of fragments; waits: how many of them came before the values, and waited_s: for
        how long training then waited in all; under_way: fragments sent and not merged."""
        return self._p3_local.stats()

    def release(self) -> None:
        """Ends it: the optimizer is torch's own again, the parameters stay as they are on each worker, and the servers
        keep nothing. On every worker at the same point."""
        self._p3_local.release()

    def state_dict(self) -> Dict[str, Any]:
        """In torch's own layout, which the plain optimizer loads, with "local_steps" beside it: the position in the
        schedule, global weights and outer momentum. Waits for what is under way, and for the servers."""
        return self._p3_local.with_outer(super().state_dict())

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Takes over what state_dict() of this gave, each worker its own, or of the plain optimizer, which leaves
        schedule, global weights and momentum as they are; on every worker at the same point. Load the model as well,
        in any order, but behind LocalSteps."""
        of_torch = {name: value for name, value in state_dict.items() if name != "local_steps"}
        self._p3_local.load(functools.partial(super().load_state_dict, of_torch), state_dict.get("local_steps"))

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        raise pickle.PicklingError("an optimizer with LocalSteps cannot be copied or saved: save its state_dict()")

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        raise ValueError("add_param_group comes before LocalSteps: wrap the optimizer when it has all groups")


def _as_shared(step: Callable) -> Callable:
    """A step() that does what `step` does and then, once, what LocalSteps does behind one: also where one calls
    another, as a class's own that of its base. Behind release() it is `step` alone; a scheduler may still have it."""

    @functools.wraps(step)  # a GradScaler looks at the signature
    def of_shared(optimizer: torch.optim.Optimizer, *arguments: Any, **keywords: Any) -> Any:
        shared = getattr(optimizer, "_p3_local", None)
        if shared is None:
            return step(optimizer, *arguments, **keywords)
        return shared.take_step(functools.partial(step, optimizer), *arguments, **keywords)

    of_shared.hooked = True  # `step` calls the script's hooks
    return of_shared


def _without_self(bound: Callable) -> Callable:
    @functools.wraps(bound)  # with a scheduler's mark
    def step(_optimizer: torch.optim.Optimizer, *arguments: Any, **keywords: Any) -> Any:
        return bound(*arguments, **keywords)

    return step


# DistributedOptimizer's, which LocalSteps refuses by name.
_ARGUMENTS = {"synchronous": choices.AWAITED, "max_grad_norm": choices.CLIPPED, "staleness": choices.STALE,
              "grad_scaler": choices.NAMED_SCALER, "independent": choices.INDEPENDENT}  # fmt: skip


def _shared(optimizer: torch.optim.Optimizer, models: Sequence[torch.nn.Module]) -> List[Parameter]:
    """The optimizer's parameters, in the order of the models. ValueError for what cannot be shared."""
    own, names = set(parameters_of(optimizer)), {tensor: name for name, tensor in named_parameters(models)}
    require_parameters(optimizer, names, "LocalSteps")
    return [Parameter(name, tensor) for tensor, name in names.items() if tensor in own and tensor.numel() > 0]
