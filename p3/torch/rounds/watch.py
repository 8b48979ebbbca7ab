"""Which changes of weights and gradients are looked for that torch does not count: all of them in a few steps."""

from __future__ import annotations

from typing import Dict, List

import torch

from p3.torch.parameters.parameter import Parameter

# Steps in which all are looked for; then one parameter is looked at in each step, and each at most once in so many.
_STEPS, _AGAIN = 3, 64


class Watch:
    """Of one optimizer's parameters. Where a comparison waits for a device, it is left out."""

    def __init__(self, parameters: Dict[torch.Tensor, Parameter], always: bool) -> None:
        """`always`: of all parameters, in every step."""
        self.on_host = [one for tensor, one in parameters.items() if tensor.device.type == "cpu"]
        self._always = always
        self._steps = 0
        self._watched: List[Parameter] = []  # in this step
        for parameter in parameters.values():
            parameter.is_watched = always
        self._choose()

    def end_step(self) -> None:
        self._steps += 1
        self._choose()

    def _choose(self) -> None:
        """For what the next step does."""
        if self._always:
            return
        for parameter in self._watched:
            parameter.is_watched = False
        self._watched = self.on_host
        if self._steps >= _STEPS:
            turn = self._steps % max(len(self.on_host), _AGAIN)
            self._watched = self.on_host[turn : turn + 1]
        for parameter in self._watched:
            parameter.is_watched = True
