"""Gradients that are not yet what the script expects of them: whoever looks at one, or sets it, is told so first.

While that is so, `grad` is a property of the parameter, of which C++ knows nothing: backward() gets at the gradient
itself. All else that is done with the parameter is as ever, also while its new value is under way (pending.py).
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any, Callable, Iterable, Iterator, List, Set

import torch
from torch._guards import CompileContext

from p3.torch.parameters import layers


class Watched:
    """Those of one optimizer. Threads: the script's."""

    def __init__(self, show: Callable[[], None]) -> None:
        """`show()` is called before the first watched gradient is read, set or deleted; then none is watched. If it
        raises, all are again."""
        self._show = show
        self._tensors: List[torch.Tensor] = []
        self._paused_by: Set[Any] = set()
        self.are_any = False  # for who asks at every gradient

    def begin(self, tensors: Iterable[torch.Tensor]) -> None:
        """From here on these are watched, and no others."""
        self.end()
        self._tensors = list(tensors)
        self.are_any = bool(self._tensors)
        self._lay()

    def end(self) -> None:
        if not self._tensors:
            return
        if not self._paused_by:
            self._take_away()
        self._tensors, self.are_any = [], False
        self._paused_by.clear()

    def pause(self, by: Any) -> None:
        """Until all who have called this have called resume(), or end() was called, the parameters are of their own
        class, and nobody is told. For compiled code, which would be compiled again for another class, and looks at
        gradients while it is; what it does with them is nothing."""
        if not self._tensors:
            return
        if not self._paused_by:
            self._take_away()
        self._paused_by.add(by)

    def resume(self, by: Any) -> None:
        """Nothing, unless it has called pause() before."""
        if by not in self._paused_by:
            return
        self._paused_by.remove(by)
        if not self._paused_by:
            self._lay()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        by = object()
        self.pause(by)
        try:
            yield
        finally:
            self.resume(by)

    def _lay(self) -> None:
        for tensor in self._tensors:
            tensor._p3_show = self._end_and_show
            layers.lay(tensor, _Shows)

    def _take_away(self) -> None:
        for tensor in self._tensors:
            layers.take_away(tensor, _Shows)
            del tensor._p3_show

    def _end_and_show(self) -> None:
        tensors = self._tensors
        self.end()
        try:
            with torch.inference_mode(False), torch.no_grad():  # what is made in inference mode has no versions
                self._show()
        except BaseException:
            self.begin(tensors)
            raise


class _Shows:
    @property
    def grad(self) -> Any:
        _show(self)
        return torch.Tensor.grad.__get__(self)

    @grad.setter
    def grad(self, gradient: Any) -> None:
        _show(self)
        torch.Tensor.grad.__set__(self, gradient)

    @grad.deleter
    def grad(self) -> None:
        _show(self)
        torch.Tensor.grad.__delete__(self)

    def __deepcopy__(self, memo: dict) -> Any:
        return self._as_it_was(lambda: copy.deepcopy(self, memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._as_it_was(lambda: self.__reduce_ex__(protocol))

    def _as_it_was(self, function: Callable[[], Any]) -> Any:
        """While nobody watches the tensor, as nobody shall watch the copy."""
        show = self.__dict__.pop("_p3_show")
        layers.take_away(self, _Shows)
        try:
            return function()
        finally:
            self._p3_show = show
            layers.lay(self, _Shows)


def _show(tensor: Any) -> None:
    if CompileContext.try_get() is None:  # the compiler looks at what it compiles code for
        tensor._p3_show()
