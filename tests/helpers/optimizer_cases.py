"""Every optimizer that the servers run, and one weight trained by each side: the core's loops and mx.optimizer."""

import mxnet as mx
import numpy as np
from p3.measure._kernels import NativeOptimizer
from p3.mxnet.optimizers.descriptions import describe, round_scalars

FLOAT16_CODE = 2

# Rates stay above 1e-4, where MXNet's own reading of decimal numbers is exact: below, it may be off by one unit in
# the last place of float32.
OPTIMIZERS = {
    "sgd": lambda **more: mx.optimizer.SGD(learning_rate=0.1, **more),
    "sgd-momentum": lambda **more: mx.optimizer.SGD(learning_rate=0.1, momentum=0.9, **more),
    "nag-plain": lambda **more: mx.optimizer.NAG(learning_rate=0.1, **more),
    "nag": lambda **more: mx.optimizer.NAG(learning_rate=0.05, momentum=0.9, **more),
    "adam": lambda **more: mx.optimizer.Adam(learning_rate=0.01, **more),
    "adagrad": lambda **more: mx.optimizer.AdaGrad(learning_rate=0.1, **more),
    "rmsprop": lambda **more: mx.optimizer.RMSProp(learning_rate=0.01, **more),
    "rmsprop-clip-weights": lambda **more: mx.optimizer.RMSProp(learning_rate=0.01, clip_weights=0.5, **more),
    "rmsprop-centered": lambda **more: mx.optimizer.RMSProp(learning_rate=0.001, centered=True, **more),
    "rmsprop-centered-clip-weights": lambda **more: mx.optimizer.RMSProp(
        learning_rate=0.001, centered=True, gamma1=0.95, gamma2=0.8, clip_weights=0.5, **more
    ),
    "ccsgd": lambda **more: mx.optimizer.ccSGD(learning_rate=0.1, momentum=0.5, **more),
    "signum-plain": lambda **more: mx.optimizer.Signum(momentum=0.0, **more),
    "signum": lambda **more: mx.optimizer.Signum(wd_lh=0.02, **more),
    "ftml": lambda **more: mx.optimizer.FTML(learning_rate=0.01, **more),
    "ftrl": lambda **more: mx.optimizer.Ftrl(lamda1=0.1, **more),
    "adadelta": lambda **more: mx.optimizer.AdaDelta(**more),
    "adamax": lambda **more: mx.optimizer.Adamax(**more),
    "nadam": lambda **more: mx.optimizer.Nadam(**more),
    "dcasgd": lambda **more: mx.optimizer.DCASGD(learning_rate=0.1, **more),
    "dcasgd-momentum": lambda **more: mx.optimizer.DCASGD(learning_rate=0.1, momentum=0.9, **more),
    "test": lambda **more: mx.optimizer.Test(**more),
}

class Native:
    """What a server holds for one weight, and what a worker computes for each of its rounds."""

    def __init__(self, optimizer, weight):
        self.optimizer = optimizer
        self.kernel = NativeOptimizer(describe(optimizer))
        arithmetic = np.float32 if weight.dtype == np.float16 else weight.dtype
        self.weight = weight.copy()
        self.states = [np.full(weight.shape, np.nan, arithmetic) for _ in range(self.kernel.state_count)]
        self.kernel.start_state(self.weight, self.states)
        half_with_master = weight.dtype == np.float16 and self.kernel.needs_master(FLOAT16_CODE)
        self.master = weight.astype(np.float32) if half_with_master else None

    def update(self, index, gradient):
        scalars = round_scalars(self.optimizer, index)
        self.kernel.update(self.weight, self.master, self.states, gradient.astype(self.states_type), *scalars)

    @property
    def states_type(self):
        return np.float32 if self.weight.dtype == np.float16 else self.weight.dtype


class Reference:
    """MXNet's Updater on one weight, with its state made ready."""

    def __init__(self, optimizer, weight):
        self.updater = mx.optimizer.get_updater(optimizer)
        self.weight = mx.nd.array(weight, dtype=weight.dtype)

    def update(self, index, gradient):
        if index not in self.updater.states:
            optimizer = self.updater.optimizer
            state = optimizer.create_state_multi_precision(index, self.weight)
            self.updater.states[index] = runnable(optimizer, self.weight, state)
            self.updater.states_synced[index] = True
        self.updater(index, mx.nd.array(gradient, dtype=gradient.dtype), self.weight)


class _True(mx.nd.NDArray):
    @classmethod
    def of(cls, array):
        copy = array.copy()
        true = cls(copy.handle)
        copy.handle = None  # or both would free it
        return true

    def __bool__(self):
        return True


def runnable(optimizer, weight, state):
    """The state that MXNet made for a weight, mended where MXNet's own update fails on it: AdaGrad and its like make
    float32 states for float64 weights too, and DCASGD asks its array of velocities whether it is true."""
    if isinstance(optimizer, mx.optimizer.DCASGD) and optimizer.momentum:
        half = weight.dtype == np.float16 and optimizer.multi_precision
        velocity, previous = state[1] if half else state
        mended = (_True.of(velocity), previous)
        return (state[0], mended) if half else mended
    return _as_float64(state) if weight.dtype == np.float64 else state


def _as_float64(state):
    if isinstance(state, tuple):
        return tuple(_as_float64(part) for part in state)
    return None if state is None else state.astype(np.float64)
