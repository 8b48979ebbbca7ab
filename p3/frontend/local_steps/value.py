"""One weight's global value: an exchange of it is a round of its key, as of every gradient."""

from __future__ import annotations

from typing import Any, Callable, Optional

import numpy as np

from p3.frontend.local_steps.options import Outer
from p3.frontend.rounds import KeyRounds, Round
from p3.worker.key import Key
from p3.worker.session import Session


class Global(KeyRounds):
    """`landing` holds it whenever no round is under way."""

    def __init__(self, session: Session, key: Key, outer: Outer, sends_weights: bool) -> None:
        landing = np.empty(key.shape, key.dtype)
        super().__init__(session, key, landing, landing)
        self._outer, self._sends_weights = outer, sends_weights

    def init(self, first: np.ndarray) -> None:
        """Rank 0's value becomes all workers'; waits for nothing. What compression has left out of former ones is
        forgotten."""
        if self._rounds > 0 and self._session.core.keeps_residual(self.key.handle):
            self._session.core.change_residual(self.key.handle, False, 0.0)
        value = first if self._session.is_first else None
        self._under_way = Round(self._session.init(self.key, value, self._array, self.priority), self._take_value)

    def push(self, local: np.ndarray, priority: int, rounded: Callable[[np.ndarray], Optional[np.ndarray]]) -> None:
        """Begins an exchange; `local` may be written to afterwards. `rounded`: the global value as the local weight has
        it, None where that has it all. Returns at once."""
        self._make_room()
        self.priority = priority
        local = _with_rest(local, self.landing, rounded(self.landing))
        sent = np.array(local) if self._sends_weights else np.asarray(self.landing - local)
        scalars = (self._outer.lr, 0.0, self._rescale, self.updates + 1.0, 1.0)
        self._begin(self._session.pushpull(self.key, sent, self._array, priority, *scalars), is_skip=False)
        self.end_step()

    def _take_value(self, _operation: Any) -> bool:
        return True

    def _take_result(self, _operation: Any) -> None:
        pass


def _with_rest(local: np.ndarray, value: np.ndarray, rounded: Optional[np.ndarray]) -> np.ndarray:
    """The local weight, with what half precision has rounded off the global one: else each exchange would send that
    back as if it had been trained, and steps smaller than the rounding would come to nothing."""
    if rounded is None:
        return local
    return np.where(local == rounded, value, value + (local - rounded))


def merged(local: Any, value: Any, alpha: float) -> Any:
    """Of arrays or tensors. With an alpha of 0 it is the value, whatever the local weight is. Of equal ones it is that,
    to the bit."""
    return value if alpha == 0 else local if alpha == 1 else local + (1 - alpha) * (value - local)
