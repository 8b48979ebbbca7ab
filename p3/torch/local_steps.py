"""LocalSteps: a torch optimizer that trains on each worker by itself, and shares its weights now and then.

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    optimizer = p3.torch.LocalSteps(optimizer, model, every=30, fragments=6, delay=2, codec="int4")

It stays the same object, whose steps are torch's own: gradients, clipping, schedulers and scalers are the script's.
Behind each step p3/frontend/local_steps.py, which has the algorithm, sends what is due and merges what has come.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, NoReturn, Optional, Sequence, Tuple, Union

import numpy as np
import torch

from p3.codecs import Ways
from p3.errors import ConfigError
from p3.frontend import local_steps, snapshots
from p3.frontend.compression import Compression
from p3.frontend.fragments import Schedule
from p3.frontend.local_steps import Outer, checked_alpha, merged
from p3.plan import choices, combinations
from p3.settings import Settings
from p3.torch.parameters import trained
from p3.torch.requirements import is_factored, parameters_of, require_model, require_parameters
from p3.torch.rounds.control import Control
from p3.torch.rounds.forward import named_parameters
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
    **others: Any,
) -> torch.optim.Optimizer:
    """Lets each worker take steps of its own, and has them share their weights; returns the same object.

    `model` has the parameters, or several models in a list. Call it on every worker at the same point, before the first
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

    The same on every worker: ValueError where they differ, and for what cannot be trained so. ConfigError or
    RendezvousError if there is no job to join.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError("LocalSteps takes a torch.optim.Optimizer, not a %s" % type(optimizer).__name__)
    if hasattr(optimizer, "_p3") or isinstance(optimizer, _Local):
        raise ValueError("LocalSteps takes a plain optimizer, and this one is distributed already: call its release(), "
                         "and make a new one")  # fmt: skip
    schedule = Schedule.checked(every, fragments, delay)
    share, of_servers = checked_alpha(alpha, schedule.delay), Outer.checked(outer)
    models = [model] if isinstance(model, torch.nn.Module) else list(model)
    for one in models:
        require_model(one, "LocalSteps")
    ways = _ways(codec)
    _require_together(optimizer, ways, others)
    shared = _shared(optimizer, models)
    optimizer._p3_local = _Shared(optimizer, models, shared, schedule, of_servers, share, ways, strided)
    kind = type(optimizer)
    optimizer.__class__ = type(kind.__name__, (_Local, kind), {"__module__": kind.__module__})
    return optimizer


