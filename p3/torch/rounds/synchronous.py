"""Steps that wait for all mean gradients, which the script may look at and change, and then update on every worker."""

from __future__ import annotations

import functools
import math
import weakref
from typing import Any, Callable, Dict, Iterable, Optional, Tuple

import torch

from p3.frontend.steps import Count
from p3.plan import choices, combinations
from p3.torch.parameters.parameter import Parameter
from p3.torch.requirements import require_norm
from p3.torch.rounds.rounds import Rounds
from p3.torch.rounds.scaling import Scaling
from p3.torch.start import job


_NONE_LEFT = (lambda: None), -1


class Synchronous(Rounds):
    _guards = False
    _watches_all = True
    _updates_behind = "wait"

    def __init__(self, *arguments: Any, max_grad_norm: Optional[float] = None, grad_scaler: Any = None) -> None:
        self._max_grad_norm = max_grad_norm
        self._has_closure = False  # a step may have many rounds
        self._is_synchronized = False  # the gradients are the mean ones
        self._has_shown = False  # new ones to the script, which may change them before step()
        self._was_empty = False  # no worker had a new one: the step's may be to come, on this worker or another one
        # Gradients as the last step left them, or zero_grad().
        self._left: Dict[torch.Tensor, Tuple[Callable[[], Optional[torch.Tensor]], int]] = {}
        self._counted: Optional[Count] = None  # the last round
        self._told_new = False  # with that: this worker had gradients which no step has had
        self._scaling = Scaling(job.current(), self, grad_scaler)
        super().__init__(*arguments)

    def _start(self, resumed: Optional[Dict[str, Any]]) -> None:
        if resumed is not None:
            self._scaling.resume(resumed.get("loss_scale"))
        super()._start(resumed)

    def _loss_scale(self) -> Optional[float]:
        self._scaling.settle()
        return self._scaling.scale

    def _on_gradient(self, parameter: Parameter, tensor: torch.Tensor) -> None:
        self._is_synchronized = False  # also where GradScaler has left out a step
        super()._on_gradient(parameter, tensor)

    def _count_step(self, samples: Optional[float]) -> Count:
        self._told_new = bool(samples) or any(map(self._is_new, self._parameters))
        self._counted = self._control.count_step(self._optimizer.param_groups, samples, self._told_new)
        return self._counted

    def _is_new(self, tensor: torch.Tensor) -> bool:
        """Whether its gradient is none that was left, whoever has made it."""
        gradient, (left, version) = tensor.grad, self._left.get(tensor, _NONE_LEFT)
        return gradient is not None and (left() is not gradient or gradient._version != version)

    def _note_left(self, tensors: Optional[Iterable[torch.Tensor]] = None) -> None:
        """None: of all parameters."""
        for tensor in self._parameters if tensors is None else tensors:
            gradient = tensor.grad
            self._left[tensor] = _NONE_LEFT if gradient is None else (weakref.ref(gradient), gradient._version)

    def _before_push(self) -> None:
        self._scaling.begin_round()

    def zero_grad(self, zero_grad: Callable[[bool], None], set_to_none: bool,
                  parameters: Optional[Iterable[Parameter]] = None) -> None:  # fmt: skip
        parameters = None if parameters is None else list(parameters)
        if self._drops_gradients(parameters):
            self._bring_means(learns=False)
        is_whole = parameters is None or len(parameters) == len(self._parameters)
        if self._is_as_ddp and self._has_means and is_whole:
            self._control.left_out += 1
        self._is_synchronized = False  # on all workers, of which some may have no gradient before the next step
        super().zero_grad(zero_grad, set_to_none, parameters)
        self._note_left(None if parameters is None else [one.tensor for one in parameters])

    def synchronize(self) -> None:
        self._bring_means()
        self._has_shown = self._has_shown or not self._was_empty

    @property
    def _has_means(self) -> bool:
        """The gradients are the mean ones of the step under way."""
        return self._is_synchronized and not self._was_empty

    def _bring_means(self, learns: bool = True) -> None:
        if self._has_means:
            return
        self._scaling.begin_round()
        self._complete_round(learns)
        self._was_empty = not self._take_mean_gradients()
        if not self._was_empty and not self._told_new:  # they may be the last step's, which all workers still have
            self._was_empty = not self._control.are_new(self._counted)
            if self._was_empty:
                self._note_left()
        self._is_synchronized = True
        self._scaling.end_round()
        if not self._was_empty:
            self._weights.end_round()

    def show_gradients(self) -> None:
        self._watched_gradients.end()
        self.synchronize()

    def require_mean_gradients(self) -> bool:
        if not self._is_synchronized:
            return super().require_mean_gradients()
        self._scaling.require_known()
        return False

    @torch.no_grad()
    def _take_mean_gradients(self) -> bool:
        """Whether any worker had a gradient, which all of them learn."""
        is_any_updated = False
        for tensor, parameter in self._parameters.items():
            is_updated = parameter.land()
            parameter.require_as_sent(awaits_mean=True)
            parameter.release_gradient()
            if not is_updated:
                continue
            is_any_updated = True
            if self._sparse and tensor in self._sparse and (tensor.grad is None or tensor.grad.layout != torch.strided):
                tensor.grad = parameter.landing.to_sparse(1)
                continue
            if tensor.grad is None:
                tensor.grad = torch.empty_like(tensor, requires_grad=False)
            tensor.grad.copy_(parameter.landing)
        return is_any_updated

    def _only_makes_states(self) -> bool:
        return not self._has_means and super()._only_makes_states()

    def _step(self, closure: Optional[Callable]) -> Any:
        if closure is not None:
            self._has_closure = self._weights.lasts_step = True
            closure = functools.partial(self._mean_loss, closure)
        else:
            self._bring_means()
            self._clip()
        loss = self._update(closure)
        self._scaling.sums_are_used()
        self._is_synchronized = False
        self._note_left()
        self._end_step()
        return loss

    def _mean_loss(self, closure: Callable) -> Any:
        """Of a closure that the optimizer calls, perhaps often: all workers see one loss, and the mean gradients."""
        loss = closure()
        self._is_synchronized = False
        self._bring_means()
        self._clip()
        return self._control.mean(loss, self._weights.factor())

    def clip_grad_norm_(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
        require_norm(max_norm, "max_norm")
        self.synchronize()
        return torch.nn.utils.clip_grad_norm_(list(self._parameters), max_norm, norm_type, error_if_nonfinite)

    def _clip(self) -> None:
        if self._max_grad_norm not in (None, math.inf):
            torch.nn.utils.clip_grad_norm_(list(self._parameters), self._max_grad_norm)

    def join(self, after_step: Optional[Callable[[], Any]]) -> None:
        if self._has_closure:
            combinations.require(self._session.label, choices.JOIN, choices.CLOSURE)
        if self._has_shown:
            combinations.require(self._session.label, choices.JOIN, choices.SHOWN_MEANS)
        if self._scaling.is_named:
            combinations.require(self._session.label, choices.JOIN, choices.NAMED_SCALER)
        super().join(after_step)

    def _follow(self) -> None:
        for parameter in self._parameters.values():  # else one that nobody has any more would update again
            parameter.tensor.grad = None
        self._take_mean_gradients()
        self._clip()
        self._update()

    def with_states(self, state_dict: Callable[[], Dict[str, Any]]) -> Dict[str, Any]:
        self._comparisons.finish()
        return state_dict()
