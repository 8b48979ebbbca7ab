"""One weight's global value: an exchange of it is a round of its key, as of every gradient."""

from __future__ import annotations

from typing import Any, Callable, Optional

import numpy as np

from p3.frontend.local_steps.options import Outer
from p3.frontend.rounds import KeyRounds, Round
from p3.worker.key import Key
from p3.worker.session import Session


class Global(KeyRounds):
    """`landing` holds it whenever no round is under way; with a quorum, as of this worker's last exchange."""

    goes_ahead = False

    def __init__(self, session: Session, key: Key, outer: Outer, sends_weights: bool) -> None:
        landing = np.empty(key.shape, key.dtype)
        super().__init__(session, key, landing, landing)
        self._outer, self._sends_weights = outer, sends_weights
        self.has_quorum = key.axes.quorum > 0
        self.is_late = False  # what was sent last is not in the value that came for it, but will be in a later one
        self._local: Optional[np.ndarray] = None  # with a quorum: the local weight as it was sent

    def init(self, first: np.ndarray) -> None:
        """Rank 0's value becomes all workers'; waits for nothing. What compression has left out of former ones is
        forgotten."""
        if self._rounds > 0 and self._session.core.keeps_residual(self.key.handle):
            self._session.core.change_residual(self.key.handle, False, 0.0)
        value = first if self._session.is_first else None
        self._under_way = Round(self._session.init(self.key, value, self._array, self.priority), self._take_value)

    def made(self, local: np.ndarray, rounded: Callable[[np.ndarray], Optional[np.ndarray]]) -> np.ndarray:
        """What an exchange sends of the local weight: a new array, for push(). `rounded`: the global value as the local
        weight has it, None where that has it all."""
        self._make_room()
        if self.has_quorum:
            self._local = np.array(local)
        local = _with_rest(local, self.landing, rounded(self.landing))
        return np.array(local) if self._sends_weights else np.asarray(self.landing - local)

    def push(self, sent: np.ndarray, factor: float, priority: int) -> None:
        """Begins an exchange of what was made(), of which the difference counts by the factor. Returns at once."""
        sent = self._weighed(sent, sent.dtype.type(factor))
        self.priority = priority
        rescale = float(sent.dtype.type(factor)) if self.has_quorum else self._rescale  # servers divide by the sum
        scalars = (self._outer.lr, 0.0, rescale, self.updates + 1.0, 1.0)
        self._begin(self._session.pushpull(self.key, sent, self._array, priority, *scalars), is_skip=False)
        self.end_step()

    def _weighed(self, sent: np.ndarray, factor: Any) -> np.ndarray:
        """Weights that nobody has trained stay the global ones, to the bit; and nothing counts of what is no number."""
        if factor == 1:
            return sent
        if factor == 0:
            return np.array(self.landing) if self._sends_weights else np.zeros_like(sent)
        if not self._sends_weights:
            return np.multiply(sent, factor, out=sent)
        np.subtract(sent, self.landing, out=sent)
        np.multiply(sent, factor, out=sent)
        return np.add(sent, self.landing, out=sent)

    def caught_up(self, local: np.ndarray) -> np.ndarray:
        """The local weight to be behind an exchange that was late: the global one, and what this worker has learned
        since it sent. What it had learned before is on the servers, and comes with a later value."""
        return np.asarray(self.landing + (local - self._local))  # of no dimensions that is a number

    def stand_aside(self) -> None:
        """With a quorum: this worker pushes no more until all stand aside, and then has the value that all have. Waits
        for what is under way, and for nobody else; land() does."""
        self.take_last()

    def _take_value(self, _operation: Any) -> bool:
        if self.has_quorum:
            self.updates = self._session.updates(self.key)
        return True

    def _take_result(self, _operation: Any) -> None:
        if self.has_quorum:
            landed, included = self._session.landed_round(self.key)
            self.is_late = included < landed


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
