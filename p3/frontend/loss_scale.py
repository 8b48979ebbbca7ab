"""What compression has left out of gradients whose loss is scaled, as mixed precision does.

Some codecs, 2bit for one, keep what a gradient is more than what was sent, and add it to the next one. So it has the
scale of the loss, and changes with that; and where a step is left out because a gradient has overflowed, what its
pushes have changed is taken back. Then the training goes on as if that step had never been. Where one worker encodes
for all of its machine, it alone keeps what is left out, and the core ignores these calls on the others.

Threads: the script's. No push of the keys may be under way.
"""

from __future__ import annotations

from typing import Iterable, Optional, Set

from p3.worker.key import Key
from p3.worker.session import Session


class LossScale:
    """Of one loss scaler. Each key that it is for then keeps 4 bytes more for each element."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._known: Set[int] = set()  # handles of keys
        self.scale: Optional[float] = None  # of what was left out so far; None: nothing was

    def follow(self, scale: float, keys: Iterable[Key]) -> None:
        """From their next push on, gradients of these keys (all that the scaler is for) have this scale."""
        core = self._session.core
        handles = [key.handle for key in keys if core.keeps_residual(key.handle)]
        for handle in handles:
            if handle not in self._known:
                self._known.add(handle)
                core.keep_former_residual(handle)
        if self.scale is not None and self.scale != scale:
            for handle in handles:
                core.change_residual(handle, False, scale / self.scale)
        self.scale = scale

    def leave_out(self, keys: Iterable[Key]) -> None:
        """Nobody uses the sums of the last step, in which these keys had a round."""
        for key in keys:
            if key.handle in self._known:
                self._session.core.change_residual(key.handle, True, 1.0)
