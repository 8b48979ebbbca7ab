"""Each codec of gradients on slices: against its NumPy reference, to the bit; its bytes; what it loses."""

import math

import compressions
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from p3 import codecs
from p3.measure._kernels import NativeCodec, use_avx2

# Of a slice, as docs/protocol.md has it.
BYTES = {
    "fp16": lambda n: 4 + 2 * n,
    "2bit": lambda n: 4 * math.ceil(n / 16),
    "1bit": lambda n: 8 + math.ceil(n / 8),
    "bf16": lambda n: 2 * n,
    "int8": lambda n: 2 * math.ceil(n / 128) + n,
    "int4": lambda n: 2 * math.ceil(n / 64) + math.ceil(n / 2),
    "topk": lambda n: top_k_bytes(n, 0.01, 8),
}
EXACT = ["int8", "int4", "topk"]  # what was sent and what is kept are what came
TOP_K = [{"ratio": ratio, "value_bits": bits} for ratio in (1e-9, 0.1, 0.5, 1.0) for bits in (2, 3, 4, 5, 8)]
SIZES = [0, 1, 2, 3, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000, 4097, 50_000, 70_000]


def top_k_bytes(n, ratio, value_bits):
    k = max(1, math.ceil(ratio * n))
    return 4 + math.ceil(k * value_bits / 8) + k + math.ceil((k + math.ceil(n / 256)) / 8)


def gradients_of(size, scale=1.0, rounds=4):
    random = np.random.RandomState(size % 1000)
    return [(scale * random.randn(size)).astype("float32") for _ in range(rounds)]


def check(gradients, kind, **options):
    """Over rounds: payloads, sums and what is kept are NumPy's, and a payload is decoded where it lands, too."""
    size = gradients[0].size
    codec = NativeCodec(codecs.codecs()[kind].complete(**options))
    reference = compressions.sender(kind, max(size, 1), **options)
    residual = np.zeros(size, "float32") if codec.residuals else None
    payload, total, expected = np.empty(codec.bytes(size), "uint8"), *np.zeros((2, size), "float32")
    for gradient in gradients:
        sent, got = reference(gradient), np.empty(size, "float32")
        codec.encode(gradient, residual, payload)
        codec.start_sum(got, payload)
        np.testing.assert_array_equal(got, sent)
        codec.add_to_sum(total, payload)
        expected = expected + sent
        np.testing.assert_array_equal(total, expected)
        if residual is not None:
            np.testing.assert_array_equal(residual, reference.residual)


@pytest.fixture(params=[True, False], ids=["avx2", "baseline"])
def _builds(request):
    before = use_avx2()
    if request.param and not before:
        pytest.skip("no AVX2 here")
    use_avx2(request.param)
    yield
    use_avx2(before)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", codecs.of_gradients())
def test_slices_are_encoded_as_numpy_has_it(kind, size, _builds):
    check(gradients_of(size), kind)


@pytest.mark.parametrize("size", [1, 2, 257, 5000, 70_000])
@pytest.mark.parametrize("options", TOP_K, ids=str)
def test_the_largest_are_those_of_numpy_with_any_options(options, size):
    check(gradients_of(size), "topk", **options)
    assert NativeCodec({"type": "topk", **options}).bytes(size) == top_k_bytes(size, **options)


FLOATS = st.floats(-(2.0**120), 2.0**120, width=32)


IN_TWO_BITS = ("topk", {"ratio": 0.3, "value_bits": 2})


@pytest.mark.parametrize("kind, options", [*((kind, {}) for kind in ("fp16", "bf16", *EXACT)), IN_TWO_BITS])
@settings(max_examples=60)
@given(data=st.data())
def test_any_numbers_are_encoded_as_numpy_has_it(kind, options, data):
    size = data.draw(st.integers(1, 200))
    check(data.draw(st.lists(arrays("float32", size, elements=FLOATS), min_size=1, max_size=3)), kind, **options)


