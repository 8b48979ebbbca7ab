"""What a worker sends of each gradient of a key under each compression, in NumPy, to the bit: docs/protocol.md."""

import math

import numpy as np
from core_jobs import bfloat16_bits, of_bfloat16_bits

from p3.measure.replay.dgc_reference import Dgc, slices_of, take_steps  # noqa: F401


class TwoBit:
    def __init__(self, threshold):
        self.threshold = np.float32(threshold)
        self.residual = np.float32(0)

    def __call__(self, gradient):
        value = self.residual + gradient
        sent = self.threshold * ((value >= self.threshold).astype("float32") - (value <= -self.threshold))
        self.residual = value - sent
        return sent


class OneBit:
    def __init__(self, slice_elements):
        self.slice_elements = slice_elements
        self.residual = np.float32(0)

    def __call__(self, gradient):
        value = (self.residual + gradient).astype("float32")
        sent = np.empty_like(value)
        for begin in range(0, value.size, self.slice_elements):
            part, whole = sent[begin : begin + self.slice_elements], value[begin : begin + self.slice_elements]
            is_plus = whole >= 0
            part[is_plus], part[~is_plus] = mean_in_parts(whole, is_plus), mean_in_parts(whole, ~is_plus)
        self.residual = value - sent
        return sent


class Blocks:
    """Whole numbers from -most to most, times a scale of each block that is rounded to bfloat16."""

    def __init__(self, slice_elements, block, most):
        self.slice_elements, self.block, self.most = slice_elements, block, np.float32(most)
        self.residual = np.float32(0)

    def __call__(self, gradient):
        value = (self.residual + gradient).astype("float32")
        sent = np.zeros_like(value)
        for first, end in slices_of(value.size, self.slice_elements):
            for begin in range(first, end, self.block):
                part = slice(begin, min(begin + self.block, end))
                scale = brain(np.maximum(np.abs(value[part]).max() / self.most, np.float32(2**-126)))[0]
                sent[part] = np.rint(value[part] * (np.float32(1) / scale)) * scale
        self.residual = value - sent
        if np.isfinite(value).all():
            assert np.array_equal(sent.astype("float64") + self.residual, value)  # nothing is lost
        return sent


class TopK:
    """The largest of each slice, in steps whose size goes by the smallest and the largest of them."""

    def __init__(self, slice_elements, ratio=0.01, value_bits=8):
        self.slice_elements, self.ratio, self.most = slice_elements, ratio, 2 ** (value_bits - 1) - 1
        self.residual = np.float32(0)

    def __call__(self, gradient):
        value = (self.residual + gradient).astype("float32")
        sent = np.zeros_like(value)
        for first, end in slices_of(value.size, self.slice_elements):
            size = np.abs(value[first:end])
            count = max(1, math.ceil(self.ratio * size.size))
            chosen = np.argsort(-size, kind="stable")[:count]  # of equal ones the first
            size = size[chosen]
            if self.most == 1:
                at = np.sort(chosen)
                sent[first + at] = np.copysign(two_levels(np.abs(value[first + at])), value[first + at])
                continue
            step = (size.max() - size.min()) / np.float32(self.most)
            scale = brain(max(step, size.max() * np.float32(2**-15), np.float32(2**-126)))[0]
            steps = np.rint(size / scale)
            with np.errstate(over="ignore", invalid="ignore"):
                steps -= ~np.isfinite(steps * scale)
            base = steps.min()
            steps = base + np.minimum(steps - base, np.float32(self.most))
            sent[first + chosen] = np.copysign(steps * scale, value[first + chosen])
        self.residual = value - sent
        if np.isfinite(value).all():
            assert np.array_equal(sent.astype("float64") + self.residual, value)  # nothing is lost
        return sent


def two_levels(size):
    """What magnitudes in the order of their offsets are sent as, with two bits."""
    middle = mean_in_order(size)
    high = brain_finite(np.maximum(mean_in_order(size[size >= middle]), size.max() * np.float32(2**-15)))
    low = np.float32(0) if size.min() < high * np.float32(2**-15) else brain_finite(size.min())
    return np.where(size >= low / np.float32(2) + high / np.float32(2), high, low).astype("float32")


def mean_in_order(values):
    return np.float32(np.cumsum(values, dtype="float64")[-1] / values.size)


def brain_finite(value):
    rounded = brain(value)[0]
    return rounded if np.isfinite(rounded) else np.float32(float.fromhex("0x1.fep127"))


class Half:
    """float16 after the largest of each slice was scaled to at least 2^14 and below 2^15."""

    def __init__(self, slice_elements):
        self.slice_elements = slice_elements

    def __call__(self, gradient):
        sent = np.empty_like(gradient)
        for first, end in slices_of(gradient.size, self.slice_elements):
            part = gradient[first:end]
            exponent = np.frexp(np.abs(part).max(initial=0, where=np.isfinite(part)))[1] - 1
            scale = np.float32(2.0 ** max(exponent - 14, -126))
            sent[first:end] = (part * (np.float32(1) / scale)).astype("float16").astype("float32") * scale
        return sent


def mean_in_parts(values, chosen):
    """Of those chosen: the elements with the same index modulo 8 one after the other, then the eight sums."""
    if not chosen.any():
        return np.float32(0)
    rows = -(-values.size // 8)
    table = np.zeros(rows * 8)
    table[: values.size][chosen] = values[chosen]
    parts = np.cumsum(table.reshape(rows, 8), axis=0)[-1]  # one after the other, which sum() does not promise
    return np.float32(np.cumsum(parts)[-1] / np.count_nonzero(chosen))


def brain(gradient):
    return of_bfloat16_bits(bfloat16_bits(np.atleast_1d(gradient)))


# By codec: of the elements of a slice, and its options. What is of no slice has no use for the first.
_SENDERS = {
    "fp16": Half,
    "2bit": lambda _, threshold=0.5: TwoBit(threshold),
    "1bit": OneBit,
    "bf16": lambda _: brain,
    "int8": lambda elements: Blocks(elements, 128, 127),
    "int4": lambda elements: Blocks(elements, 64, 7),
    "topk": TopK,
}


def sender(kind, slice_elements, **options):
    """What one worker sends of each gradient of one key: to be called with them in turn."""
    return _SENDERS[kind](slice_elements, **options)
