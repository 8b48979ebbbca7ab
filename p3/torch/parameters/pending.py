"""A weight whose new value is under way: whoever touches its tensor gets that value, and waits for it.

From step() until the new value is in it, a parameter's tensor is of a class that torch asks first, before it does
anything with the tensor (`__torch_function__`): whether a module's forward, a list or an optimizer's group has brought
it there. Then the tensor gets its own class back, so a weight that has its value costs nothing. What needs no value, as
zero_grad() and shapes, waits for nothing.

torch does not ask where C++ gets the tensor itself: a function of an extension, or of torch.jit.script.
"""

from __future__ import annotations

from typing import Any, Callable, Iterator

import torch

from p3.torch.parameters import layers


def begin(tensor: torch.Tensor, land: Callable[[bool], Any]) -> None:
    """From here on `land(may_be_written)` is called before the tensor is used; it calls end(). `may_be_written`: the
    memory is given away, and what is written there torch does not count."""
    tensor._p3_pending = land
    layers.lay(tensor, _Pending)


def end(tensor: torch.Tensor) -> bool:
    """The tensor has its own class again. Whether it had not."""
    if tensor.__dict__.pop("_p3_pending", None) is None:
        return False
    layers.take_away(tensor, _Pending)
    return True


def untouched() -> Any:
    """A context in which torch asks nobody."""
    return torch._C.DisableTorchFunctionSubclass()


class _Pending:
    @classmethod
    @torch.compiler.disable
    def __torch_function__(cls, function, types, arguments=(), keywords=None):
        keywords = keywords or {}
        if function in _NEED_NO_VALUE:
            with untouched():
                return function(*arguments, **keywords)
        _land(function, arguments, keywords)
        return function(*arguments, **keywords)

    def __deepcopy__(self, memo: dict) -> Any:
        _land("deepcopy", (self,), {})
        return type(self).__deepcopy__(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _land("pickle", (self,), {})
        return self.__reduce_ex__(protocol)


def _land(function: Any, *arguments: Any) -> None:
    """What is pending within the arguments of `function` gets its value."""
    found = [tensor._p3_pending for tensor in _pending_in(arguments)]
    if not found:
        raise RuntimeError(
            "a weight whose new value is under way is within an argument of %s, where P3 does not find it: call "
            "optimizer.synchronize() before" % getattr(function, "__name__", function)
        )
    for land in found:
        land(function in _GIVE_MEMORY_AWAY)


def _pending_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if "_p3_pending" in value.__dict__:
            yield value
    elif isinstance(value, dict):
        yield from _pending_in(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _pending_in(one)


def _of_tensors(attributes: str, methods: str) -> frozenset:
    """As torch names them to `__torch_function__`; those that this release of torch has."""
    found = {getattr(torch.Tensor, name, None) for name in methods.split()}
    for name in attributes.split():
        attribute = getattr(torch.Tensor, name, None)
        found.update(getattr(attribute, access, None) for access in ("__get__", "__set__", "__delete__"))
    return frozenset(found - {None})


_NEED_NO_VALUE = _of_tensors(
    "grad requires_grad grad_fn is_leaf shape dtype device layout ndim names itemsize nbytes output_nr retains_grad "
    "is_cpu is_cuda is_meta is_mkldnn is_mps is_nested is_quantized is_sparse is_sparse_csr is_xpu _backward_hooks "
    "_post_accumulate_grad_hooks",
    "size stride dim ndimension numel nelement element_size storage_offset is_contiguous is_complex is_floating_point "
    "is_signed is_inference get_device has_names requires_grad_ register_hook register_post_accumulate_grad_hook "
    "__len__",
)
_GIVE_MEMORY_AWAY = _of_tensors(
    "data __cuda_array_interface__", "detach numpy data_ptr storage untyped_storage __array__ __dlpack__"
)
