"""What a worker's processor pays to choose the largest elements, in deep gradient compression: on one core.

    p3 bench selection [--elements 10000] [--repeat 20]

One round of a slice is momentum, accumulation and selection (the core's encode_step), after 20 rounds of normally
distributed gradients; given is the processor time for a million elements by the ratio, those of the warm-up first.
Beside it the same with NumPy's argpartition, the pass over u and v alone, and how long plain float32 of a million
elements takes on a link of 100 Mbit/s.
Close other programs first.
"""

import statistics
import time
from typing import Sequence

import numpy as np

from p3 import codecs
from p3.measure import arguments as given
from p3.measure._kernels import encode_step, use_avx2
from p3.measure.jobs import machine

RATIOS = (1 / 4, 1 / 16, 1 / 64, 1 / 256, 0.01, 0.001)  # four stages of the warm-up, and two ratios
MOMENTUM = 0.9
SLICES = 50  # of one key, so that a slice is not in the cache when its round comes
GRADIENTS = 7  # that slices have in turn


class Key:
    """Slices with the memory that a worker keeps of each."""

    def __init__(self, elements: int, ratio: float) -> None:
        random = np.random.RandomState(1)
        compression = {"type": "dgc", "ratio": ratio}
        self.count = codecs.sent(compression, elements)
        self._gradients = random.randn(GRADIENTS, elements).astype("float32")
        self._u, self._v = np.zeros((2, SLICES, elements), "float32")
        self._payload = np.zeros(codecs.push_bytes(compression, elements), "uint8")
        self._round = 0

    def step(self, encode) -> None:
        """A round of all slices, by encode(gradient, u, v, payload, count)."""
        self._round += 1
        for number, (u, v) in enumerate(zip(self._u, self._v)):
            encode(self._gradients[(number + self._round) % GRADIENTS], u, v, self._payload, self.count)


def core(gradient, u, v, payload, count):
    encode_step(gradient, u, v, payload, count, MOMENTUM)


def with_numpy(gradient, u, v, payload, count):
    accumulate(gradient, u, v, payload, count)
    chosen = np.argpartition(-np.abs(v), count - 1)[:count]
    payload[: 4 * count].view("float32")[:] = v[chosen]
    u[chosen] = v[chosen] = 0


def accumulate(gradient, u, v, payload, count):
    u *= np.float32(MOMENTUM)
    u += gradient
    v += u


def ms_per_million(elements: int, ratio: float, encode, repeat: int) -> str:
    """Median and range over the rounds that count."""
    key, samples = Key(elements, ratio), []
    for number in range(-20, repeat):
        begin = time.thread_time()
        key.step(encode)
        if number >= 0:
            samples.append(1e3 * (time.thread_time() - begin) / (SLICES * elements) * 1e6)
    return f"{statistics.median(samples):6.2f} ({min(samples):5.2f} to {max(samples):5.2f})"


def main(arguments: Sequence[str]) -> int:
    parser = given.parser("selection", __doc__)
    parser.add_argument("--elements", type=given.number(8, 1e9, int), default=10000,
                        help="of a slice (default %(default)s)")  # fmt: skip
    parser.add_argument("--repeat", type=given.number(1, 1e9, int), default=20,
                        help="rounds that count (default %(default)s)")  # fmt: skip
    options = parser.parse_args(arguments)
    available = use_avx2()
    print(f"{machine.in_a_line()}; slices of {options.elements} elements, one thread")
    print(f"{'ms for a million elements':28}{'P3' if available else 'P3, without AVX2':26}NumPy")
    for ratio in RATIOS:
        ours = ms_per_million(options.elements, ratio, core, options.repeat)
        theirs = ms_per_million(options.elements, ratio, with_numpy, max(1, options.repeat // 4))
        print(f"{'ratio %.3g' % ratio:28}{ours:26}{theirs}")
    print(f"{'u and v alone':28}{'':26}{ms_per_million(options.elements, 1, accumulate, options.repeat)}")
    print(f"{'100 Mbit/s, plain':28}{4e6 * 8 / 100e6 * 1e3:6.0f}")
    return 0
