"""A GradScaler beside compression that keeps what it leaves out (p3/frontend/loss_scale.py).

The scaler tells no one that it leaves a step out: it does not call step(). So that is known when the next gradient
comes, or a snapshot is taken.
"""

from __future__ import annotations

from typing import Any, Optional

from p3.frontend.loss_scale import LossScale
from p3.plan import choices, combinations


class Scaling:
    """Of one synchronous optimizer's rounds. Threads: the script's, as theirs."""

    def __init__(self, session, rounds, grad_scaler: Any) -> None:
        """`grad_scaler`: None if the script has named none."""
        self._rounds, self._scaler = rounds, grad_scaler
        self._loss_scale = LossScale(session)
        self._is_round_open = False  # gradients of the step have been pushed
        self._has_unused_sums = False

    @property
    def is_named(self) -> bool:
        """The script has named a scaler."""
        return self._scaler is not None

    @property
    def scale(self) -> Optional[float]:
        return self._loss_scale.scale

    def resume(self, scale: Optional[float]) -> None:
        self._loss_scale.scale = scale

    def require_known(self) -> None:
        """ValueError if a scaler is in use that what is left out cannot follow."""
        if self._scaler is not None:
            return
        for one in self._rounds.parameters:
            combinations.require("parameter %s" % one.name, *one.kept, choices.UNNAMED_SCALER)

    def begin_round(self) -> None:
        """Before the first push of a step; before its end, if this worker has none: others of its machine may push, and
        it encodes for them."""
        if self._scaler is None or self._is_round_open:
            return
        self.settle()
        self._is_round_open = True

    def settle(self) -> None:
        """Between two steps: what is left out is as it must be for the next."""
        if self._scaler is None or self._is_round_open:
            return
        if self._has_unused_sums:
            self._loss_scale.leave_out([one.key for one in self._rounds.parameters])
            self._has_unused_sums = False
        self._loss_scale.follow(self._scaler.get_scale(), [one.key for one in self._rounds.parameters])

    def end_round(self) -> None:
        """All sums have come."""
        self._is_round_open, self._has_unused_sums = False, True

    def sums_are_used(self) -> None:
        self._has_unused_sums = False
