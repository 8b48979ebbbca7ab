"""P3_CHECK=N: every N steps, all workers compare the digests of all parameters (p3/frontend/check.py)."""

from __future__ import annotations

from typing import Callable, Dict, Optional

import torch

from p3.frontend.check import Digests
from p3.plan.strategy import Strategy
from p3.torch.parameters.arrays import on_host
from p3.torch.parameters.parameter import Parameter
from p3.worker.session import Session


class Check:
    def __init__(self, session: Session, parameters: Dict[torch.Tensor, Parameter], every: int,
                 strategy: Optional[Strategy] = None) -> None:  # fmt: skip
        """`every` so many steps; 0: never. All workers have the same."""
        self._parameters, self.every, self.steps = parameters, every, 0
        self.stores = [session.new_store(strategy, "digests")] if every else []
        if every:
            self._digests = Digests(session, self.stores[0], [one.name for one in parameters.values()])

    def after_step(self, land: Callable[[], None]) -> None:
        """RuntimeError if a parameter is not the same on all workers. `land` waits for all new values."""
        self.steps += 1
        if not self.every or self.steps % self.every:
            return
        land()
        advice = ". Does the script write to parameters, or do the workers run different models?"
        self._digests.require_same(map(on_host, self._parameters), "after step %d the workers' weights" % self.steps,
                                   advice)  # fmt: skip
