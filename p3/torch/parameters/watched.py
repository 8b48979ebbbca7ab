"""Gradients that are not yet what the script expects of them: whoever looks at one, or sets it, is told so first.

As with weights that are under way (pending.py), the parameter is of a class that torch asks first. torch does not ask
where C++ gets at the gradient itself, as backward() does.
"""

from __future__ import annotations

import copy
import functools
from typing import Any, Callable, Iterable, List

import torch

from p3.torch.parameters import pending


class Watched:
    """Those of one optimizer. Threads: the script's."""

    def __init__(self, show: Callable[[], None]) -> None:
        """`show()` is called before the first watched gradient is read, set or deleted; then none is watched. If it
        raises, all are again."""
        self._show = show
        self._tensors: List[torch.Tensor] = []

    def begin(self, tensors: Iterable[torch.Tensor]) -> None:
        """From here on these are watched, none of which is pending, and no others."""
        self.end()
        self._tensors = list(tensors)
        for tensor in self._tensors:
            tensor._p3_show, tensor.__class__ = self._end_and_show, _asks(type(tensor))

    def _end_and_show(self) -> None:
        tensors = self._tensors
        self.end()
        try:
            with torch.inference_mode(False), torch.no_grad():  # what is made in inference mode has no versions
                self._show()
        except BaseException:
            self.begin(tensors)
            raise

    def end(self) -> None:
        for tensor in self._tensors:
            tensor.__class__ = type(tensor).__bases__[1]
            del tensor._p3_show
        self._tensors = []


class _Asks:
    @classmethod
    @torch.compiler.disable
    def __torch_function__(cls, function, types, arguments=(), keywords=None):
        keywords = keywords or {}
        if function in _OF_GRADIENTS:
            arguments[0]._p3_show()
            return function(*arguments, **keywords)
        pending.land_for(function, arguments, keywords)  # another optimizer's weights, which nobody asks below
        with pending.untouched():
            return function(*arguments, **keywords)

    def __deepcopy__(self, memo: dict) -> Any:
        return self._as_it_was(lambda: copy.deepcopy(self, memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._as_it_was(lambda: self.__reduce_ex__(protocol))

    def _as_it_was(self, function: Callable[[], Any]) -> Any:
        """While the tensor is of its own class: a copy is watched by nobody."""
        kind, show = type(self), self.__dict__.pop("_p3_show")
        self.__class__ = kind.__bases__[1]
        try:
            return function()
        finally:
            self._p3_show, self.__class__ = show, kind


@functools.lru_cache(maxsize=None)
def _asks(kind: type) -> type:
    return type(kind.__name__, (_Asks, kind), {"__module__": kind.__module__})


_OF_GRADIENTS = frozenset(getattr(torch.Tensor.grad, access) for access in ("__get__", "__set__", "__delete__"))