class _Local:
    """What such an optimizer has beside the methods of its class. Threads: as any torch optimizer, one."""

    _p3_local: _Shared

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
        self._p3_local.control.broadcast()

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
        return {**super().state_dict(), "local_steps": self._p3_local.outer_tensors()}

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Takes over what state_dict() of this gave, each worker its own, or of the plain optimizer, which leaves
        schedule, global weights and momentum as they are; on every worker at the same point. Load the model as well,
        in any order, but behind LocalSteps."""
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "local_steps"})
        if "local_steps" in state_dict:
            self._p3_local.load_outer_tensors(state_dict["local_steps"])

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        raise pickle.PicklingError("an optimizer with LocalSteps cannot be copied or saved: save its state_dict()")

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        raise ValueError("add_param_group comes before LocalSteps: wrap the optimizer when it has all groups")


class Parameter(NamedTuple):
    name: str
    tensor: torch.Tensor


class _Shared(job.Held, local_steps.LocalSteps):
    """What stands between one optimizer and the job."""

    def __init__(self, optimizer: torch.optim.Optimizer, models: Sequence[torch.nn.Module],
                 shared: List[Parameter], schedule: Schedule, outer: Outer, alpha: float, ways: Ways,
                 strided: bool) -> None:  # fmt: skip
        self._optimizer, self._kind, self._shared = optimizer, type(optimizer), {one.name: one for one in shared}
        _release_former(shared)
        layers: Dict[str, List[str]] = {}
        for name in self._shared:
            layers.setdefault(name.rpartition(".")[0], []).append(name)
        settings = Settings.from_env(os.environ)
        super().__init__(job.current(), list(layers.values()), schedule, outer, alpha, ways, strided, settings)
        for one in shared:
            trained.names[one.tensor] = one.name  # so that they are no frozen weights
        self.control = Control(self._session, models)
        resumed = self.begin()
        self.control.broadcast()
        if resumed is not None:
            optimizer.load_state_dict(resumed["optimizer"])
            self.control.take(resumed["buffers"])
            with torch.no_grad():
                for name, one in self._shared.items():
                    one.tensor.copy_(resumed["weights"][name])
        self._hook = optimizer.register_step_post_hook(lambda *_ignored: self.after_step())

    @property
    def parameters(self) -> List[Parameter]:
        return list(self._shared.values())

    # Local weights

    def shape_and_type(self, name: str) -> Tuple[Tuple[int, ...], str]:
        tensor = self._shared[name].tensor
        return tuple(tensor.shape), "float64" if tensor.dtype == torch.float64 else "float32"

    def local(self, name: str) -> np.ndarray:
        tensor = self._shared[name].tensor
        return tensor.detach().to("cpu", _type_of_global(tensor)).contiguous().numpy()

    def merge(self, name: str, value: np.ndarray, alpha: float) -> None:
        tensor = self._shared[name].tensor
        with torch.no_grad():
            of_all = torch.from_numpy(value).to(tensor.device)
            tensor.copy_(merged(tensor.to(of_all.dtype), of_all, alpha))

    @contextlib.contextmanager
    def global_weights(self) -> Iterator[None]:
        values, own = self.values(), {name: one.tensor.detach().clone() for name, one in self._shared.items()}
        try:
            for name, value in values.items():
                self.merge(name, value, 0.0)
            yield
        finally:
            with torch.no_grad():
                for name, one in self._shared.items():
                    one.tensor.copy_(own[name])

    # Saved and loaded

    def outer_tensors(self) -> Dict[str, Any]:
        content = self.outer_state()
        tensors = {part: {name: torch.from_numpy(array) for name, array in content[part].items()} for part in _ARRAYS}
        return {**content, **tensors}

    def load_outer_tensors(self, content: Mapping[str, Any]) -> None:
        self.load_outer_state({**content, **{part: {name: tensor.detach().to("cpu").contiguous().numpy()
                                                    for name, tensor in content[part].items()}
                                             for part in _ARRAYS}})  # fmt: skip

    def own_state(self) -> Dict[str, Any]:
        return {
            **super().own_state(),
            "weights": {name: one.tensor for name, one in self._shared.items()},
            "buffers": self.control.values(),
            "optimizer": self._kind.state_dict(self._optimizer),
        }

    def release(self, why: str = "") -> None:
        self.control.steps.finish()
        super().release(why)
        self._session.release(self.control.store)
        for one in self._shared.values():
            del trained.names[one.tensor]
        self._hook.remove()
        self._optimizer.__class__ = self._kind
        del self._optimizer._p3_local


_ARRAYS = ("global", "exact", "momentum")  # of outer_state()


def _type_of_global(tensor: torch.Tensor) -> torch.dtype:
    """Half precision has a float32 one: a step of the outer optimizer may be less than such a weight can show."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _ways(codec: Any) -> Ways:
    if callable(codec):
        raise ValueError("codec is a function; LocalSteps takes one codec for all parameters: a name, as 'int4', or a "
                         "dict, as {'up': 'int4', 'down': 'int8'}")  # fmt: skip
    try:
        return Compression(codec).of_store
    except ValueError as error:
        raise ValueError("codec: %s" % error) from None


def _require_together(optimizer: torch.optim.Optimizer, ways: Ways, others: Mapping[str, Any]) -> None:
    """ValueError unless LocalSteps goes with the codec and with what else the script asks for; TypeError for what no
    optimizer of P3's takes."""
    settings = Settings.from_env(os.environ)
    refusal = combinations.refusal(choices.TORCH, *choices.of_job(False, settings.replaces_workers))
    if refusal:
        raise ConfigError(refusal)
    asked = {"synchronous": choices.AWAITED, "max_grad_norm": choices.CLIPPED, "staleness": choices.STALE,
             "grad_scaler": choices.NAMED_SCALER, "independent": choices.INDEPENDENT}  # fmt: skip
    for name, value in others.items():
        if name == "compression":
            raise ValueError("LocalSteps: compression=%.100r: give it as codec" % (value,))
        if name not in asked:
            raise TypeError("LocalSteps() got an unexpected keyword argument %r" % name)
    chosen = [asked[name].said("%s=%.100r" % (name, value)) for name, value in others.items() if value]
    chosen += [choices.of_compression(ways.up), choices.of_value_compression(ways.down)]
    chosen += [choices.FACTORS] * any(map(is_factored, parameters_of(optimizer)))
    combinations.require("LocalSteps", choices.LOCAL_STEPS, *chosen)


def _shared(optimizer: torch.optim.Optimizer, models: Sequence[torch.nn.Module]) -> List[Parameter]:
    """The optimizer's parameters, in the order of the models. ValueError for what cannot be shared."""
    own, names = set(parameters_of(optimizer)), {tensor: name for name, tensor in named_parameters(models)}
    require_parameters(optimizer, names, "LocalSteps")
    return [Parameter(name, tensor) for tensor, name in names.items() if tensor in own and tensor.numel() > 0]


def _release_former(shared: Sequence[Parameter]) -> None:
    """Whoever has trained one of these parameters until now."""
    tensors = {one.tensor for one in shared}
    for former in snapshots.living():
        if any(one.tensor in tensors for one in former.parameters):
            former.release("LocalSteps has taken over its parameters")
