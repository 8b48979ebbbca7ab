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
import zlib
from typing import (
    Any, Callable, Dict, Iterable, Iterator, List, Mapping, NamedTuple, NoReturn, Optional, Sequence, Set, Tuple, Union,
)  # fmt: skip

import numpy as np
import torch

from p3.frontend import snapshots
from p3.frontend.local_steps.options import Options
from p3.frontend.local_steps.trainer import ARRAYS, LocalTrainer
from p3.frontend.local_steps.value import merged
from p3.plan import choices
from p3.plan.strategy import Given
from p3.settings import Settings
from p3.torch.parameters import trained
from p3.torch.parameters.arrays import DTYPES, master_type
from p3.torch.requirements import is_factored, parameters_of, require_model, require_parameters
from p3.torch.rounds.control import Control
from p3.torch.rounds.forward import named_parameters
from p3.torch.sites import site as sites
from p3.torch.start import job


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

    `codec`: "int4" or any other type of docs/compression.md but dgc, both ways; or each its own, {"up": "int4", "down":
    "int8"}. Parameters of one dimension come back exact.

    `strategy`: as of DistributedOptimizer.

    The same on every worker: ValueError where they differ, and for what cannot be trained so. ConfigError or
    RendezvousError if there is no job to join.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError("LocalSteps takes a torch.optim.Optimizer, not a %s" % type(optimizer).__name__)
    if hasattr(optimizer, "_p3") or isinstance(optimizer, _Local):
        raise ValueError("LocalSteps takes a plain optimizer, and this one is distributed already: call its release(), "
                         "and make a new one")  # fmt: skip
    options = Options.checked(every, fragments, delay, alpha, codec, outer, strided, strategy)
    settings = Settings.from_env(os.environ)
    models = [model] if isinstance(model, torch.nn.Module) or not isinstance(model, Iterable) else list(model)
    site = sites.current()
    if site is not None:
        models = [site.unwrapped(one) for one in models]
    for one in models:
        require_model(one, "LocalSteps")
    factors = [choices.FACTORS] * any(map(is_factored, parameters_of(optimizer)))
    options.require_together(settings, others, _ARGUMENTS, *factors)
    shared = _shared(optimizer, models)
    if site is None:
        optimizer._p3_local = Shared(optimizer, models, shared, options, settings)
    else:
        from p3.torch.sites.optimizer import OfSite  # which is a Shared

        optimizer._p3_local = OfSite(site, optimizer, models, shared, options, settings)
    kind = type(optimizer)
    content = {"__module__": kind.__module__, "step": _as_shared(kind.step)}
    optimizer.__class__ = type(kind.__name__, (_Local, kind), content)
    if "step" in vars(optimizer):  # a learning rate scheduler has bound the old one
        optimizer.step = types.MethodType(_as_shared(_without_self(optimizer.step)), optimizer)
    return optimizer


class _Local:
    """What such an optimizer has beside the methods of its class. Threads: as any torch optimizer, one."""

    _p3_local: Union[Shared, _Ended]

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


class _Ended:
    """In the place of an optimizer's Shared whose parameters another one has taken over. What needs no job is torch's
    own again."""

    def __init__(self, optimizer: torch.optim.Optimizer, kind: type, why: str) -> None:
        self._optimizer, self._kind, self._why = optimizer, kind, why

    def release(self) -> None:
        self._optimizer.__class__ = self._kind
        del self._optimizer._p3_local

    def with_outer(self, content: Dict[str, Any]) -> Dict[str, Any]:
        return content

    def load(self, load: Callable[[], None], _content: Optional[Mapping[str, Any]]) -> None:
        load()

    def leave_out(self) -> None:
        pass

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError("this optimizer was released: %s" % self._why)


class Parameter(NamedTuple):
    name: str
    tensor: torch.Tensor


