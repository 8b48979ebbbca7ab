"""Every cell of discipline x codec x cut x reduction x optimizer x value codec, trained through a session against
NumPy, to the bit.

What a cell asks for goes together or not as p3/plan/combinations.py says. Gradients are irregular; learning rate and
momentum are powers of 2. With staleness the workers push in turn, as the order of updates is what decides then.
"""

import itertools
from typing import Any, Dict, List, NamedTuple, Optional

import numpy as np
from compressions import Dgc, sender, take_steps

from p3 import codecs
from p3.plan import choices
from p3.plan.choices import Choice
from p3.plan.key_plan import REDUCTIONS
from p3.plan.factor_shape import FactorShape

SLICE_ELEMENTS = 70
STEPS, STALENESS, LR, MOMENTUM, EPSILON = 3, 10, 0.25, 0.5, 0.5
FACTORS = FactorShape(2, 6, 50)
SHAPE = (FACTORS.outputs, FACTORS.inputs)
DEADLINE_S = 60
OPTIMIZERS = {
    "sgd": {"name": "sgd", "momentum": MOMENTUM, "clip_gradient": -1.0, "multi_precision": False},
    "adagrad": {"name": "adagrad", "epsilon": EPSILON, "clip_gradient": -1.0, "multi_precision": False},
    "none": None,
}
OPTIONS = {"2bit": {"threshold": 0.5}, "dgc": {"ratio": 0.05}}
DOWN = (None, "int8")  # of the codecs of what comes back
CUTS = {"dense": choices.DENSE, "rows": choices.ROWS, "factors": choices.FACTORS}


class Cell(NamedTuple):
    staleness: int
    codec: Optional[str]
    cut: str
    reduction: str
    optimizer: str
    down: Optional[str]

    @property
    def compression(self) -> Optional[Dict[str, Any]]:
        return complete(self.codec)

    @property
    def chosen(self) -> List[Choice]:
        return [
            choices.of_staleness(self.staleness),
            choices.of_compression(self.compression),
            choices.of_value_compression(complete(self.down)),
            CUTS[self.cut],
            choices.of_reduction({"type": self.reduction}),
            choices.of_optimizer(OPTIMIZERS[self.optimizer]),
        ]


def complete(kind: Optional[str]) -> Optional[Dict[str, Any]]:
    return None if kind is None else codecs.codecs()[kind].complete(**OPTIONS.get(kind, {}))


def every_cell() -> List[Cell]:
    all_codecs = (None, *codecs.codecs())
    cells = [
        Cell(*one) for one in itertools.product((0, STALENESS), all_codecs, CUTS, REDUCTIONS, OPTIMIZERS, DOWN)
    ]
    return [one for one in cells if one.reduction != "norm" or one[0] == 0 and one.cut == "dense"]  # else none can ask


def declared(session, cell: Cell):
    """The key of a new store, as the cell asks for. ValueError if it cannot be had."""
    store = session.new_store()
    if cell.compression is not None:
        session.set_option(store, "compression", cell.compression)
    if cell.down is not None:
        session.set_option(store, "value_compression", complete(cell.down))
    if cell.reduction != "norm":
        session.set_option(store, "reduction", {"type": cell.reduction})
    if OPTIMIZERS[cell.optimizer] is not None:
        session.set_optimizer(store, OPTIMIZERS[cell.optimizer])
    if cell.reduction == "norm":
        return session.declare_norm(store)
    if cell.cut == "factors":
        return session.declare_factors("w", FACTORS, store)
    return session.declare("w", SHAPE, "float32", store, cell.cut == "rows", cell.staleness)


def train(session, cell: Cell):
    """Trains it for some steps; the axes of its key. AssertionError where the value is not the reference's."""
    key = declared(session, cell)
    if key.is_norm:
        return _train_with_norm(session, cell, key)
    landing = first_value()
    value = landing.copy() if session.rank == 0 and cell.cut != "factors" else None
    session.init(key, value, landing).wait(DEADLINE_S)
    session.barrier()
    reference = Reference(cell, key.axes, session.placement)
    take_step = _take_turns if cell.staleness > 0 else _take_common_step
    for step in range(STEPS):
        take_step(session, cell, key, step, landing, reference)
    session.release(key.store)
    return key.axes


def _train_with_norm(session, cell, norm):
    """The norm of one other key of the store, whose sums are as in the cell without it."""
    key = session.declare("w", SHAPE, "float32", norm.store)
    sums, told = np.zeros(SHAPE, "float32"), np.zeros(norm.shape)
    for one, landing in ((norm, told), (key, sums)):
        session.init(one, landing.copy() if session.rank == 0 else None, landing).wait(DEADLINE_S)
    for step in range(STEPS):
        given = session.pushpull(key, gradient(cell, session.rank, step), sums)
        session.skip(norm, told, goes_on=True).wait(DEADLINE_S)
        given.wait(DEADLINE_S)
        np.testing.assert_allclose(told[:, 0].sum(), np.square(sums, dtype=float).sum(), rtol=1e-12)
        assert told[:, 1].max() == abs(sums).max()
    session.release(key.store)
    return norm.axes


def _take_common_step(session, cell, key, step, landing, reference):
    pushing = [rank for rank in range(session.num_workers) if not _skips(rank, step, session.num_workers)]
    if session.rank in pushing:
        operation = push(session, cell, key, step, landing)
    else:
        operation = session.skip(key, landing)
    operation.wait(DEADLINE_S)
    reference.step(step, pushing)
    reference.check(landing, (cell, step))


