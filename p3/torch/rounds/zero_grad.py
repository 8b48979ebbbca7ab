"""model.zero_grad() while the model is trained: what it means to gradients that have left."""

from __future__ import annotations

import functools
from typing import Callable

import torch

from p3.torch.start import job


class ZeroGrad(job.Held):
    """zero_grad() of a model, in the place of what was there; a copy of the model has its own again."""

    def __init__(self, model: torch.nn.Module, rounds) -> None:
        self._model, self._zero_grad, self._rounds = model, model.zero_grad, rounds
        self._parameters = rounds.parameters_of(model)
        self._is_first = "zero_grad" not in vars(model)
        model.zero_grad = self

    def undo(self) -> None:
        """Also from below another optimizer's."""
        above, one = None, vars(self._model).get("zero_grad")
        while one is not self and isinstance(one, ZeroGrad):
            above, one = one, one._zero_grad
        if one is not self:
            return  # the script has its own there by now
        if above is not None:
            above._zero_grad, above._is_first = self._zero_grad, self._is_first
        elif self._is_first:
            del self._model.zero_grad
        else:
            self._model.zero_grad = self._zero_grad

    def __call__(self, set_to_none: bool = True) -> None:
        self._rounds.zero_grad(self._zero_grad, set_to_none, self._parameters)

    def __deepcopy__(self, memo: dict) -> Callable[[bool], None]:
        return functools.partial(type(self._model).zero_grad, memo[id(self._model)])
