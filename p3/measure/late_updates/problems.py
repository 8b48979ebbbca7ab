"""What is trained: dense networks that classify handwritten digits, and the factors of a matrix of ratings."""

from __future__ import annotations

from typing import List, Tuple

import numpy as np

from p3.errors import ConfigError

BATCH = 32


class Digits:
    """scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, every fifth for the test. `hidden` layers of WIDTH units
    with ReLU, and a softmax: without hidden layers it is logistic regression."""

    WIDTH = 64
    CLASSES = 10
    TARGET = 0.92  # of the test's digits are recognised

    def __init__(self, hidden: int) -> None:
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise ConfigError(f"the digits are scikit-learn's ({error}): pip install scikit-learn") from None
        pictures, labels = load_digits(return_X_y=True)
        pictures, test = pictures / 16, np.arange(len(labels)) % 5 == 0
        self.pictures, self.labels = pictures[~test], labels[~test]
        self._test_pictures, self._test_labels = pictures[test], labels[test]
        sizes = [pictures.shape[1], *[self.WIDTH] * hidden, self.CLASSES]
        self.shapes: List[Tuple[int, int]] = list(zip(sizes, sizes[1:]))

    def first(self, random: np.random.Generator) -> np.ndarray:
        parts = [[random.normal(0, np.sqrt(2 / ins), ins * outs), np.zeros(outs)] for ins, outs in self.shapes]
        return np.concatenate(sum(parts, []))

    def gradients(self, copies: np.ndarray, random: np.random.Generator) -> np.ndarray:
        workers = len(copies)
        chosen = random.integers(0, len(self.labels), (workers, BATCH))
        layers = self._layers(copies)
        values = [self.pictures[chosen]]
        for weight, bias in layers:
            out = values[-1] @ weight + bias
            values.append(np.maximum(out, 0) if len(values) < len(layers) else out)
        back = _softmax(values.pop())
        back[np.arange(workers)[:, None], np.arange(BATCH), self.labels[chosen]] -= 1
        back /= BATCH
        parts: List[np.ndarray] = []
        for (weight, _), before in zip(reversed(layers), reversed(values)):
            parts = [(before.transpose(0, 2, 1) @ back).reshape(workers, -1), back.sum(axis=1), *parts]
            back = (back @ weight.transpose(0, 2, 1)) * (before > 0)
        return np.concatenate(parts, axis=1)

    def is_reached(self, parameters: np.ndarray) -> bool:
        values, layers = self._test_pictures, self._layers(parameters[None])
        for number, (weight, bias) in enumerate(layers):
            values = values @ weight[0] + bias[0]
            values = np.maximum(values, 0) if number + 1 < len(layers) else values
        return float((values.argmax(axis=1) == self._test_labels).mean()) >= self.TARGET

    def _layers(self, copies: np.ndarray) -> List[Tuple[np.ndarray, np.ndarray]]:
        """Of each worker's copy, weights (workers, ins, outs) and biases (workers, 1, outs)."""
        layers, begin = [], 0
        for ins, outs in self.shapes:
            middle, end = begin + ins * outs, begin + (ins + 1) * outs
            layers.append((copies[:, begin:middle].reshape(-1, ins, outs), copies[:, None, middle:end]))
            begin = end
        return layers


class Ratings:
    """A matrix of ratings, two fifths of which are known: of RANK factors, with noise, around their mean, as films are
    rated with one to five stars. Its factors are sought; the known ratings are divided among the workers. A batch is a
    fortieth of them, and its gradient is the sum's."""

    ROWS, COLUMNS, RANK = 400, 300, 5
    PENALTY = 1e-4
    TARGET = 0.5  # mean of the squared errors, with the penalty

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        rows, columns = random.normal(0, 1, (self.ROWS, self.RANK)), random.normal(0, 1, (self.COLUMNS, self.RANK))
        ratings = 3.6 + rows @ columns.T / np.sqrt(self.RANK) + random.normal(0, 0.5, (self.ROWS, self.COLUMNS))
        known = random.permutation(ratings.size)[: ratings.size * 2 // 5]
        self.rows, self.columns = np.unravel_index(known, ratings.shape)
        self.ratings = ratings[self.rows, self.columns]

    def first(self, random: np.random.Generator) -> np.ndarray:
        return random.normal(0, 0.1, (self.ROWS + self.COLUMNS) * self.RANK)

    def gradients(self, copies: np.ndarray, random: np.random.Generator) -> np.ndarray:
        workers, known = len(copies), len(self.ratings)
        made = np.empty_like(copies)
        for worker, (copy, gradient) in enumerate(zip(copies, made)):
            chosen = random.integers(0, known // workers, known // 40) * workers + worker
            rows, columns = self.rows[chosen], self.columns[chosen]
            left, right = self.factors(copy)
            errors = (left[rows] * right[columns]).sum(axis=1) - self.ratings[chosen]
            of_left, of_right = self.factors(gradient)
            for factor in range(self.RANK):
                of_left[:, factor] = np.bincount(rows, 2 * errors * right[columns, factor], self.ROWS)
                of_right[:, factor] = np.bincount(columns, 2 * errors * left[rows, factor], self.COLUMNS)
        return made + 2 * self.PENALTY * copies

    def is_reached(self, parameters: np.ndarray) -> bool:
        left, right = self.factors(parameters)
        errors = (left[self.rows] * right[self.columns]).sum(axis=1) - self.ratings
        loss = (errors @ errors + self.PENALTY * parameters @ parameters) / len(errors)
        return bool(loss <= self.TARGET)

    def factors(self, parameters: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
        """Views of it."""
        of_rows = self.ROWS * self.RANK
        return parameters[:of_rows].reshape(-1, self.RANK), parameters[of_rows:].reshape(-1, self.RANK)


def _softmax(values: np.ndarray) -> np.ndarray:
    of_each = np.exp(values - values.max(axis=-1, keepdims=True))
    return of_each / of_each.sum(axis=-1, keepdims=True)
