"""Low-rank gradients as a worker's session makes them: two thin matrices leave in the place of one (Vogels et al.,
PowerSGD, NeurIPS 2019).

Of a key that is a matrix of m x n, each worker keeps what it has left out so far, E, and a basis Q of n x r with
orthonormal columns. A round of it is one of each of two keys, which are ordinary ones, of m x r and n x r:

    M = E + gradient
    P = M Q        is added up over the workers; then its columns are made orthonormal
    R = M' P       is added up over the workers
    P R'           is the round's result: their sum, or mean, as the store's reduction has it
    E = M - P R'   with this worker's own R: what was decoded of all, and what all keep, is what came
    Q = R          with orthonormal columns: the next round begins where this one has come to

What all workers make of what they all got has the same bits everywhere (src/numeric/products/low_rank.h): the columns
of P, and the result. M Q, M' P and E are a worker's own, and are products of NumPy's BLAS.

A gradient that is not finite, on any worker, makes the result NaN on all, and leaves E and Q as they are on all. A
worker that skips a round keeps E.
"""

from __future__ import annotations

import math
import time
from typing import Any, Dict, Iterator, List, Optional, Sequence

import numpy as np

from p3 import codecs
from p3._core import multiply_thin, orthonormalise
from p3.worker.key import Key, checked
from p3.worker.lowrank.work import Round, Then, Work

# Multiplications of a block of rows: so few that OpenBLAS makes them in the thread that asks, which has the block in
# its cache then. Threads of its own would wait for each other wherever training keeps the processors busy.
_BLOCK_PRODUCTS = 1 << 18
_PLAIN: Dict[str, Any] = {"compression": {}, "value_compression": {}}  # thin matrices travel as they are


