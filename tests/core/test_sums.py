"""The core's sums against NumPy, and half precision against NumPy's float16."""

import random

import numpy as np
import pytest
from p3.measure._kernels import add_to_sum, finish_sum, start_sum, use_avx2

TYPES = ["float32", "float64", "float16", "uint8", "int32", "int8", "int64"]


@pytest.fixture(params=["avx2", "baseline"])
def loops(request):
    """Runs a test with both builds of the loops."""
    before = use_avx2()
    if request.param == "avx2" and not before:
        pytest.skip("this CPU has no AVX2 and F16C")
    use_avx2(request.param == "avx2")
    yield
    use_avx2(before)


def _accumulator(dtype, shape):
    return np.empty(shape, np.float32 if dtype == "float16" else dtype)


def _sum(arrays):
    accumulator = _accumulator(arrays[0].dtype.name, arrays[0].shape)
    start_sum(accumulator, arrays[0])
    for array in arrays[1:]:
        add_to_sum(accumulator, array)
    total = np.empty_like(arrays[0])
    finish_sum(total, accumulator)
    return total


@pytest.mark.parametrize("elements", [0, 1, 7, 8, 31, 50000])
@pytest.mark.parametrize("dtype", TYPES)
def test_sum_in_rank_order_equals_numpy_to_the_bit(loops, dtype, elements):
    seed = random.randrange(2**31)
    print(f"seed {seed}")  # shown when the test fails
    generator = np.random.RandomState(seed)
    if np.dtype(dtype).kind == "f":
        arrays = [generator.normal(scale=100, size=elements + 1).astype(dtype) for _ in range(5)]
    else:
        arrays = [generator.bytes((elements + 1) * np.dtype(dtype).itemsize) for _ in range(5)]
        arrays = [np.frombuffer(array, dtype) for array in arrays]  # all values: sums wrap around
    arrays = [array[1:] for array in arrays]  # one element off alignment
    expected = arrays[0].astype(_accumulator(dtype, 0).dtype)
    for array in arrays[1:]:
        expected += array
    assert _sum(arrays).tobytes() == expected.astype(dtype).tobytes()


def test_nan_and_infinity_are_passed_on(loops):
    one = np.array([np.nan, np.inf, np.inf, 1, -np.inf] * 5, np.float32)
    two = np.array([1, 1, -np.inf, np.nan, -np.inf] * 5, np.float32)
    for dtype in ("float32", "float64", "float16"):
        total = _sum([one.astype(dtype), two.astype(dtype)])
        np.testing.assert_array_equal(total, np.array([np.nan, np.inf, np.nan, np.nan, -np.inf] * 5, dtype))


def test_half_to_float_is_numpys_for_all_65536_values(loops):
    halves = np.arange(65536, dtype=np.uint16).view(np.float16)
    widened = np.empty(65536, np.float32)
    start_sum(widened, halves)
    number = ~np.isnan(halves)
    assert widened[number].tobytes() == halves[number].astype(np.float32).tobytes()
    assert np.array_equal(np.isnan(widened), ~number)
    back = np.empty(65536, np.float16)
    finish_sum(back, widened)
    assert back[number].tobytes() == halves[number].tobytes()
    assert np.array_equal(np.isnan(back), ~number)


def test_float_to_half_rounds_as_numpy_does(loops):
    """Every half, the middle to its neighbour (a tie), and the floats just beside both; then random bits."""
    halves = np.arange(0x7C01, dtype=np.uint16).view(np.float16).astype(np.float64)
    halves[-1] = 65536  # infinity's place, had the type one more exponent
    middles = (halves[:-1] + halves[1:]) / 2
    points = np.concatenate([halves, middles]).astype(np.float32)  # exact
    points = np.concatenate([points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(0))])
    bits = np.random.RandomState(0).randint(0, 2**32, 200000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    floats = np.concatenate([points, -points, bits[~np.isnan(bits)]])
    narrowed = np.empty(floats.shape, np.float16)
    finish_sum(narrowed, floats)
    with np.errstate(over="ignore"):
        expected = floats.astype(np.float16)
    assert narrowed.tobytes() == expected.tobytes()


def test_both_builds_give_the_same_nan():
    if not use_avx2():
        pytest.skip("this CPU has no AVX2 and F16C")
    halves = np.arange(65536, dtype=np.uint16).view(np.float16)
    floats = (np.arange(65536, dtype=np.uint32) << 8 | np.uint32(0x7F000000)).view(np.float32)
    results = []
    try:
        for wide in (True, False):
            use_avx2(wide)
            widened, narrowed = np.empty(65536, np.float32), np.empty(65536, np.float16)
            start_sum(widened, halves)
            finish_sum(narrowed, floats)
            results.append(widened.tobytes() + narrowed.tobytes())
    finally:
        use_avx2(True)
    assert results[0] == results[1]


def test_arrays_that_do_not_fit_are_refused():
    with pytest.raises(TypeError, match="accumulator has type float16; it must be float32"):
        start_sum(np.empty(3, np.float16), np.ones(3, np.float16))
    with pytest.raises(ValueError, match="accumulator has 3 elements; it must have 4"):
        add_to_sum(np.empty(3, np.float32), np.ones(4, np.float32))
    with pytest.raises(TypeError, match="elements of format"):
        start_sum(np.empty(3, np.complex64), np.ones(3, np.complex64))
    with pytest.raises((ValueError, BufferError)):
        start_sum(np.empty(3, np.float32), np.ones(6, np.float32)[::2])
    read_only = np.empty(3, np.float32)
    read_only.flags.writeable = False
    with pytest.raises((ValueError, BufferError)):
        finish_sum(read_only, np.ones(3, np.float32))