class Shared(job.Held, LocalTrainer):
    """What stands between one optimizer and the job."""

    kind = "LocalSteps"

    def __init__(self, optimizer: torch.optim.Optimizer, models: Sequence[torch.nn.Module],
                 shared: List[Parameter], options: Options, settings: Settings) -> None:  # fmt: skip
        self._note(optimizer, models, shared)
        super().__init__(job.current(), list(self._shared), options, settings)
        with self.beginning():
            snapshots.release_former((one.tensor for one in shared), "LocalSteps")
        for one in shared:
            trained.names[one.tensor] = one.name  # so that they are no frozen weights
        self.control = Control(self._session, models, options.strategy)
        resumed = self.begin()
        self.control.broadcast()
        if resumed is not None:
            with self.beginning():
                self._take_own(resumed)
        _living.add(self)

    def _note(self, optimizer: torch.optim.Optimizer, models: Sequence[torch.nn.Module],
              shared: List[Parameter]) -> None:  # fmt: skip
        """What this process has to itself."""
        self._optimizer, self._kind, self._shared = optimizer, type(optimizer), {one.name: one for one in shared}
        self._is_stepping = False
        self._own: Optional[Dict[str, torch.Tensor]] = None  # its weights, while the model has the global ones
        self._places = _places(models, shared)
        self.control: Optional[Control] = None

    def _take_own(self, resumed: Dict[str, Any]) -> None:
        self._optimizer.load_state_dict(resumed["optimizer"])
        self._take_tensors(resumed)

    def _take_tensors(self, saved: Dict[str, Any]) -> None:
        self.control.take(saved["buffers"])
        with torch.no_grad():
            for name, one in self._shared.items():
                one.tensor.copy_(saved["weights"][name])

    @property
    def parameters(self) -> List[Parameter]:
        return list(self._shared.values())

    @property
    def shows_global(self) -> bool:
        """Whether the model has the global weights, and not this worker's own."""
        return self._own is not None

    # Steps

    def take_step(self, step: Callable, *arguments: Any, **keywords: Any) -> Any:
        """`step` is the optimizer's own, or a scheduler's that calls that."""
        if self._is_stepping:
            return step(*arguments, **keywords)
        self._before_step()
        self._is_stepping = True
        try:
            result = step(*arguments, **keywords)
        finally:
            self._is_stepping = False
        self.after_step()
        return result

    @torch.compiler.disable
    def _before_step(self) -> None:
        self._require_own_weights("optimizer.step()")
        for name, (module, attribute, dtype, shape) in self._places.items():
            tensor = self._shared[name].tensor
            if module._parameters.get(attribute) is not tensor:
                raise RuntimeError("parameter %s of the model is another tensor than at LocalSteps, which the "
                                   "optimizer does not train: load with assign=False, or assign before you make the "
                                   "optimizer" % name)  # fmt: skip
            if tensor.dtype != dtype or tensor.shape != shape:
                raise RuntimeError("parameter %s is %s of shape %s, and was %s of shape %s at LocalSteps: change the "
                                   "model before you make the optimizer"
                                   % (name, tensor.dtype, tuple(tensor.shape), dtype, tuple(shape)))  # fmt: skip

    @torch.compiler.disable
    def after_step(self) -> None:
        super().after_step()

    def leave_out(self) -> None:
        """Unless a closure computes gradients: behind zero_grad() a step that was not taken may be weighed again."""
        if not self._is_stepping:
            self._shares.leave_out()

    def _require_own_weights(self, of: str) -> None:
        if self._own is not None:
            raise RuntimeError("%s within global_weights(), behind which the parameters become this worker's own "
                               "again, and it would be lost: leave the with block before" % of)  # fmt: skip

    def take_global(self) -> None:
        self._require_own_weights("take_global()")
        super().take_global()

    def broadcast(self) -> None:
        self._require_own_weights("broadcast()")
        super().broadcast()
        self.control.broadcast()

    # Local weights

    def shape_and_type(self, name: str) -> Tuple[Tuple[int, ...], str]:
        tensor = self._shared[name].tensor
        return tuple(tensor.shape), DTYPES[master_type(tensor)]

    def local(self, name: str) -> np.ndarray:
        tensor = self._shared[name].tensor
        return tensor.detach().to("cpu", master_type(tensor)).contiguous().numpy()

    def rounded(self, name: str, value: np.ndarray) -> Optional[np.ndarray]:
        own = self._shared[name].tensor.dtype
        of_all = torch.from_numpy(value)
        return None if own == of_all.dtype else of_all.to(own).to(of_all.dtype).numpy()

    def merge(self, name: str, value: np.ndarray, alpha: float) -> None:
        tensor = self._shared[name].tensor
        with torch.no_grad():
            of_all = torch.from_numpy(value).to(tensor.device)
            tensor.copy_(merged(tensor.to(of_all.dtype), of_all, alpha))

    @contextlib.contextmanager
    def global_weights(self) -> Iterator[None]:
        self._require_own_weights("global_weights()")
        own = {name: one.tensor.detach().clone() for name, one in self._shared.items()}
        self._own = own
        try:
            self._show_global()
            yield
        finally:
            self._own = None
            with torch.no_grad():
                for name, one in self._shared.items():
                    one.tensor.copy_(own[name])

    def _show_global(self) -> None:
        for name, value in self.values().items():
            self.merge(name, value, 0.0)

    # Saved and loaded

    def with_outer(self, content: Dict[str, Any]) -> Dict[str, Any]:
        outer = self.outer_state()
        tensors = {part: {name: torch.from_numpy(array) for name, array in outer[part].items()} for part in ARRAYS}
        return {**content, "local_steps": {**outer, **tensors}}

    def load(self, load: Callable[[], None], content: Optional[Mapping[str, Any]]) -> None:
        """`load`: what is torch's own. `content`: of with_outer(), if there is any."""
        self._require_own_weights("load_state_dict()")
        self.load_outer_state(content, load)

    def as_array(self, saved: torch.Tensor) -> np.ndarray:
        return saved.detach().to("cpu").contiguous().numpy()

    def own_state(self) -> Dict[str, Any]:
        self._require_own_weights("snapshot()")
        return {**super().own_state(), **self._of_this_worker()}

    def _of_this_worker(self) -> Dict[str, Any]:
        own = {name: one.tensor.detach() for name, one in self._shared.items()} if self._own is None else self._own
        return {"weights": own, "buffers": self.control.values(), "optimizer": self._kind.state_dict(self._optimizer)}

    def own_part(self, of: str) -> Dict[str, Any]:
        """What a checkpoint of the global model and of rank 0's state_dict() lacks of this worker; also within
        global_weights(). On every worker at the same point, in `of`, a call of the script."""
        self._require_same_steps(of)
        return {**self._position(), "of": self._of_global(), **self._of_this_worker()}

    def _of_global(self) -> int:
        """A digest of the global weights, the same on all workers. Waits for what is under way."""
        return functools.reduce(lambda digest, value: zlib.crc32(value, digest), self.values().values(), 0)

    def take_own_part(self, read: Callable[[], Optional[Dict[str, Any]]], of: str) -> None:
        """Of the checkpoint that the model and load_state_dict() have been given; on every worker at the same point.
        `read`: gives what own_part() gave, or None where there is none: that worker begins with the checkpoint's model.
        If none has any, rank 0's weights become the global ones, as of a checkpoint of another training."""
        part: Optional[Dict[str, Any]] = None
        with self._together.failing(of):
            part = read()
            if part is None:
                self._shares.forget()
            else:
                self._take_part(part, of)
        if not any(self._together.numbers(int(part is not None), "for other workers in %s" % of).values()):
            self.broadcast()

    def _take_part(self, part: Dict[str, Any], of: str) -> None:
        if part["step"] != self.steps_taken:
            raise ValueError("%s: %s: this worker's part is of step %d, and the rest of step %d: they are of different "
                             "checkpoints" % (self._session.label, of, part["step"], self.steps_taken))  # fmt: skip
        if part["of"] != self._of_global():
            raise ValueError("%s: %s: this worker's part is of step %d of another training, which has left it there: "
                             "remove it" % (self._session.label, of, part["step"]))  # fmt: skip
        self._require_names(part["weights"], of)
        self._kind.load_state_dict(self._optimizer, part["optimizer"])
        self._take_tensors(part)
        self._shares.go_on(part["samples"] if list(part["cut"]) == self._cut else None)

    def release(self, why: str = "") -> None:
        self._require_own_weights("release()")
        self._leave()
        if why:
            self._optimizer._p3_local = _Ended(self._optimizer, self._kind, why)
        else:
            self._optimizer.__class__ = self._kind
            del self._optimizer._p3_local

    def _leave(self) -> None:
        self.control.steps.finish()
        super().release()

    def _drop(self) -> None:
        super()._drop()
        if self.control is not None:
            self._session.release(self.control.store)
            for one in self._shared.values():
                del trained.names[one.tensor]
        _living.discard(self)


