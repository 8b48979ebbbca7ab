"""What a worker sends of each gradient of a key under each compression, in NumPy, to the bit: docs/protocol.md."""

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


class EightBit:
    BLOCK = 256

    def __init__(self, slice_elements):
        self.slice_elements = slice_elements
        self.residual = np.float32(0)

    def __call__(self, gradient):
        value = (self.residual + gradient).astype("float32")
        sent = np.zeros_like(value)
        for first, end in slices_of(value.size, self.slice_elements):
            for begin in range(first, end, self.BLOCK):
                part = slice(begin, min(begin + self.BLOCK, end))
                largest = np.abs(value[part]).max()
                if largest > 0:
                    codes = np.rint(value[part] / largest * np.float32(127))
                    sent[part] = codes / np.float32(127) * largest
        self.residual = value - sent
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


def half(gradient):
    return gradient.astype("float16").astype("float32")


def brain(gradient):
    return of_bfloat16_bits(bfloat16_bits(gradient))


# By codec: of the elements of a slice, and its options. What is of no slice has no use for the first.
_SENDERS = {
    "fp16": lambda _: half,
    "2bit": lambda _, threshold=0.5: TwoBit(threshold),
    "1bit": OneBit,
    "bf16": lambda _: brain,
    "int8": EightBit,
}


def sender(kind, slice_elements, **options):
    """What one worker sends of each gradient of one key: to be called with them in turn."""
    return _SENDERS[kind](slice_elements, **options)
