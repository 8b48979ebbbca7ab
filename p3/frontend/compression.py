"""How the gradients of a store's keys travel, and what comes back: one choice for all, or a function's for each.

A function is called with the name and shape of each key, on every worker, once. It has to choose alike everywhere: a
worker that chooses otherwise fails the job, with an error that names the key and both choices. A strategy
(p3/plan/strategy.py) chooses for keys of which the script leaves it open.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Tuple, Union

from p3.codecs import Ways
from p3.plan.options import ways_of
from p3.plan.strategy import Strategy

Shape = Tuple[int, ...]
Given = Union[None, str, Dict[str, Any], Callable[[str, Shape], Any]]  # as Ways.of(), or what returns that


class Compression:
    """Of the keys of one store, as a script has given it."""

    def __init__(self, given: Given, strategy: Strategy = Strategy()) -> None:
        """ValueError if there is no such compression. Of what a function returns, and where the script and the strategy
        contradict each other, the methods raise it."""
        self._given, self.strategy = given, strategy
        self.of_store = Ways() if callable(given) else ways_of(given)  # the store's options
        self._chosen: Dict[str, Ways] = {}  # by the function

    def planned(self, strategy: Strategy) -> Compression:
        """The same, with a strategy's choices."""
        return Compression(self._given, strategy)

    def of(self, name: str, shape: Shape) -> Ways:
        """Of the key of that name."""
        return self.strategy.ways(name, self._of_script(name, shape))

    def options_of(self, name: str, shape: Shape) -> Dict[str, Any]:
        """Those that the key has in place of its store's (Session.declare)."""
        ways = self.of(name, shape)
        return ways.of_key if callable(self._given) or ways != self.of_store else {}

    def _of_script(self, name: str, shape: Shape) -> Ways:
        if not callable(self._given):
            return self.of_store
        if name not in self._chosen:
            given = self._given(name, shape)
            try:
                self._chosen[name] = ways_of(given)
            except ValueError as error:
                raise ValueError("the compression of %s: %s" % (name, error)) from None
        return self._chosen[name]
