"""Deep gradient compression in NumPy, to the bit as the core's: docs/protocol.md. Replays and tests compare with it.

Arrays are float32 of one axis.
"""

import math

import numpy as np


class Dgc:
    """One worker's part of a key with deep gradient compression: momentum, selection, and what it keeps."""

    def __init__(self, elements, slice_elements, momentum, *, ratio, warmup_steps=0, clip_norm=0.0, masking=True,
                 num_workers=1):  # fmt: skip
        self.slices = slices_of(elements, slice_elements)
        self.momentum = np.float32(momentum)
        self.ratio, self.warmup_steps, self.masking = ratio, warmup_steps, masking
        self.bound = clip_norm / num_workers**0.5
        self.u, self.v = np.zeros(elements, "float32"), np.zeros(elements, "float32")

    def __call__(self, gradient, round, lr, rescale=1.0):
        """What the worker sends in that round of the key, counted from 1; zeros where it sends nothing."""
        rate = np.float32(lr) * np.float32(rescale)
        if self.bound > 0:
            norm = abs(rescale) * norm_in_parts(gradient)
            if norm > self.bound:
                rate *= np.float32(self.bound / norm)
        self.u = self.momentum * self.u + rate * gradient
        self.v = self.v + self.u
        sent = np.zeros_like(self.v)
        for begin, end in self.slices:
            count = elements_sent(self.ratio_at(round), end - begin)
            largest = begin + np.argsort(-np.abs(self.v[begin:end]), kind="stable")[:count]
            sent[largest] = self.v[largest]
            self.v[largest] = 0
            if self.masking:
                self.u[largest] = 0
        return sent

    def ratio_at(self, round):
        if round > self.warmup_steps:
            return self.ratio
        return max(self.ratio, [1 / 4, 1 / 16, 1 / 64, 1 / 256][(round - 1) * 4 // self.warmup_steps])


def elements_sent(ratio, elements):
    count = max(1, math.ceil(ratio * elements))
    return count if 4 + count * (6 if elements <= 65536 else 8) < 4 * elements else elements


def slices_of(elements, slice_elements):
    return [(begin, min(begin + slice_elements, elements)) for begin in range(0, elements, slice_elements)]


def norm_in_parts(values):
    rows = -(-values.size // 8) or 1
    table = np.zeros(rows * 8)
    table[: values.size] = values
    return np.sqrt(np.cumsum(np.cumsum(table.reshape(rows, 8) ** 2, axis=0)[-1])[-1])


def take_steps(weight, sent, lr, wd=0.0):
    """The weight after a round. `sent`: of each worker that took part, by rank."""
    decay = np.float32(lr) * np.float32(wd)
    if decay:
        weight = weight - decay * weight
    total = sent[0]
    for part in sent[1:]:
        total = total + part
    return np.where(total != 0, weight - total, weight)
