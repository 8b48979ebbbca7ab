"""The norm of a step's gradients over several stores, which the servers tell before the gradients themselves have come.

Each store has a key of norms (Session.declare_norm), which has one round in each step, as every other key has. What the
servers tell, all workers add up in one order: so they have the same bits.
"""

from __future__ import annotations

import math
from typing import Any, List, Sequence

import numpy as np

from p3.frontend import waiting
from p3.frontend.steps import FIRST
from p3.worker.session import Session


class StepNorm:
    """Of one step. It is waited for when it is first asked for."""

    def __init__(self, norms: Norms) -> None:
        self._norms = norms
        self._squares = self._largest = math.nan
        self._is_known = False

    def of(self, kind: float) -> float:
        """The norm; `kind`: 2 or math.inf. NaN or infinite if an element of the gradients is."""
        self.wait()
        if not math.isfinite(self._squares):
            return self._squares if kind == 2 or math.isnan(self._squares) else self._largest
        return math.sqrt(self._squares) if kind == 2 else self._largest

    @property
    def is_finite(self) -> bool:
        self.wait()
        return math.isfinite(self._squares)

    def wait(self) -> None:
        if not self._is_known:
            told = self._norms._wait(self)
            self._squares, self._largest = float(told[:, 0].sum()), float(told[:, 1].max())
            self._is_known = True


class Norms:
    """Of all keys of some stores, before those are declared. Threads: the script's."""

    def __init__(self, session: Session, stores: Sequence[int]) -> None:
        """On every worker at the same point; waits for them."""
        self._session = session
        self._keys = [session.declare_norm(store) for store in stores]
        self._told = [np.zeros(key.shape) for key in self._keys]
        for key, told in zip(self._keys, self._told):
            waiting.from_rank_0(session, key, told)
        self._step: Any = None  # the StepNorm under way
        self._operations: List[Any] = []

    def begin(self) -> StepNorm:
        """Of the step of which every key of the stores has begun its round."""
        self.finish()
        self._operations = [self._session.skip(key, told, FIRST, goes_on=True)
                            for key, told in zip(self._keys, self._told)]  # fmt: skip
        self._step = StepNorm(self)
        return self._step

    def finish(self) -> None:
        """Until the last step's is known."""
        if self._step is not None:
            self._step.wait()

    def _wait(self, step: StepNorm) -> np.ndarray:
        assert step is self._step  # those before are known
        for key, operation in zip(self._keys, self._operations):
            waiting.on_training_thread(self._session, key, operation, "the norm of a step's gradients")
        self._step = None
        return np.concatenate(self._told)
