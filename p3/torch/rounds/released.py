"""What a distributed optimizer is when its training has ended."""

from __future__ import annotations

from typing import Any, Callable, Dict, NoReturn


class Released:
    """In the place of an optimizer's Rounds that are over. What needs no job is torch's own again."""

    def __init__(self, why: str) -> None:
        self._why = why

    def release(self) -> None:
        pass

    def watch_gradients(self) -> None:
        pass

    def renew_weights(self) -> None:
        pass

    def zero_grad(self, zero_grad: Callable[[bool], None], set_to_none: bool) -> None:
        zero_grad(set_to_none)

    def with_states(self, state_dict: Callable[[], Dict[str, Any]]) -> Dict[str, Any]:
        return state_dict()

    def load(self, load_state_dict: Callable[[Dict[str, Any]], None], content: Dict[str, Any]) -> None:
        load_state_dict(content)

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError(
            "this optimizer was released: %s"
            % (self._why or "give it to DistributedOptimizer again, or load its state_dict() into a plain one")
        )
