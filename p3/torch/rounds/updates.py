"""The optimizer's own step, on this worker, for parameters whose mean gradients have come.

A step has its own price beside that of each parameter, so those that have come by the time that one is waited for are
updated in one. Which they are differs from worker to worker, and nothing else may: an update is of one parameter alone,
and on the CPU torch computes it in the same way whatever else the step is of, one tensor at a time. Elsewhere, and
where the script has chosen another way, each has a step of its own.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional

import torch

from p3.torch.parameters.parameter import Parameter


class _Update(NamedTuple):
    parameter: Parameter
    gradient: torch.Tensor
    group: Dict[str, Any]


class Updates:
    """Of one optimizer. Threads: the script's."""

    def __init__(self, optimizer: torch.optim.Optimizer, step: Callable[[], Any], of_several: bool) -> None:
        """`step()`: the optimizer's own. `of_several`: one may be of several parameters."""
        self._optimizer, self._step, self._of_several = optimizer, step, of_several
        self._gathered: Optional[List[_Update]] = None

    def make(self, parameter: Parameter, gradient: torch.Tensor, group: Dict[str, Any]) -> bool:
        """Updates the parameter, by its group as the step found it. False: not yet, but at the end of gathered(), where
        its note_written() is called."""
        update = _Update(parameter, gradient, group)
        if self._gathered is not None and self.may_join(parameter, group):
            self._gathered.append(update)
            return False
        self._make([update])
        return True

    def may_join(self, parameter: Parameter, group: Dict[str, Any]) -> bool:
        """Whether its update may be made together with others."""
        return self._of_several and parameter.is_on_cpu and not group.get("foreach") and not group.get("fused")

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """The updates that are asked for meanwhile are made at its end, whatever that is. Nobody uses those parameters
        before."""
        if not self._of_several or self._gathered is not None:
            yield
            return
        self._gathered = gathered = []
        try:
            yield
        finally:
            self._gathered = None
            if gathered:
                self._make_all(gathered)

    def _make_all(self, updates: List[_Update]) -> None:
        by_group: Dict[int, List[_Update]] = {}
        for update in updates:
            by_group.setdefault(id(update.parameter.group), []).append(update)
        with torch.inference_mode(False):  # what is made in it can never be changed outside
            for of_group in by_group.values():
                self._make(of_group)
                for update in of_group:
                    update.parameter.note_written()

    def _make(self, updates: List[_Update]) -> None:
        """Of one group."""
        optimizer, tensors = self._optimizer, [update.parameter.tensor for update in updates]
        groups, kept = optimizer.param_groups, [tensor.grad for tensor in tensors]
        try:
            optimizer.param_groups = [dict(updates[0].group, params=tensors)]
            for tensor, update in zip(tensors, updates):
                tensor.grad = update.gradient
            # The forward pass may have autocast on.
            with torch.no_grad(), torch.autocast(tensors[0].device.type, enabled=False):
                self._step()
        finally:
            optimizer.param_groups = groups
            for tensor, gradient in zip(tensors, kept):
                tensor.grad = gradient
