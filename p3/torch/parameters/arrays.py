"""torch tensors as the core takes them: the elements in the order of memory, without a copy.

Whoever makes a tensor for the core names the CPU: the script may have set another default device.
"""

from __future__ import annotations

from typing import Any, Tuple, Union

import torch

from p3._core import Memory, digest

# Types of devices that the CPU has to wait for to see what is there. Tests of the staging add "cpu", whose streams and
# events in torch do nothing.
DEVICES = {"cuda"}

# What the core can sum; the names are P3's (p3._core.DTYPES).
DTYPES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill their memory, each once, in whatever order (channels_last, transposed ...)."""
    return tensor.layout == torch.strided and torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def in_memory_order(tensor: torch.Tensor) -> Any:
    """A dense CPU tensor as a NumPy array that shares its memory, with the elements in the order of that. It has the
    tensor's axes, where they are in that order, or one. See as_numpy()."""
    return as_numpy(tensor.detach() if tensor.is_contiguous() else flat(tensor))


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor as one axis, in the order of memory, which is the same."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def on_host(tensor: torch.Tensor) -> Any:
    """As in_memory_order(), with one axis, of a tensor on any device: if that is not the CPU, of a copy. Waits for the
    device."""
    return as_numpy(flat(tensor.detach().to("cpu")))


def as_numpy(tensor: torch.Tensor) -> Any:
    """The same memory. NumPy has no bfloat16: those are int16 there, bit for bit."""
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def memory_of(tensor: torch.Tensor) -> Any:
    """The same memory, of a dense CPU tensor, as bytes for the core: what in_memory_order() has, at less cost."""
    if type(tensor) in _PLAIN and not tensor.is_neg():
        address = tensor.data_ptr()
        if address != 0:  # else it has no elements, or they are zeros that torch has not made
            return Memory(tensor, address, tensor.nbytes)
    return in_memory_order(tensor)


_PLAIN = (torch.Tensor, torch.nn.Parameter)  # a class of its own may have more to it than memory


def shape_in_memory(tensor: torch.Tensor) -> Tuple[int, ...]:
    """The lengths of its axes from the outermost in memory to the innermost, so that workers agree on the order."""
    axes = sorted(range(tensor.dim()), key=lambda axis: -tensor.stride(axis))
    return tuple(tensor.shape[axis] for axis in axes)


def other_holders(tensor: torch.Tensor) -> int:
    """How many others have the tensor's memory: views and detached aliases, arrays of NumPy, graphs."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) - _ALONE


_ALONE = 0
_ALONE = other_holders(torch.empty(1, device="cpu"))


def bits(tensor: torch.Tensor) -> Union[int, torch.Tensor]:
    """A digest that changes with the elements, whatever has changed them. On a device it is a tensor there, so that
    nothing waits for that, and the same for every order of summation."""
    values = tensor if tensor.layout is torch.strided else tensor.detach()._values()
    if values.device.type not in DEVICES:
        has_order = values.is_contiguous() or is_dense(values)
        return digest(memory_of(values if has_order else values.contiguous()))
    values = values.detach()
    elements = flat(values) if is_dense(values) else values.reshape(-1)
    in_word = 8 // elements.element_size()
    if elements.storage_offset() % in_word:
        elements = elements.clone()
    words = elements.numel() // in_word * in_word
    return elements[:words].view(torch.int64).sum() ^ elements[words:].view(torch.uint8).sum()


def integers(elements: torch.Tensor) -> torch.Tensor:
    """The same memory, in which every element equals itself, whatever number it is or is not."""
    return elements.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[elements.element_size()])


def master_type(tensor: torch.Tensor) -> torch.dtype:
    """Of the copy of a weight that an optimizer steps: half precision's is float32, as a step may be less than such a
    weight can show."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def like(tensor: torch.Tensor, content: torch.Tensor) -> torch.Tensor:
    """`content` in the order of memory of `tensor`; itself, if it has that."""
    if content.stride() == tensor.stride():
        return content
    return torch.empty_like(tensor, dtype=content.dtype, device=content.device, requires_grad=False).copy_(content)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements' bytes, in the order of the axes and in CPU memory; in place if they lie so."""
    return tensor.detach().to("cpu").reshape(-1).view(torch.uint8)