class Matrix:
    """One key. Threads: one at a time, which begin() and the end of the round hand on."""

    def __init__(self, session, key: Key, work: Work) -> None:
        self._session, self._work, self.key = session, work, key
        self.shape = codecs.as_matrix(key.shape)
        self._thin = [
            session.keys.declare(checked(session.label, key.store, name, shape, "float32", False, 0, _PLAIN))
            for name, shape in zip(thin_names(key), codecs.in_place_of(key.shape, key.rank))
        ]
        self._own = [np.zeros(one.shape, np.float32) for one in self._thin]  # of this worker, on their way
        self._sums = [np.zeros(one.shape, np.float32) for one in self._thin]  # of all workers
        self._first_basis = random_basis(self.shape[1], key.rank)
        self._basis = self._first_basis.copy()
        self._left_out: Optional[np.ndarray] = None  # None: zeros, as this worker has pushed nothing yet
        self._rounds = 0  # begun
        self._step = 0  # of the last one
        self.round: Optional[Round] = None  # the last one
        self.counters = {"rounds": 0, "waited_s": 0.0, "longest_wait_s": 0.0}  # as the core has them of other keys
        self._gradient: Optional[np.ndarray] = None  # None: this worker skips the round
        self._landing: np.ndarray

    def begin(self, gradient: Optional[Any], landing: Any, priority: int, goes_on: bool = True) -> Round:
        """On the caller's thread. Nothing is computed here."""
        if self.is_busy:
            raise ValueError("%s: key %r has a round under way, and lowrank has one at a time: wait for it first"
                             % (self._session.label, self.key.name))  # fmt: skip
        self._gradient = None if gradient is None else self._as_matrix("gradient", gradient)
        self._landing = self._as_matrix("landing", landing)
        if self._rounds == 0:
            for key, value in zip(self._thin, self._sums):
                self._session.init(key, np.zeros_like(value) if self._session.is_first else None, value, priority)
        self._rounds += 1
        self._step = self._work.step_behind(self._step)
        round = self.round = Round(self.key, self._step, priority)
        if gradient is None:
            self._skip(0, self._make_columns, goes_on)
        else:
            self._work.add(round, self._project)
        return round

    @property
    def is_busy(self) -> bool:
        return self.round is not None and not self.round.done

    def _as_matrix(self, what: str, array: Any) -> np.ndarray:
        """Of the key's shape and type, which the session has seen to."""
        made = np.asarray(array)
        if not made.flags.c_contiguous:
            raise ValueError("%s: key %r: the %s array is not contiguous" % (self._session.label, self.key.name, what))
        return made.reshape(self.shape)

    # The steps of a round, each on the thread of Work

    def _project(self) -> None:
        """M is in the landing array until the round ends, and E as it was: then either may still be what stays."""
        own, total = self._own[0], 0.0
        for block in self._blocks():
            whole = self._landing[block]
            if self._left_out is None:
                np.copyto(whole, self._gradient[block])
            else:
                np.add(self._left_out[block], self._gradient[block], out=whole)
            np.matmul(whole, self._basis, out=own[block])
            total += float(np.add.reduce(whole, axis=None))
        if not math.isfinite(total):  # which a zero of the basis might hide
            own.fill(np.nan)
        self._push(0, self._make_columns)

    def _make_columns(self, updated: bool) -> None:
        """The sum of all P has come."""
        columns = self._sums[0]
        if not updated:
            return self._end(False)
        if not np.isfinite(columns).all():
            return self._end_without_number()  # on all workers, which see the same sum
        orthonormalise(columns, *columns.shape)
        if self._gradient is None:
            return self._skip(1, self._decode)
        own = self._own[1]
        own.fill(0)
        for block in self._blocks():
            own += self._landing[block].T @ columns[block]
        self._push(1, self._decode)

    def _decode(self, _updated: bool) -> None:
        """The sum of all R has come."""
        columns, weights = self._sums
        if not np.isfinite(weights).all():
            return self._end_without_number()
        if self._gradient is not None:
            self._keep_rest(columns)
        multiply_thin(columns, weights, self._landing, self.key.rank)
        np.copyto(self._basis, weights)
        orthonormalise(self._basis, *self._basis.shape, self._first_basis)
        self._end(True)

    def _keep_rest(self, columns: np.ndarray) -> None:
        if self._left_out is None:
            self._left_out = np.empty(self.shape, np.float32)
        for block in self._blocks():
            rest = self._left_out[block]
            np.matmul(columns[block], self._own[1].T, out=rest)
            np.subtract(self._landing[block], rest, out=rest)

    def _blocks(self) -> Iterator[slice]:
        """Of rows."""
        at_once = max(1, _BLOCK_PRODUCTS // (self.shape[1] * self.key.rank))
        return (slice(first, first + at_once) for first in range(0, self.shape[0], at_once))

    def _push(self, which: int, then: Then) -> None:
        key, tell = self._thin[which], self._work.expect(self.round, then)
        self._session.pushpull(key, self._own[which], self._sums[which], self.round.priority, tell=tell)

    def _skip(self, which: int, then: Then, goes_on: bool = True) -> None:
        key, tell = self._thin[which], self._work.expect(self.round, then)
        self._session.skip(key, self._sums[which], self.round.priority, goes_on=goes_on, tell=tell)

    def _end_without_number(self) -> None:
        self._landing.fill(np.nan)
        self._end(True)

    def _end(self, updated: bool) -> None:
        self._gradient = None
        self._count(time.monotonic() - self.round.begun_at)
        self.round.end(updated)

    def _count(self, waited_s: float) -> None:
        before = self.counters
        self.counters = {
            "rounds": before["rounds"] + 1,
            "waited_s": before["waited_s"] + waited_s,
            "longest_wait_s": max(before["longest_wait_s"], waited_s),
        }

    # Snapshots: E, and behind it Q

    def state(self) -> Optional[np.ndarray]:
        """A copy, between two rounds. None: nothing has come to it yet."""
        if self._rounds == 0 and self._left_out is None:
            return None
        left_out = np.zeros(self.shape, np.float32) if self._left_out is None else self._left_out
        return np.concatenate([left_out.ravel(), self._basis.ravel()])

    def restore(self, parts: Sequence[np.ndarray], factor: np.float32, own: Optional[np.ndarray]) -> None:
        """`parts`: what others, and this worker, gave as state(), of which E is added up and multiplied; Q is `own`'s.
        One of another compression is E alone."""
        elements = self.shape[0] * self.shape[1]
        for part in parts:
            left_out = part[:elements].reshape(self.shape)
            self._left_out = left_out.copy() if self._left_out is None else self._left_out + left_out
        if self._left_out is not None and factor != 1:
            self._left_out *= factor
        if own is not None and len(own) == elements + self._basis.size:
            self._basis = own[elements:].reshape(self._basis.shape).copy()


def thin_names(key: Key) -> List[str]:
    """Of the two keys that have rounds in its place."""
    return ["%s (%s)" % (key.name, which) for which in "PR"]


def random_basis(columns: int, rank: int) -> np.ndarray:
    """The same on every worker, but for what processors round otherwise; which matters to none, as each begins with
    columns of its own."""
    basis = np.random.RandomState(0).random_sample((columns, rank)).astype(np.float32) * 2 - 1
    orthonormalise(basis, columns, rank)
    return basis