def _take_turns(session, cell, key, step, landing, reference):
    for turn in range(session.num_workers):
        if turn == session.rank:
            push(session, cell, key, step, landing).wait(DEADLINE_S)
        reference.step(step, [turn])
        if turn == session.rank:
            reference.check(landing, (cell, step))
        session.barrier()


def push(session, cell: Cell, key, step: int, landing):
    return session.pushpull(key, gradient(cell, session.rank, step), landing, lr=LR)


def gradient(cell: Cell, rank: int, step: int):
    """What a worker has: an array; of rows, their ids and values; or factors, which are whole numbers."""
    random = np.random.RandomState(100 * step + rank)
    if cell.cut == "factors":
        return random.randint(-3, 4, (FACTORS.rows, FACTORS.width)).astype("float32")
    if cell.cut == "dense":
        return random.randn(*SHAPE).astype("float32")
    ids = np.unique(random.randint(0, SHAPE[0], 3)).astype(np.int64)
    return ids, random.randn(len(ids), SHAPE[1]).astype("float32")


def first_value():
    return np.arange(np.prod(SHAPE), dtype="float32").reshape(SHAPE) / 8


def _skips(rank: int, step: int, num_workers: int) -> bool:
    """In one step the last worker has no gradient, if there are others; so that averages and means differ."""
    return num_workers > 1 and step == 1 and rank == num_workers - 1


class Reference:
    """The value of one key on all workers."""

    def __init__(self, cell: Cell, axes, placement):
        self._cell, self._axes, self._num_workers = cell, axes, len(placement.workers)
        self._placement = placement
        self._value, self._state = first_value(), np.zeros(SHAPE, "float32")
        self._exact = self._value  # where only encoded changes of it come back, to self._value
        self._back = self._sender_of(axes.value_codec)  # of sums
        self._held_sums = np.zeros(SHAPE[0], bool)  # of rows: which of them have sums, and no first value
        self._senders = [self._sender() for _ in range(self._num_workers)]

    def check(self, landing, where):
        np.testing.assert_array_equal(landing, self._value, err_msg=str(where))

    def _sender(self):
        """What a worker sends of a gradient; of what travels as it is, that."""
        if self._axes.takes_steps:
            options = {name: value for name, value in self._axes.codec.items() if name != "type"}
            return Dgc(int(np.prod(SHAPE)), SLICE_ELEMENTS, MOMENTUM, num_workers=self._num_workers, **options)
        return self._sender_of(self._axes.codec)

    def _sender_of(self, codec):
        options = {name: value for name, value in codec.items() if name != "type"}
        return sender(codec["type"], SLICE_ELEMENTS, **options) if codec else lambda flat: flat

    def step(self, step: int, pushing: List[int]):
        """These workers' gradients of that step, together."""
        given = [gradient(self._cell, rank, step) for rank in pushing]
        touched = np.ones(SHAPE[0], bool)
        if self._cell.cut == "rows":
            touched = np.isin(np.arange(SHAPE[0]), np.concatenate([ids for ids, _ in given]))
            given = [_spread(*one) for one in given]
        elif self._cell.cut == "factors":
            given = [one[:, : FACTORS.outputs].T @ one[:, FACTORS.outputs :] for one in given]
        if self._axes.takes_steps:
            sent = [self._senders[rank](one.ravel(), 1 + step, LR) for rank, one in zip(pushing, given)]
            self._value = take_steps(self._value.ravel(), sent, LR).reshape(SHAPE)
            return
        sent = [self._senders[rank](one.ravel()) for rank, one in self._added_up(dict(zip(pushing, given)))]
        self._take(sum(sent[1:], sent[0]).astype("float32").reshape(SHAPE), self._divisor(len(pushing)), touched)

    def _added_up(self, given):
        """Who pushes, and what, of these gradients by rank."""
        for rank in range(self._num_workers):
            parts = [given[one] for one in self._placement.pushed_by(rank, self._axes) if one in given]
            if parts:
                yield rank, sum(parts[1:], parts[0])

    def _divisor(self, present: int) -> int:
        if self._axes.reduction == "sum":
            return 1
        return present if self._axes.reduction == "average" and self._cell.staleness == 0 else self._num_workers

    def _take(self, total, divisor: int, touched):
        old, state = self._exact.copy(), self._state
        if self._cell.optimizer == "none":
            sums = total / np.float32(divisor)
            if self._axes.value_codec:
                sums = self._back(sums.ravel()).reshape(SHAPE)
            else:
                sums = _as_it_comes_back(sums, self._axes.codec)
            self._value = np.where((touched | self._held_sums)[:, None], sums, self._value)
            self._held_sums = touched
            return
        if self._cell.optimizer == "sgd":
            state = np.float32(MOMENTUM) * state - np.float32(LR / divisor) * total
            new = old + state
        else:
            mean = total * np.float32(1 / divisor)
            state = state + mean * mean
            new = old + mean / np.sqrt(state + np.float32(EPSILON)) * np.float32(-LR)
        self._exact = np.where(touched[:, None], new, old)
        change = (self._exact - self._value).ravel()
        encoded = self._sender_of(self._axes.value_codec)(change).reshape(SHAPE)
        self._value = self._value + encoded if self._axes.value_codec else self._exact
        self._state = np.where(touched[:, None], state, self._state)


def _spread(ids, values):
    whole = np.zeros(SHAPE, "float32")
    whole[ids] = values
    return whole


def _as_it_comes_back(total, codec):
    """Sums that workers apply come back as some codecs have them."""
    if not codec or not codecs.of(codec).carries_sums:
        return total
    return sender(codec["type"], SLICE_ELEMENTS)(total.ravel()).reshape(total.shape)
