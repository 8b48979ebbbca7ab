"""P3_CHECK=N: every N steps, all workers compare the digests of all parameters. For finding errors, not for speed.

The digests of all workers are added up; if they are the same everywhere, each sum is the own digest times the number of
workers, which is counted with them. The parameter that differs is named, on each worker whose digest is not the mean:
on one at least.
"""

from __future__ import annotations

import zlib
from typing import Callable, Dict, Optional

import numpy as np
import torch

from p3.frontend import waiting
from p3.plan.strategy import Strategy
from p3.torch.parameters.arrays import on_host
from p3.torch.parameters.parameter import Parameter
from p3.worker.session import Session


class Check:
    def __init__(self, session: Session, parameters: Dict[torch.Tensor, Parameter], every: int,
                 strategy: Optional[Strategy] = None) -> None:  # fmt: skip
        """`every` so many steps; 0: never. All workers have the same."""
        self._session, self._parameters, self._every = session, parameters, every
        self._steps = 0
        self.stores = [session.new_store(strategy)] if every else []
        if every:
            self._key = session.declare("digests", (len(parameters) + 1,), "int64", self.stores[0])
            waiting.from_rank_0(session, self._key, np.zeros(len(parameters) + 1, np.int64))

    def after_step(self, land: Callable[[], None]) -> None:
        """RuntimeError if a parameter is not the same on all workers. `land` waits for all new values."""
        self._steps += 1
        if not self._every or self._steps % self._every:
            return
        land()
        own = np.array([*(zlib.crc32(on_host(tensor)) for tensor in self._parameters), 1], np.int64)
        total = np.empty_like(own)
        what = "for the digests of other workers (P3_CHECK), which take the same steps"
        self._session.wait([self._session.pushpull(self._key, own, total)], what)
        is_same = total == own * total[-1]
        differing = [one.name for one, same in zip(self._parameters.values(), is_same) if not same]
        if differing:
            raise RuntimeError(
                "%s: after step %d the workers' weights differ, in %s. Does the script write to parameters, or do the "
                "workers run different models?" % (self._session.label, self._steps, ", ".join(differing))
            )
