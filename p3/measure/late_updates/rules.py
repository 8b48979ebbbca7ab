"""Optimizers as Zhang's thesis has them (table 5.1), for the gradients of several workers at once, each with a state of
its own."""

from __future__ import annotations

import numpy as np

EPSILON = 1e-8


class Sgd:
    def __init__(self, lr: float) -> None:
        self._lr = lr

    def start(self, workers: int, elements: int) -> None:
        pass

    def updates(self, gradients: np.ndarray) -> np.ndarray:
        return -self._lr * gradients


class _WithState:
    def __init__(self, lr: float) -> None:
        self._lr = lr

    def start(self, workers: int, elements: int) -> None:
        self._state = np.zeros((workers, elements))


class Momentum(_WithState):
    def updates(self, gradients: np.ndarray) -> np.ndarray:
        self._state = 0.9 * self._state + gradients
        return -self._lr * self._state


class Adagrad(_WithState):
    def updates(self, gradients: np.ndarray) -> np.ndarray:
        self._state += gradients**2
        return -self._lr * gradients / (np.sqrt(self._state) + EPSILON)


class RmsProp(_WithState):
    def updates(self, gradients: np.ndarray) -> np.ndarray:
        self._state = 0.9 * self._state + 0.1 * gradients**2
        return -self._lr * gradients / (np.sqrt(self._state) + EPSILON)


class Adam:
    def __init__(self, lr: float) -> None:
        self._lr = lr

    def start(self, workers: int, elements: int) -> None:
        self._mean, self._square = np.zeros((2, workers, elements))
        self._steps = 0

    def updates(self, gradients: np.ndarray) -> np.ndarray:
        self._steps += 1
        self._mean += 0.1 * (gradients - self._mean)
        self._square += 0.001 * (gradients**2 - self._square)
        mean, square = self._mean / (1 - 0.9**self._steps), self._square / (1 - 0.999**self._steps)
        return -self._lr * mean / (np.sqrt(square) + EPSILON)


ALL = {"SGD": Sgd, "momentum": Momentum, "Adam": Adam, "RMSProp": RmsProp, "Adagrad": Adagrad}
