"""Steps that wait for nothing, with gradients clipped by their global norm, or unscaled for a GradScaler.

The servers have the mean gradients before any worker has them all, and tell their norm in a few bytes
(p3/frontend/norms.py). So a module waits for that norm, once in a step, and for its own mean gradients, as it does
without clipping; then its parameters are updated, from the mean gradients times a factor.
"""

from __future__ import annotations

import functools
import logging
import math
from typing import Any, Callable, Dict, Iterable, Optional

import numpy as np
import torch

from p3.frontend.norms import Norms, StepNorm
from p3.frontend.steps import Count, Steps
from p3.plan import choices, combinations
from p3.torch.parameters import pending
from p3.torch.parameters.parameter import Parameter
from p3.torch.requirements import require_norm
from p3.torch.rounds.overlapping import Overlapping
from p3.torch.rounds.shown import Gradients, Shown
from p3.torch.start import job

log = logging.getLogger("p3.torch")

_TINY = 1e-6  # torch's, so that no norm of zero is divided by


class Clip:
    """What becomes of one step's mean gradients."""

    def __init__(self, norm: StepNorm, max_norm: float) -> None:
        """What it goes by may change until the norm is first used."""
        self._norm = norm
        self.max_norm, self.norm_type = max_norm, 2.0
        self.scale = 1.0  # what the gradients have been multiplied by, as the loss was
        self.is_error_if_nonfinite = False

    @property
    def is_finite(self) -> bool:
        """Else the step is left out, on all workers. Waits for the norm, as all else here."""
        return self._norm.is_finite

    @property
    def norm(self) -> float:
        return self._norm.of(self.norm_type) / self.scale

    @property
    def changes_gradients(self) -> bool:
        """Waits for nothing."""
        return self.max_norm < math.inf or self.scale != 1

    @property
    def factor(self) -> float:
        """What the gradients are to be multiplied by. Waits for nothing where they stay as they are."""
        if not self.changes_gradients:
            return 1.0
        clipped = 1.0 if self.max_norm == math.inf else min(1.0, self.max_norm / (self.norm + _TINY))
        return clipped / self.scale

    @functools.cached_property
    def last_factor(self) -> Optional[float]:
        """The same, when nothing changes any more what it goes by. None: the step is left out."""
        return self.factor if self.is_finite else None

    @property
    def factor_to_show(self) -> float:
        """The same, but gradients that are not finite are shown as they are."""
        return self.factor if self.changes_gradients and self.is_finite else 1.0

    def require_finite(self) -> None:
        """RuntimeError if it is not, and that was to be one; once: then the step is left out as any other."""
        if self.is_error_if_nonfinite and not self.is_finite:
            self.is_error_if_nonfinite = False
            raise RuntimeError(
                "the norm of the mean gradients is %s, so they cannot be clipped. To leave out such steps instead, "
                "pass error_if_nonfinite=False" % self.norm
            )


