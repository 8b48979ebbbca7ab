"""What the workers of one optimizer share besides its parameters: first values, and the count of steps.

Small keys of a store of their own. "values" has the bytes of everything that rank 0 gives all workers and no
optimizer trains: buffers, and parameters that no optimizer has. "steps" has a round for each step of the optimizer:
its sum is how many workers took the step, so a worker in join() learns that nobody does any more.
"""

from __future__ import annotations

from typing import Any, Dict, List, Sequence, Tuple

import numpy as np
import torch

from p3.torch import job
from p3.torch.arrays import as_bytes
from p3.torch.forward import named_buffers, named_parameters
from p3.worker.session import Session

_LAST = -(1 << 19)  # behind every gradient


class Control:
    def __init__(self, session: Session, models: Sequence[torch.nn.Module]) -> None:
        self._session = session
        self._models = models
        others = {name: tensor for name, tensor in self._named() if not hasattr(tensor, "_p3_parameter")}
        self._sizes = {name: _bytes(tensor) for name, tensor in others.items()}
        store = session.new_store()
        self._values = session.declare("values", (sum(self._sizes.values()),), "uint8", store)
        self._steps = session.declare("steps", (1,), "float32", store)
        self._number = session.declare("number", (1,), "float64", store)
        self._one, self._sum = np.ones(1, np.float32), np.zeros(1, np.float32)
        job.from_rank_0(session, self._steps, self._sum)
        job.from_rank_0(session, self._number, np.zeros(1))
        self._counting: List[Any] = []  # rounds under way

    def broadcast(self) -> None:
        """Buffers and untrained parameters of rank 0, on every worker at the same point. Waits for them."""
        if not self._sizes:
            return
        self.take(torch.from_numpy(job.from_rank_0(self._session, self._values, self.values().numpy())))

    def values(self) -> torch.Tensor:
        """This worker's bytes of them."""
        others = [as_bytes(tensor) for tensor in self._others()]
        return torch.cat(others) if others else torch.empty(0, dtype=torch.uint8)

    def _named(self) -> List[Tuple[str, torch.Tensor]]:
        return named_parameters(self._models) + named_buffers(self._models)

    def _others(self) -> List[torch.Tensor]:
        """As the models have them now: scripts put other tensors in the place of a buffer."""
        now = dict(self._named())
        for name, size in self._sizes.items():
            if name not in now or _bytes(now[name]) != size:
                raise ValueError("buffer %s has another size than at DistributedOptimizer, or is gone" % name)
        return [now[name] for name in self._sizes]

    def take(self, values: torch.Tensor) -> None:
        begin = 0
        with torch.no_grad():
            for tensor in self._others():
                end = begin + _bytes(tensor)
                if not hasattr(tensor, "_p3_parameter"):  # meanwhile another optimizer may have it
                    tensor.copy_(values[begin:end].clone().view(tensor.dtype).view(tensor.shape))
                begin = end

    def count_step(self, groups: Sequence[Dict[str, Any]]) -> None:
        """`groups`: the optimizer's. The servers compare their learning rates and weight decays, whoever updates: else
        workers whose schedulers look at a loss of their own would drift apart."""
        lr, wd = (sum(_number(group.get(name)) for group in groups) for name in ("lr", "weight_decay"))
        operation = self._session.pushpull(self._steps, self._one, self._sum, _LAST, lr, wd)
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
        job.wait(self._session, operation)  # the others may take their time; a failure ends the wait
        return operation.updated


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float, torch.Tensor)) else 0.0


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
