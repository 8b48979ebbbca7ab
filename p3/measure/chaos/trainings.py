"""What the workers of a chaos job train with MXNet (matrix.TRAININGS), each in some way that a fault makes difficult.

After each step a worker notes a digest of all its weights. Data and gradients depend on step and rank alone, so all
workers must have come to the same digest after the same step, and a job that comes back must repeat those of its first
start. Who joins begins with that of the others. Steps count from 1. In every EPOCH steps of a training that joins, rank
0 takes one less.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Callable, Dict, Optional
from unittest import mock

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

import p3  # noqa: F401, registers the store
from p3._core import slice_count
from p3.measure.chaos.matrix import COURSES
from p3.measure.workers import lines

WIDTH, BATCH = 1000, 4
EPOCH = 4


class OneNet:
    """A net with one Trainer."""

    joins = False

    def __init__(self, optimizer: str, settings: dict, **options) -> None:
        self.kv = mx.kv.create("p3_sync")
        self.stores = [self.kv]
        self.net = layers()
        self.trainers = [trainer_of(self.net, self.kv, optimizer, settings, **options)]

    def begin(self) -> None:
        """After resume()."""

    def arrays(self) -> list:
        """In the order in which a step pushes them."""
        return weights(self.net)

    def step(self, number: int) -> None:
        with autograd.record():
            loss = (self.net(batch(number, self.kv.rank)) ** 2).mean()
        loss.backward()
        self.trainers[0].step(BATCH)

    def takes(self, number: int) -> bool:
        return not self.joins or self.kv.rank != 0 or number % EPOCH != 0

    def end_step(self, number: int) -> None:
        if self.joins and number % EPOCH == 0:
            self.join()

    def join(self) -> None:
        self.kv.join()


class Joining(OneNet):
    joins = True


class JoiningSums(Joining):
    """Whose workers update."""

    def join(self) -> None:
        self.kv.join(update=lambda store: self.trainers[0].update(BATCH))


class TwoStores(OneNet):
    """One Trainer steps after the other, and computes with what the first has made of its weights."""

    def __init__(self) -> None:
        super().__init__("adam", {"learning_rate": 0.001})
        self.second = layers()
        self.stores.append(mx.kv.create("p3_sync"))
        self.trainers.append(trainer_of(self.second, self.stores[1], "sgd", {"learning_rate": 0.01}))

    def arrays(self) -> list:
        return [*super().arrays(), *weights(self.second)]

    def step(self, number: int) -> None:
        super().step(number)
        with autograd.record():
            loss = (self.net(self.second(batch(number, self.kv.rank))) ** 2).mean()
        loss.backward()
        self.trainers[1].step(BATCH)


class Seldom(OneNet):
    """Keys of the bare store: one is pushed in every step, one in every third, one from the second on."""

    def __init__(self) -> None:
        self.kv = mx.kv.create("p3_sync")
        self.stores, self.trainers = [self.kv], []
        self.kv.set_optimizer(mx.optimizer.Adam(learning_rate=0.001))
        self._weights = {key: mx.nd.zeros((WIDTH, WIDTH)) for key in ("always", "third", "late")}

    def begin(self) -> None:
        for key, weight in self._weights.items():
            self.kv.broadcast(key, weight, weight)

    def arrays(self) -> list:
        return list(self._weights.values())

    def step(self, number: int) -> None:
        due = {"always": True, "third": number % 3 == 0, "late": number > 1}
        for key, weight in self._weights.items():
            if due[key]:
                self.kv.push(key, batch(number, self.kv.rank, WIDTH))
                self.kv.pull(key, weight)


def layers() -> gluon.nn.Sequential:
    net = gluon.nn.Sequential()
    net.add(gluon.nn.Dense(WIDTH, in_units=WIDTH), gluon.nn.Dense(WIDTH, in_units=WIDTH))
    net.initialize(mx.init.Uniform(0.01))
    return net


def weights(net: gluon.nn.Sequential) -> list:
    """As Trainer orders them."""
    return [parameter.data() for _, parameter in sorted(net.collect_params().items())]


def trainer_of(net, kv, optimizer: str, settings: dict, **options) -> gluon.Trainer:
    return gluon.Trainer(net.collect_params(), optimizer, dict(settings), kvstore=kv, **options)


def batch(number: int, rank: int, size: int = BATCH) -> mx.nd.NDArray:
    return mx.nd.array(np.random.RandomState(1000 * rank + number).uniform(-1, 1, (size, WIDTH)))


SGD, RATE, FP16 = {"learning_rate": 0.01, "momentum": 0.9}, {"learning_rate": 0.001}, {"type": "fp16"}
MADE: Dict[str, Callable[[], OneNet]] = {
    "two-stores": TwoStores,
    "seldom": Seldom,
    "joins": lambda: Joining("adam", RATE),
    "adam": lambda: OneNet("adam", RATE),
    "nadam": lambda: OneNet("nadam", RATE),
    "ftml": lambda: OneNet("ftml", RATE),
    "fp16": lambda: OneNet("sgd", SGD, compression_params=FP16),
    "fp16-sums": lambda: JoiningSums("sgd", SGD, compression_params=FP16, update_on_kvstore=False),
}


def train(name: str, session, journal, blow, at_mark: Optional[Callable] = None) -> None:
    """`at_mark(round, agree)`: before each step, calls agree() until all are there who are to take it."""
    mx.random.seed(1)  # the same first weights everywhere
    training, course = MADE[name](), COURSES[name]
    begun, _ = training.kv.resume(trainer=training.trainers)
    training.begin()
    journal("begun", round=begun, digest=digest(training))
    for number in range(begun + 1, course.rounds + 1):
        if at_mark is not None:
            at_mark(number - 1, functools.partial(training.kv.members, number - 1))
            if number == begun + 1 > 1:  # this process has joined
                journal("round", round=begun, digest=digest(training))
        if training.takes(number):
            struck = step(training, number, session, blow)
            blow = None if struck else blow
            journal("round", round=number, digest=digest(training))
        training.end_step(number)
        if training.joins and number % EPOCH == 0:
            journal("round", round=number, digest=digest(training))
        training.kv.snapshot(number, trainer=training.trainers)
        if blow is not None and blow.in_snapshot(number):
            blow = None


def step(training: OneNet, number: int, session, blow) -> bool:
    """One step; whether `blow` struck in it: before one of its pushes, and behind the first."""
    if blow is None:
        training.step(number)
        return False
    sizes = [array.size for array in training.arrays()]  # in the order of pushes
    slices = [slice_count(size, session.slice_size.of(size)) for size in sizes]
    held_back = 1 + blow.choose(len(slices) - 1)
    pushes, struck = 0, False

    def held(push):
        def wrapped(*arguments, **options):
            nonlocal pushes, struck
            if pushes == held_back:
                struck = blow.in_round(session, number, sum(slices), sum(slices[:held_back]))
            pushes += 1
            return push(*arguments, **options)

        return wrapped

    blow.before_round(session)
    with contextlib.ExitStack() as patched:
        for store in training.stores:
            for name in ("push", "pushpull"):
                patched.enter_context(mock.patch.object(store, name, held(getattr(store, name))))
        training.step(number)
    return struck


def digest(training: OneNet) -> str:
    mx.nd.waitall()
    return lines.digest(array.asnumpy() for array in training.arrays())
