"""The mean gradients of one step in the parameters, in the place of this worker's own, for the script to look at.

It may also change them; what the step's update is made of then is what the script has made of them. A worker shows them
by itself: the rounds go on as without, and where nothing was changed, so do the updates, bit for bit.
"""

from __future__ import annotations

from typing import Dict, Iterable, Optional, Tuple

import torch

from p3.torch.parameters.arrays import bits
from p3.torch.parameters.parameter import Parameter

Gradients = Dict[Parameter, Optional[torch.Tensor]]  # None: none


class Shown:
    def __init__(self, parameters: Iterable[Parameter], factor: float) -> None:
        """Waits for the mean gradients; they are multiplied by the factor. Every parameter has a round under way."""
        self._means: Gradients = {one: one.mean_gradient() for one in parameters}
        self._own: Gradients = {one: one.tensor.grad for one in self._means}
        self._note_marks()
        self.multiply(factor)
        for parameter, mean in self._means.items():  # last: whatever fails before has changed nothing
            parameter.tensor.grad = mean

    def multiply(self, factor: float) -> None:
        """Nobody has changed them so far."""
        if factor == 1:
            return
        for mean in self._means.values():
            if mean is not None:
                mean.mul_(factor)
        self._note_marks()

    def _note_marks(self) -> None:
        self._marks = {one: _mark(mean) for one, mean in self._means.items()}

    @property
    def are_changed(self) -> bool:
        """Or replaced, or taken away, by the script."""
        return any(one.tensor.grad is not mean or _mark(mean) != self._marks[one]
                   for one, mean in self._means.items())  # fmt: skip

    def end(self) -> Optional[Gradients]:
        """The parameters have this worker's own gradients again. What the script has made of the mean ones; None if it
        has left all of them as they were."""
        changed = {one: one.tensor.grad for one in self._means} if self.are_changed else None
        for parameter, own in self._own.items():
            parameter.tensor.grad = own
        return changed


def _mark(gradient: Optional[torch.Tensor]) -> Optional[Tuple[int, int]]:
    """Another one if the gradient has changed, whether torch counts that or not."""
    return None if gradient is None else (gradient._version, int(bits(gradient)))
