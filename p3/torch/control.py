"""What the workers of one optimizer share besides its parameters: first values, and the count of steps.

Small keys of a store of their own. "values" has the bytes of everything that rank 0 gives all workers and no
optimizer trains: buffers, and parameters that no optimizer has. "steps" has a round for each step of the optimizer:
its sum is how many workers took the step, so a worker in join() learns that nobody does any more.
"""

from __future__ import annotations

from typing import Any, List, Sequence

import numpy as np
import torch

from p3._core import P3Error
from p3.torch.forward import named_buffers, named_parameters
from p3.worker.session import Session

_LAST = -(1 << 19)  # behind every gradient


class Control:
    def __init__(self, session: Session, models: Sequence[torch.nn.Module]) -> None:
        self._session = session
        named = named_parameters(models) + named_buffers(models)
        self._others: List[torch.Tensor] = [tensor for _, tensor in named if not hasattr(tensor, "_p3_parameter")]
        store = session.new_store()
        self._values = session.declare("values", (sum(map(_bytes, self._others)),), "uint8", store)
        self._steps = session.declare("steps", (1,), "float32", store)
        self._number = session.declare("number", (1,), "float64", store)
        self._one, self._sum = np.ones(1, np.float32), np.zeros(1, np.float32)
        for key, first in ((self._steps, self._sum), (self._number, np.zeros(1))):
            session.wait([session.init(key, first if session.rank == 0 else None, np.empty_like(first))])
        self._counting: List[Any] = []  # rounds under way

    def broadcast(self) -> None:
        """Buffers and untrained parameters of rank 0, on every worker at the same point. Waits for them."""
        if not self._others:
            return
        session, own = self._session, self.values()
        landing = torch.empty_like(own)
        session.wait([session.init(self._values, own.numpy() if session.rank == 0 else None, landing.numpy())])
        self.take(landing)

    def values(self) -> torch.Tensor:
        """This worker's bytes of them."""
        others = [tensor.detach().reshape(-1).view(torch.uint8) for tensor in self._others]
        return torch.cat(others) if others else torch.empty(0, dtype=torch.uint8)

    def take(self, values: torch.Tensor) -> None:
        begin = 0
        with torch.no_grad():
            for tensor in self._others:
                end = begin + _bytes(tensor)
                if not hasattr(tensor, "_p3_parameter"):  # meanwhile another optimizer may have it
                    tensor.copy_(values[begin:end].clone().view(tensor.dtype).view(tensor.shape))
                begin = end

    def count_step(self) -> None:
        operation = self._session.pushpull(self._steps, self._one, self._sum, _LAST)
        self._counting = [*(one for one in self._counting if not one.done), operation]

    def mean(self, number: Any) -> Any:
        """Of what every worker gives at the same point. Waits for it."""
        value = np.array([float(number.detach() if isinstance(number, torch.Tensor) else number)])
        total = np.empty_like(value)
        self._session.wait([self._session.pushpull(self._number, value, total, _LAST)])
        return torch.tensor(total[0] / self._session.num_workers)

    def anyone_steps(self) -> bool:
        """In join(): takes no part in the next step, and waits until it is known whether any other worker does."""
        operation = self._session.skip(self._steps, self._sum, _LAST)
        while True:
            try:
                operation.wait(0.5)
                return operation.updated
            except TimeoutError:  # the others may take their time; a failure ends the wait
                self._session.check()
            except P3Error:
                self._session.check()
                raise


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
