"""How fast one core sums, encodes and updates slices: GB/s of memory read and written, next to NumPy.

    p3 bench kernels [--elements 50000] [--repeat 30]

The default size is one slice of P3, whose arrays fit in the second- or third-level cache, as they do on a server.
NumPy's update is the shortest expression with out= arguments, not a tuned one. Close other programs first.
"""

import statistics
import time
from typing import Sequence

import numpy as np

from p3.measure import arguments as given
from p3 import codecs
from p3.measure._kernels import NativeCodec, NativeOptimizer, add_to_sum, finish_sum, start_sum, use_avx2
from p3.measure.jobs import machine

COMMON = {"clip_gradient": -1.0, "multi_precision": False}
OPTIMIZERS = {
    "sgd": {"name": "sgd", "momentum": 0.0},
    "sgd, momentum": {"name": "sgd", "momentum": 0.9},
    "nag": {"name": "nag", "momentum": 0.9},
    "adam": {"name": "adam", "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8},
    "adagrad": {"name": "adagrad", "epsilon": 1e-7},
    "rmsprop": {"name": "rmsprop", "gamma1": 0.9, "epsilon": 1e-8, "clip_weights": -1.0},
    "rmsprop, centered": {
        "name": "rmsprop_centered", "gamma1": 0.9, "gamma2": 0.9, "epsilon": 1e-8, "clip_weights": -1.0
    },
}
LR, WD, RESCALE = 0.001, 0.0001, 0.5


def numpy_update(name, weight, states, gradient):
    g = gradient * np.float32(RESCALE) + weight * np.float32(WD)
    lr = np.float32(LR)
    if name == "sgd":
        weight -= lr * g
    elif name == "sgd, momentum":
        states[0] *= np.float32(0.9)
        states[0] -= lr * g
        weight += states[0]
    elif name == "nag":
        states[0] *= np.float32(0.9)
        states[0] -= lr * g
        weight += np.float32(0.9) * states[0] - lr * g
    elif name == "adam":
        states[0] += np.float32(0.1) * (g - states[0])
        states[1] += np.float32(0.001) * (g * g - states[1])
        weight -= lr * states[0] / (np.sqrt(states[1]) + np.float32(1e-8))
    elif name == "adagrad":
        states[0] += g * g
        weight -= lr * g / np.sqrt(states[0] + np.float32(1e-7))
    elif name == "rmsprop":
        states[0] += np.float32(0.1) * (g * g - states[0])
        weight -= lr * g / np.sqrt(states[0] + np.float32(1e-8))
    elif name == "rmsprop, centered":
        states[0] += np.float32(0.1) * (g * g - states[0])
        states[1] += np.float32(0.1) * (g - states[1])
        states[2] *= np.float32(0.9)
        states[2] -= lr * g / np.sqrt(states[0] - states[1] * states[1] + np.float32(1e-8))
        weight += states[2]


def rate(work, moved_bytes, repeat):
    """Median and range of GB/s over `repeat` samples, each of about 2 ms."""
    begin = time.perf_counter()
    work()
    calls = max(1, int(0.002 / (time.perf_counter() - begin)))
    samples = []
    for _ in range(repeat):
        begin = time.perf_counter()
        for _ in range(calls):
            work()
        samples.append(calls * moved_bytes / (time.perf_counter() - begin) / 1e9)
    return f"{statistics.median(samples):6.1f} ({min(samples):5.1f} to {max(samples):5.1f})"


def report(title, moved_bytes, repeat, native, with_numpy):
    """One line: our kernel with AVX2 and without, and NumPy."""
    columns = []
    available = use_avx2()
    for wide in (True, False):
        if wide and not available:
            columns.append("no AVX2 here")
            continue
        use_avx2(wide)
        columns.append(rate(native, moved_bytes, repeat))
    use_avx2(available)
    columns.append(rate(with_numpy, moved_bytes, repeat) if with_numpy else "")
    print(f"{title:28}" + "".join(f"{column:26}" for column in columns).rstrip())


def sums(elements, repeat):
    for dtype in ("float32", "float64", "float16", "int32"):
        source = np.ones(elements, dtype)
        total = np.zeros(elements, "float32" if dtype == "float16" else dtype)
        moved = source.nbytes + 2 * total.nbytes
        report(
            f"sum of {dtype}", moved, repeat, lambda: add_to_sum(total, source),
            lambda: np.add(total, source, out=total),
        )
    half, single = np.ones(elements, "float16"), np.ones(elements, "float32")
    moved = half.nbytes + single.nbytes
    report("float16 to float32", moved, repeat, lambda: start_sum(single, half), lambda: np.copyto(single, half))
    report(
        "float32 to float16", moved, repeat, lambda: finish_sum(half, single),
        lambda: np.copyto(half, single, casting="same_kind"),
    )


def updates(elements, repeat):
    generator = np.random.RandomState(0)
    for name, description in OPTIMIZERS.items():
        kernel = NativeOptimizer({**description, **COMMON})
        weight, gradient = (generator.normal(size=elements).astype(np.float32) for _ in range(2))
        states = [np.zeros(elements, np.float32) for _ in range(kernel.state_count)]
        moved = weight.nbytes * (3 + 2 * len(states))  # weight and states are read and written, the gradient read
        report(
            name, moved, repeat, lambda: kernel.update(weight, None, states, gradient, LR, WD, RESCALE),
            lambda: numpy_update(name, weight, states, gradient),
        )


def encodings(elements, repeat):
    """Bytes of float32 that are encoded or summed, and of the payload; a residual and a sum are read and written."""
    gradient = np.random.RandomState(0).normal(size=elements).astype(np.float32)
    for name in codecs.of_gradients():
        kernel = NativeCodec(codecs.codecs()[name].complete())
        residual = np.zeros(elements, np.float32) if kernel.residuals else None
        payload, total = np.empty(kernel.bytes(elements), np.uint8), np.zeros(elements, np.float32)
        kernel.encode(gradient, residual, payload)
        whole, encoded, kept = gradient.nbytes, payload.nbytes, 2 * gradient.nbytes * kernel.residuals
        for title, moved, work in (
            ("encode", whole + kept + encoded, lambda: kernel.encode(gradient, residual, payload)),
            ("start a sum", whole + encoded, lambda: kernel.start_sum(total, payload)),
            ("add to a sum", 2 * whole + encoded, lambda: kernel.add_to_sum(total, payload)),
        ):
            report(f"{name}: {title}", moved, repeat, work, None)


def main(arguments: Sequence[str]) -> int:
    parser = given.parser("kernels", __doc__)
    parser.add_argument("--elements", type=int, default=50000)
    parser.add_argument("--repeat", type=int, default=30)
    options = parser.parse_args(arguments)
    print(f"{machine.in_a_line()}; {options.elements} elements, one thread")
    print(f"{'GB/s, median (range)':28}{'P3, AVX2':26}{'P3, baseline':26}NumPy")
    sums(options.elements, options.repeat)
    encodings(options.elements, options.repeat)
    updates(options.elements, options.repeat)
    return 0
