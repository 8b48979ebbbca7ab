"""Tensors as the core reads them: by their address where that says all, else as NumPy has them."""

import numpy as np
import pytest

pytest.importorskip("torch")
import torch
from p3._core import Memory, digest
from p3.torch.parameters.arrays import bits, in_memory_order, memory_of


def test_memory_holds_what_it_is_of():
    array = np.arange(6, dtype=np.float32)
    memory = Memory(array, array.ctypes.data, array.nbytes)
    expected = array.tobytes()
    del array
    assert memoryview(memory).tobytes() == expected


@pytest.mark.parametrize("kind", [torch.Tensor.clone, torch.nn.Parameter], ids=["tensor", "parameter"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_the_memory_of_a_tensor_has_the_bytes_of_its_array(kind, dtype):
    tensor = kind(torch.randn(3, 5).to(dtype))
    for one in (tensor, tensor.t()):  # a dense one in another order
        memory = memory_of(one)
        assert isinstance(memory, Memory)
        assert memoryview(memory).tobytes() == in_memory_order(one).tobytes()
        assert bits(one) == digest(in_memory_order(one))


def test_what_an_address_does_not_tell_is_left_to_numpy():
    assert not isinstance(memory_of(torch.empty(0, 3)), Memory)
    with pytest.raises(RuntimeError):  # its elements are the negative of what is in memory
        memory_of(torch._neg_view(torch.ones(3)))
    with pytest.raises(RuntimeError):  # which have no memory
        memory_of(torch._efficientzerotensor((3,)))
