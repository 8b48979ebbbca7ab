"""Low-rank compression in NumPy's float64, by QR decompositions: a round's result depends on the span of the columns of
P alone, not on which columns they are."""

import numpy as np

from p3.worker.lowrank.matrix import random_basis


class LowRankReference:
    """One key, with all of its workers."""

    def __init__(self, shape, rank, workers):
        self.shape = shape[0], int(np.prod(shape[1:]))
        self.left_out = [np.zeros(self.shape) for _ in range(workers)]
        self.basis = random_basis(self.shape[1], rank).astype("float64")

    def sum(self, gradients):
        """That of one round. A gradient may be None, of a worker that skips it. None if all are."""
        pushed = [rank for rank, gradient in enumerate(gradients) if gradient is not None]
        if not pushed:
            return None
        whole = {rank: self.left_out[rank] + gradients[rank].reshape(self.shape) for rank in pushed}
        columns, _ = np.linalg.qr(sum(whole.values()) @ self.basis)
        own = {rank: one.T @ columns for rank, one in whole.items()}
        weights = sum(own.values())
        for rank in pushed:
            self.left_out[rank] = whole[rank] - columns @ own[rank].T
        self.basis, _ = np.linalg.qr(weights)
        return columns @ weights.T
