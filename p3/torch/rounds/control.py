"""What the workers of one optimizer share besides its parameters: first values, and the count of steps.

Small keys of a store of their own. "values" has the bytes of all buffers, which rank 0 gives all workers; parameters
that no optimizer has come in their own way (frozen.py). Steps are counted as in every front end (p3/frontend/steps.py);
with them workers tell what p3/torch/batches wants to know.
"""

from __future__ import annotations

import collections
import math
from typing import Any, Callable, Deque, Dict, List, Optional, Sequence, Tuple

import numpy as np
import torch

from p3.frontend import samples as of_workers
from p3.frontend import steps, waiting
from p3.plan.strategy import Strategy
from p3.torch import rules
from p3.torch.batches import weights
from p3.torch.batches.alike import Alike
from p3.torch.parameters.arrays import as_bytes
from p3.torch.rounds.forward import named_buffers
from p3.torch.rounds.frozen import Frozen
from p3.worker.session import Session


class Control:
    def __init__(self, session: Session, models: Sequence[torch.nn.Module],
                 strategy: Optional[Strategy] = None) -> None:  # fmt: skip
        self._session = session
        self._models = models
        self._sizes = {name: _bytes(tensor) for name, tensor in named_buffers(models)}
        self.store = store = session.new_store(strategy, "control")
        self._values = session.declare("values", (sum(self._sizes.values()),), "uint8", store)
        self.steps = steps.Steps(session, store, tells=8)
        self.alike = Alike(session)
        # What all workers' updates begin with, as a number: where they update, the next step tells it.
        self.beginning: Optional[Callable[[], float]] = None
        self.left_out = 0  # steps, by zero_grad(), since the last one that this worker has taken, or followed in join()
        # Not looked at yet; with what this worker has told of its beginning, of steps left out, and of its data.
        self._counted: Deque[Tuple[steps.Count, float, float, float]] = collections.deque()
        self._number = session.declare("number", (2,), "float64", store)  # and how many workers give one
        self.frozen = Frozen(session, models, store, strategy)
        waiting.from_rank_0(session, self._number, np.zeros(2))

    def broadcast(self) -> None:
        """Buffers and frozen parameters of rank 0, on every worker at the same point. Waits for them. A process that
        joins a running job gets the frozen ones later, when it has made all optimizers: see Rounds.settle()."""
        if self._sizes:
            self.take(torch.from_numpy(waiting.from_rank_0(self._session, self._values, self.values().numpy())))
        if not self._session.entrance.is_on_trial:
            self.frozen.broadcast()

    def values(self) -> torch.Tensor:
        """This worker's bytes of its buffers."""
        buffers = [as_bytes(tensor) for tensor in self._buffers()]
        return torch.cat(buffers) if buffers else torch.empty(0, dtype=torch.uint8, device="cpu")

    def _buffers(self) -> List[torch.Tensor]:
        """As the models have them now: scripts put other tensors in the place of one."""
        now = dict(named_buffers(self._models))
        for name, size in self._sizes.items():
            if name not in now or _bytes(now[name]) != size:
                raise ValueError("buffer %s has another size than at DistributedOptimizer, or is gone" % name)
        return [now[name] for name in self._sizes]

    def take(self, values: torch.Tensor) -> None:
        """Bytes of all buffers, of values() here or elsewhere. ValueError if they are not as many."""
        if len(values) != sum(self._sizes.values()):
            raise ValueError(
                "the buffers of this model have %d bytes, and %d have come: they are of another model, or, in a "
                "snapshot, of another version of P3" % (sum(self._sizes.values()), len(values))
            )
        begin = 0
        with torch.no_grad():
            for tensor in self._buffers():
                end = begin + _bytes(tensor)
                tensor.copy_(values[begin:end].clone().view(tensor.dtype).view(tensor.shape))
                begin = end

    def count_step(
        self, groups: Sequence[Dict[str, Any]], samples: Optional[float] = None, is_new: bool = False
    ) -> steps.Count:
        """`groups`: the optimizer's. `samples`: of this worker's gradients, which others wait for; None: all workers'
        weigh the same. `is_new`: whether this worker has any gradient that no step has had; see are_new().
        ValueError if in a step before some have told samples, and others have not, or some have left out others."""
        self._look_at_counted()
        digest, beginning, (lr, decay) = self.alike.digest(), self._take_beginning(), _rates(groups)
        priority, left_out = steps.LAST if samples is None else steps.FIRST, float(self.left_out)
        told = (*of_workers.told(samples), float(is_new), lr, decay, beginning, left_out, digest)
        count = self.steps.count(lr, decay, told, priority)
        self._counted.append((count, beginning, left_out, digest))
        return count

    def _take_beginning(self) -> float:
        tell, self.beginning = self.beginning, None
        return 0.0 if tell is None else tell()

    def are_new(self, count: steps.Count) -> bool:
        """Whether any worker had such a gradient in that step. Waits until all have counted it."""
        self.steps.wait(count)
        return count.told[2] > 0

    def _look_at_counted(self) -> None:
        while self._counted and self._counted[0][0].operation.done:
            count, beginning, left_out, digest = self._counted.popleft()
            weights.require_told_by_all(self._session, count)
            self._require_same_beginning(count, beginning)
            self._require_same_left_out(count, left_out)
            self.alike.compare(digest, count.workers, count.told[-1])

    def _require_same_beginning(self, count: steps.Count, own: float) -> None:
        if count.told[5] != own * count.workers:
            raise ValueError(
                "%s: the workers' optimizers differ, and each updates its own weights: in class, settings, or states. "
                "Make the same one on every worker, and call load_state_dict() on all with the same content"
                % self._session.label
            )

    def _require_same_left_out(self, count: steps.Count, own: float) -> None:
        if count.told[6] != own * count.workers:
            raise ValueError(
                "%s: zero_grad() has left out other steps here than on other workers, so their gradients no longer "
                "belong to the same step: %d here before one step, %d on all %d workers together. Leave out the same "
                "ones on every worker; where backward() has reached no parameter of an optimizer, there is none to "
                "leave out"
                % (self._session.label, own, count.told[6], count.workers)
            )

    def require_same_updates(self, count: steps.Count, groups: Sequence[Dict[str, Any]]) -> None:
        """In join(), before this worker updates as those do that took the step. ValueError if it cannot."""
        self._require_same_beginning(count, self._take_beginning())
        own, theirs = _rates(groups), [told / count.workers for told in count.told[3:5]]
        if not np.allclose(own, theirs, rtol=1e-9, atol=0):
            raise ValueError(
                "%s: in join() the learning rates of this worker's param groups add up to %g, and those of the workers "
                "that take the step to %g; the weight decays to %g and %g. Pass join() what sets them behind each "
                "step, as scheduler.step does" % (self._session.label, own[0], theirs[0], own[1], theirs[1])
            )

    def mean(self, number: Any, factor: float = 1.0) -> Any:
        """Of what every worker gives at the same point, times its `factor`; None for a closure that returns none. Waits
        for it."""
        if isinstance(number, torch.Tensor):
            number = number.detach()
        value = np.array([math.nan if number is None else float(number) * factor, 1.0])  # others may have one, and wait
        if factor == 0.0:
            value[0] = 0.0  # also of what is no number
        total = np.empty_like(value)
        what = "for the losses of other workers, each of which must step() with a closure"
        self._session.wait([self._session.pushpull(self._number, value, total, steps.LAST)], what)
        mean = total[0] / total[1]
        if isinstance(number, torch.Tensor):
            return torch.tensor(mean, dtype=number.dtype, device=number.device)
        return None if number is None else torch.tensor(mean, device="cpu")

    def wait_for_rank_0(self) -> None:
        """Every worker at the same point: none goes on before rank 0 is here, which waits for nobody."""
        waiting.from_rank_0(self._session, self._number, np.zeros(2))


def _rates(groups: Sequence[Dict[str, Any]]) -> List[float]:
    """The learning rates of all, added up, and the weight decays."""
    return [sum(_number(group.get(name)) for group in groups) for name in ("lr", "weight_decay")]


def _number(value: Any) -> float:
    return rules.number(value) if isinstance(value, (int, float, torch.Tensor)) else 0.0


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