@pytest.mark.parametrize("bits", [2, 8])
@pytest.mark.parametrize("values", [
    [3.4e38, -3.39e38, 3.4028234e38], [1e-45, 3e-45, -1e-38], [1.0, 1e-20, -1e-7, 3e38], [0.0, -0.0, 2.0], [0.0, 0.0],
])  # fmt: skip
def test_the_largest_and_the_smallest_numbers_are_encoded_as_numpy_has_it(values, bits):
    check([np.float32(values), np.zeros(len(values), "float32")], "topk", ratio=1.0, value_bits=bits)


def test_two_bits_say_no_value_whose_digits_are_below_those_of_the_largest():
    """Of so many elements the mean of those above the mean can be less than a 2^15th of the largest."""
    check([np.float32([1.0] + [1.01 / 150_000] * 150_000 + [1e-9] * 150_000)], "topk", ratio=1.0, value_bits=2)


@pytest.mark.parametrize("kind, options", [*((kind, {}) for kind in EXACT), IN_TWO_BITS])
def test_nothing_is_lost_of_whole_numbers(kind, options):
    """All that was sent in many rounds, and what is left at the end, add up to all that came."""
    random = np.random.RandomState(3)
    codec = NativeCodec(codecs.codecs()[kind].complete(**options))
    payload, residual = np.empty(codec.bytes(3001), "uint8"), np.zeros(3001, "float32")
    came, sent = np.zeros(3001), np.zeros(3001)
    for _ in range(50):
        gradient, got = random.randint(-99, 100, 3001).astype("float32"), np.empty(3001, "float32")
        codec.encode(gradient, residual, payload)
        codec.start_sum(got, payload)
        came, sent = came + gradient, sent + got
    assert np.count_nonzero(residual) > 1000
    np.testing.assert_array_equal(sent + residual, came)


@pytest.mark.parametrize("kind", codecs.of_gradients())
def test_bytes_are_those_of_the_formula(kind):
    compression = codecs.codecs()[kind].complete()
    for size in SIZES:
        expected = BYTES[kind](size) if size > 0 else 0
        assert NativeCodec(compression).bytes(size) == codecs.push_bytes(compression, size) == expected


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", codecs.of_gradients())
def test_what_is_not_finite_is_seen_and_leaves_nothing_behind(kind, bad):
    codec = NativeCodec(codecs.codecs()[kind].complete())
    for size in SIZES[1:-2]:
        gradient, got = gradients_of(size)[0], np.empty(size, "float32")
        residual = np.zeros(size, "float32") if codec.residuals else None
        payload = np.empty(codec.bytes(size), "uint8")
        codec.encode(gradient, residual, payload)
        before = None if residual is None else residual.copy()
        gradient[size // 2] = bad
        codec.encode(gradient, residual, payload)
        codec.start_sum(got, payload)
        if residual is None:
            assert not np.isfinite(got[size // 2]) and np.isfinite(np.delete(got, size // 2)).all()
        else:
            assert np.isnan(got).all()
            np.testing.assert_array_equal(residual, before)


def test_half_precision_is_scaled_to_what_it_can_hold():
    codec = NativeCodec({"type": "fp16"})
    for scale in (1e-30, 1e-9, 1.0, 1e30):
        (gradient,) = gradients_of(1000, scale, 1)
        payload, got = np.empty(codec.bytes(1000), "uint8"), np.empty(1000, "float32")
        codec.encode(gradient, None, payload)
        codec.start_sum(got, payload)
        np.testing.assert_allclose(got, gradient, rtol=2**-11)


def test_a_codec_is_asked_for_what_it_can_do():
    with pytest.raises(ValueError, match="encode_step"):
        NativeCodec(codecs.codecs()["dgc"].complete())
    gradient, payload = np.zeros(1, "float32"), np.zeros(3, "uint8")
    with pytest.raises(ValueError, match="residual"):
        NativeCodec({"type": "int8"}).encode(gradient, None, payload)
    for option, value in (("ratio", 0.0), ("ratio", 1.1), ("value_bits", 1), ("value_bits", 9)):
        with pytest.raises(ValueError, match=option):
            NativeCodec({"type": "topk", option: value})
