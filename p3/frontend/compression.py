"""How the gradients of a store's keys travel, and what comes back: one choice for all, or a function's for each.

A function is called with the name and shape of each key, on every worker, once. It has to choose alike everywhere: a
worker that chooses otherwise fails the job, with an error that names the key and both choices.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Tuple, Union

from p3.codecs import Ways
from p3.plan import options

Shape = Tuple[int, ...]
Given = Union[None, str, Dict[str, Any], Callable[[str, Shape], Any]]  # as Ways.of(), or what returns that


class Compression:
    """Of the keys of one store, as a script has given it."""

    def __init__(self, given: Given) -> None:
        """ValueError if there is no such compression. Of what a function returns, the methods raise it."""
        self._function = given if callable(given) else None
        self.of_store = Ways() if callable(given) else _validated(given)  # the store's options
        self._chosen: Dict[str, Ways] = {}  # by the function

    def of(self, name: str, shape: Shape) -> Ways:
        """Of the key of that name."""
        if self._function is None:
            return self.of_store
        if name not in self._chosen:
            given = self._function(name, shape)
            try:
                self._chosen[name] = _validated(given)
            except ValueError as error:
                raise ValueError("the compression of %s: %s" % (name, error)) from None
        return self._chosen[name]

    def options_of(self, name: str, shape: Shape) -> Dict[str, Any]:
        """Those that the key has in place of its store's (Session.declare)."""
        return {} if self._function is None else self.of(name, shape).of_key


def _validated(given: Any) -> Ways:
    if not isinstance(given, (str, dict, type(None))):
        raise ValueError("compression is %.100r; it must be a name, as 'int8', a dict, as {'up': 'int8', 'down': "
                         "'bf16'}, or None" % (given,))  # fmt: skip
    ways = Ways.of(given)
    for option, value in ways.options.items():
        options.validate(option, value)
    return ways