class Clipping(Overlapping):
    """Of an optimizer that updates each parameter by itself, on every worker."""

    _updates_behind = "norm"

    def __init__(self, *arguments: Any, max_grad_norm: Optional[float]) -> None:
        """`max_grad_norm`: of every step; None: as clip_grad_norm_() says."""
        self._max_grad_norm = math.inf if max_grad_norm is None else _single(max_grad_norm)
        self._has_scaled = False
        self._clip: Optional[Clip] = None  # of the last round
        self._is_complete = False  # all of the step's rounds have begun
        self._clips = False  # clip_grad_norm_() was called in the step
        self._has_warned = False
        self._shown: Optional[Shown] = None  # in the step under way
        self._changed: Optional[Gradients] = None  # what the last step goes by, if the script has changed it
        super().__init__(*arguments)
        self._numbers = Steps(job.current(), self._control.store, 3, "clipping")  # which all workers must have alike
        self._skipped: Optional[Count] = None  # in join()
        for parameter in self.parameters:
            parameter.also_awaited = self._await_norm

    def _choose_reduction(self) -> None:
        self._norms = Norms(job.current(), self._stores)  # first: of one that clips alone nothing else is said
        super()._choose_reduction()

    def clip_grad_norm_(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
        require_norm(max_norm, "max_norm")
        if norm_type not in (2, math.inf):
            raise ValueError("norm_type is %r; the servers tell norms of type 2 and inf. For others pass "
                             "synchronous=True to DistributedOptimizer" % (norm_type,))  # fmt: skip
        is_clipped = self._is_complete and self._clips
        known = self._clip.norm_type if is_clipped else 2.0 if self._max_grad_norm < math.inf else norm_type
        if norm_type != known:
            raise ValueError("this step is clipped by a norm of type %r already, by max_grad_norm or a call before: "
                             "clip by one type only" % known)  # fmt: skip
        self._complete_round()
        clip = self._clip
        clip.max_norm = min(_single(max_norm), clip.max_norm) if norm_type == clip.norm_type else _single(max_norm)
        clip.norm_type, self._clips = norm_type, True
        clip.is_error_if_nonfinite |= error_if_nonfinite
        if self._shown is not None:
            self._shown.multiply(clip.factor_to_show)
        return _awaited(clip, next(iter(self._parameters)).device)

    def unscale(self, scale: float) -> Clip:
        """The gradients of this step are `scale` times as large as they are meant to be."""
        for one in self.parameters:
            combinations.require("parameter %s" % one.name, *one.kept, choices.LATE_SCALER)
        self._complete_round()
        self._has_scaled = True
        self._clip.scale = _single(scale)
        return self._clip

    # As with DistributedDataParallel

    def act_as_ddp(self) -> None:
        super().act_as_ddp()
        for parameter in self.parameters:
            parameter.lend()

    def show_gradients(self) -> None:
        self._watched_gradients.end()
        if self._shown is None:
            self._complete_round()
            self._shown = Shown(self.parameters, self._clip.factor_to_show)

    @property
    def has_sums(self) -> bool:
        return not self._clips and not (self._shown is not None and self._shown.are_changed)

    def zero_grad(self, zero_grad: Callable[[bool], None], set_to_none: bool,
                  parameters: Optional[Iterable[Parameter]] = None) -> None:  # fmt: skip
        parameters = None if parameters is None else list(parameters)
        if self._drops_gradients(parameters):
            is_whole = parameters is None or len(parameters) == len(self._parameters)
            self._leave_out_step() if is_whole else self.show_gradients()
        super().zero_grad(zero_grad, set_to_none, parameters)

    def _leave_out_step(self) -> None:
        """Behind its last gradient, and before step(): no weight changes. It has its rounds on all workers, also where
        none has begun so far: on others some may have, as a gradient was complete, or was looked at."""
        self._complete_round(learns=False)
        self._end_showing()
        for parameter in self.parameters:
            parameter.end_without_result()
        self._norms.finish()
        self._is_complete = self._clips = self._is_counted = False
        self._control.left_out += 1
        self._weights.end_step()

    def _end_showing(self) -> Optional[Gradients]:
        self._watched_gradients.end()
        shown, self._shown = self._shown, None
        return None if shown is None else shown.end()

    def _leave_step(self) -> None:
        self._changed = self._end_showing()
        super()._leave_step()
        if self._changed is not None:
            self._land()
            for parameter, gradient in self._changed.items():  # that are left: no worker had one, but the script has
                self._update_by(parameter, gradient, parameter.group)
            self._changed = None

    def _update_by(self, parameter: Parameter, gradient: Optional[torch.Tensor], group: Dict[str, Any]) -> bool:
        return gradient is None or super()._update_one(parameter, gradient, group)

    def require_mean_gradients(self) -> bool:
        raise ValueError("torch's GradScaler must see the mean gradients, and this optimizer waits for none: use "
                         "p3.torch.GradScaler, or pass synchronous=True to DistributedOptimizer")  # fmt: skip

    def _complete_round(self, learns: bool = True) -> None:
        if self._is_complete:
            return
        self._norms.finish()
        super()._complete_round(learns)
        self._begin_norm()
        self._is_complete = True

    def _before_push(self) -> None:
        self._norms.finish()  # servers count the rounds of a step together

    def _await_norm(self) -> None:
        if self._clip is not None:
            self._clip.require_finite()

    def _begin_norm(self) -> None:
        self._clip = Clip(self._norms.begin(), self._max_grad_norm)

    def _end_step(self) -> None:
        clip = self._clip
        self._is_complete = self._clips = False
        numbers = clip.max_norm, clip.scale, float(clip.norm_type == math.inf)
        self._numbers.count(clip.max_norm, clip.scale, numbers, rescale=clip.norm_type)
        super()._end_step()

    def _on_gradient(self, parameter: Parameter, tensor: torch.Tensor) -> None:
        if self._is_complete and self._is_as_ddp:
            raise RuntimeError(
                "the gradient of %s was computed again, in a step whose gradients were read or clipped before its last "
                "backward pass: read and clip them behind that, or run the earlier passes in no_sync()" % parameter.name
            )
        if self._is_complete:
            raise RuntimeError(
                "the gradient of %s was computed again behind clip_grad_norm_() or unscale_(), with which all "
                "gradients of the step have left: call step() before the next backward pass. To leave out a step by "
                "its norm, pass synchronous=True" % parameter.name
            )
        super()._on_gradient(parameter, tensor)

    def join(self, after_step: Optional[Callable[[], Any]]) -> None:
        if self._has_scaled:
            combinations.require(self._session.label, choices.JOIN, choices.LATE_SCALER)
        super().join(after_step)

    def _break_off(self) -> None:
        self._end_showing()
        super()._break_off()
        if not self._is_complete:
            self._begin_norm()

    def _skip_more(self) -> None:
        self._begin_norm()
        self._skipped = self._numbers.skip()

    def _follow(self) -> None:
        """By the numbers of those who step: sums of float32 in float64 are exact, and so are their parts."""
        self._numbers.wait(self._skipped)
        clip, workers = self._clip, self._skipped.workers
        clip.max_norm, clip.scale, is_largest = (told / workers for told in self._skipped.told)
        clip.norm_type = math.inf if is_largest else 2.0
        super()._follow()

    def _finish(self) -> None:
        super()._finish()
        self._numbers.finish()
        self._norms.finish()

    def _update_one(self, parameter: Parameter, gradient: torch.Tensor, group: Dict[str, Any]) -> bool:
        clip = self._clip
        if self._changed is not None:
            return self._update_by(parameter, self._changed.pop(parameter), group)
        factor = clip.last_factor
        if factor is None:
            self._say_left_out(clip)
            return True
        return super()._update_one(parameter, gradient if factor == 1 else gradient.mul_(factor), group)

    def _say_left_out(self, clip: Clip) -> None:
        if clip.scale == 1 and not self._has_warned and self._session.is_first:  # else GradScaler makes it smaller
            self._has_warned = True
            log.warning("the norm of the mean gradients is %s: no worker takes this step, nor others of which that is "
                        "so", clip.norm)  # fmt: skip


def _single(number: float) -> float:
    """As float32 has it: so workers in join() get just that."""
    return float(np.float32(number))


def _awaited(clip: Clip, device: torch.device) -> torch.Tensor:
    """The norm as a tensor that is waited for when it is read."""
    norm = torch.full((), math.nan, dtype=torch.float32, device=device)

    def land(_may_be_written: bool) -> None:
        value = clip.norm
        pending.end(norm)
        norm.fill_(value)
        clip.require_finite()

    pending.begin(norm, land)
    return norm
