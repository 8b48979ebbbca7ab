"""GradScaler: torch's, for optimizers whose steps wait for nothing (rounds/clipping.py).

Whether a step is left out, because an element of the mean gradients is not finite, is known when their norm is, after
step(). So the scale is brought up to date when somebody asks for it, as the next loss does.
"""

from __future__ import annotations

from typing import Any, Dict, Optional, Union

import torch
from torch.amp.grad_scaler import OptState

from p3.torch.rounds.clipping import Clip, Clipping


class GradScaler(torch.amp.GradScaler):
    """In the place of torch.amp.GradScaler, whose arguments it takes: pass it to DistributedOptimizer as grad_scaler.

    Each worker has one; all have the same scale, as all leave out the same steps. unscale_() costs nothing: the factor
    is part of the one that clips. Of a synchronous optimizer, or a plain one, it is torch's. Threads: as torch's.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._clips: Dict[int, Clip] = {}  # by optimizer, of the steps since the last update()
        self._is_due = False  # an update()

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        rounds = _rounds_of(optimizer)
        if rounds is None or not self.is_enabled():
            return super().unscale_(optimizer)
        self._settle()
        self._check_scale_growth_tracker("unscale_")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is not OptState.READY:
            raise RuntimeError("unscale_() comes once between two calls of update(), before step()")
        self._clips[id(optimizer)] = rounds.unscale(self.get_scale())
        state["stage"] = OptState.UNSCALED

    def step(self, optimizer: torch.optim.Optimizer, *arguments: Any, **keywords: Any) -> Any:
        if _rounds_of(optimizer) is None or not self.is_enabled():
            self._settle()
            return super().step(optimizer, *arguments, **keywords)
        if arguments or "closure" in keywords:
            raise RuntimeError("GradScaler takes no closure")
        self._settle()
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() comes once between two calls of update()")
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
            state = self._per_optimizer_states[id(optimizer)]
        result = optimizer.step(**keywords)
        state["stage"] = OptState.STEPPED
        return result

    def update(self, new_scale: Optional[Union[float, torch.Tensor]] = None) -> None:
        self._settle()
        if new_scale is not None or not self._clips:
            self._clips.clear()
            return super().update(new_scale)
        self._is_due = True

    def _settle(self) -> None:
        """Waits for the norms of steps that update() was called behind."""
        if not self._is_due:
            return
        self._is_due = False
        clips, self._clips = self._clips, {}
        for optimizer, clip in clips.items():
            found = torch.full((), float(not clip.is_finite), device=self._scale.device)
            self._per_optimizer_states[optimizer]["found_inf_per_device"] = {self._scale.device: found}
        super().update()

    def scale(self, outputs: Any) -> Any:
        self._settle()
        return super().scale(outputs)

    def get_scale(self) -> float:
        self._settle()
        return super().get_scale()

    def state_dict(self) -> Dict[str, Any]:
        self._settle()
        return super().state_dict()

    def __getstate__(self) -> Dict[str, Any]:
        self._settle()
        return super().__getstate__()

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        self._settle()
        super().load_state_dict(state_dict)


def _rounds_of(optimizer: Any) -> Optional[Clipping]:
    rounds = getattr(optimizer, "_p3", None)
    return rounds if isinstance(rounds, Clipping) else None
