"""Weights of a torch model that workers share now and then: what is between LocalSteps' optimizer and the job."""

from __future__ import annotations

import functools
import zlib
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, NoReturn, Optional, Sequence, Set, Tuple

import numpy as np
import torch

from p3.frontend import snapshots
from p3.frontend.local_steps.in_place import InPlaceTrainer
from p3.frontend.local_steps.options import Options
from p3.frontend.local_steps.trainer import ARRAYS
from p3.frontend.local_steps.value import merged
from p3.settings import Settings
from p3.torch.parameters import trained
from p3.torch.parameters.arrays import DTYPES, master_type
from p3.torch.rounds.control import Control
from p3.torch.start import job


class Ended:
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


class Shared(job.Held, InPlaceTrainer):
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

    # Steps

    @torch.compiler.disable
    def before_step(self) -> None:
        self.require_own_weights("optimizer.step()")
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

    def broadcast(self) -> None:
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

    def copied(self) -> Dict[str, torch.Tensor]:
        return {name: one.tensor.detach().clone() for name, one in self._shared.items()}

    def put_back(self, own: Dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, one in self._shared.items():
                one.tensor.copy_(own[name])

    # Saved and loaded

    def with_outer(self, content: Dict[str, Any]) -> Dict[str, Any]:
        outer = self.outer_state()
        tensors = {part: {name: torch.from_numpy(array) for name, array in outer[part].items()} for part in ARRAYS}
        return {**content, "local_steps": {**outer, **tensors}}

    def load(self, load: Callable[[], None], content: Optional[Mapping[str, Any]]) -> None:
        """`load`: what is torch's own. `content`: of with_outer(), if there is any."""
        self.require_own_weights("load_state_dict()")
        self.load_outer_state(content, load)

    def as_array(self, saved: torch.Tensor) -> np.ndarray:
        return saved.detach().to("cpu").contiguous().numpy()

    def own_state(self) -> Dict[str, Any]:
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
        self.require_own_weights("release()")
        self._leave()
        if why:
            self._optimizer._p3_local = Ended(self._optimizer, self._kind, why)
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


def _places(models: Sequence[torch.nn.Module], shared: Sequence[Parameter]) -> Dict[str, Tuple]:
    """Where the model has each, by its name, and of which type and shape."""
    names = {one.tensor: one.name for one in shared}
    return {names[tensor]: (module, attribute, tensor.dtype, tensor.shape)
            for model in models for module in model.modules()
            for attribute, tensor in module._parameters.items() if tensor in names}  # fmt: skip