# Until release(), whatever becomes of the optimizer: all workers release a former one at the same point, and the
# garbage collector has its own time on each.
_living: Set[Shared] = set()

# DistributedOptimizer's, which LocalSteps refuses by name.
_ARGUMENTS = {"synchronous": choices.AWAITED, "max_grad_norm": choices.CLIPPED, "staleness": choices.STALE,
              "grad_scaler": choices.NAMED_SCALER, "independent": choices.INDEPENDENT}  # fmt: skip


def _shared(optimizer: torch.optim.Optimizer, models: Sequence[torch.nn.Module]) -> List[Parameter]:
    """The optimizer's parameters, in the order of the models. ValueError for what cannot be shared."""
    own, names = set(parameters_of(optimizer)), {tensor: name for name, tensor in named_parameters(models)}
    require_parameters(optimizer, names, "LocalSteps")
    return [Parameter(name, tensor) for tensor, name in names.items() if tensor in own and tensor.numel() > 0]


def _places(models: Sequence[torch.nn.Module], shared: Sequence[Parameter]) -> Dict[str, Tuple]:
    """Where the model has each, by its name, and of which type and shape."""
    names = {one.tensor: one.name for one in shared}
    return {names[tensor]: (module, attribute, tensor.dtype, tensor.shape)
            for model in models for module in model.modules()
            for attribute, tensor in module._parameters.items() if tensor in names}  # fmt: skip
