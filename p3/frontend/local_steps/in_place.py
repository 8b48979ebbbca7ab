"""A trainer of a model whose weights are written in place, and which shows the global ones for a while."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from typing import Any, Callable, Dict, Iterator, Optional

from p3.frontend.local_steps.trainer import LocalTrainer


class InPlaceTrainer(LocalTrainer):
    """While the model has the global weights, nothing may be called that would change them, or that needs this worker's
    own."""

    _is_stepping = False
    _own: Optional[Dict[str, Any]] = None  # this worker's weights, while the model has the global ones

    @property
    def shows_global(self) -> bool:
        """Whether the model has the global weights, and not this worker's own."""
        return self._own is not None

    def require_own_weights(self, of: str) -> None:
        """RuntimeError within global_weights(). `of`: the script's call."""
        if self._own is not None:
            raise RuntimeError("%s within global_weights(), behind which the parameters become this worker's own "
                               "again, and it would be lost: leave the with block before" % of)  # fmt: skip

    # What a front end does

    @abstractmethod
    def before_step(self) -> None:
        """Before each step; it may refuse it."""

    @abstractmethod
    def copied(self) -> Dict[str, Any]:
        """The local weights as they are now, by name."""

    @abstractmethod
    def put_back(self, own: Dict[str, Any]) -> None:
        """The local weights become those that copied() gave."""

    # The script's calls

    def take_step(self, step: Callable, *arguments: Any, **keywords: Any) -> Any:
        """`step` is the front end's own, or of a class or a scheduler that calls that."""
        if self._is_stepping:
            return step(*arguments, **keywords)
        self.before_step()
        self._is_stepping = True
        try:
            result = step(*arguments, **keywords)
        finally:
            self._is_stepping = False
        self.after_step()
        return result

    def take_global(self) -> None:
        self.require_own_weights("take_global()")
        super().take_global()

    def broadcast(self) -> None:
        self.require_own_weights("broadcast()")
        super().broadcast()

    @contextlib.contextmanager
    def global_weights(self) -> Iterator[None]:
        self.require_own_weights("global_weights()")
        self._own = own = self.copied()
        try:
            self._show_global()
            yield
        finally:
            self._own = None
            self.put_back(own)

    def _show_global(self) -> None:
        for name, value in self.values().items():
            self.merge(name, value, 0.0)

    def own_state(self) -> Dict[str, Any]:
        self.require_own_weights("snapshot()")
        return super().own_state()

    def release(self) -> None:
        self.require_own_weights("release()")
        super().release()
