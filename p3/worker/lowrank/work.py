"""The rounds of low-rank gradients that are under way, and what they have to compute; and who computes it."""

from __future__ import annotations

import functools
import heapq
import itertools
import threading
import time
from typing import Callable, Dict, List, Optional, Tuple

import numpy as np

from p3._core import Completions, P3Error
from p3.worker.key import Key

_LOOK_UP_S = 1.0  # so often the threads see whether the session has ended

Then = Callable[[bool], None]  # is told whether an operation has updated its key


class Round:
    """One under way, as the core's Operation is. Threads: any."""

    changed = None

    def __init__(self, key: Key, step: int, priority: int) -> None:
        self.key, self.step, self.priority = key, step, priority
        self.begun_at = time.monotonic()
        self.updated = False  # once done: whether any worker pushed
        self._ended = threading.Event()
        self._failure: Optional[P3Error] = None

    @property
    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout_s: float) -> None:
        """P3Error if the job failed; TimeoutError."""
        if not self._ended.wait(timeout_s):
            raise TimeoutError("the operation was not complete after %g s" % timeout_s)
        if self._failure is not None:
            raise self._failure

    def end(self, updated: bool, failure: Optional[P3Error] = None) -> None:
        self.updated, self._failure = updated, failure
        self._ended.set()


class Work:
    """What rounds have to compute: the oldest step first, in it the most urgent key. Steps are those of all stores,
    whose optimizers may have begun at any time: one begins when a key has its next round.

    Threads: add() and expect() from any. One of two computes, so no other waits for that; the other one takes what
    completes from the core. Both end with the session.
    """

    def __init__(self, session) -> None:
        self._session = session
        self._completions = Completions()
        self._numbers = itertools.count()
        self._expected: Dict[int, Tuple[Round, Then]] = {}
        self._due: List[Tuple[int, int, int, Round, Callable[[], None]]] = []
        self._has_ended = False
        self._step = 1
        self._changed = threading.Condition()  # guards all of these
        for name, run in (("sums", self._take), ("work", self._compute)):
            threading.Thread(target=run, name="p3-lowrank-%s" % name, daemon=True).start()

    def step_behind(self, last: int) -> int:
        """That of a round that begins now; `last`: that of its key's last round, 0 before the first."""
        with self._changed:
            self._step = max(self._step, last + 1)
            return self._step

    def add(self, round: Round, step: Callable[[], None]) -> None:
        with self._changed:
            if not self._has_ended:
                heapq.heappush(self._due, (round.step, -round.priority, next(self._numbers), round, step))
                self._changed.notify()
                return
        round.end(False, self._failure())

    def expect(self, round: Round, then: Then) -> Tuple[Completions, int]:
        """Of an operation that begins now, with what is returned as `tell`; `then` is told whether it has updated."""
        with self._changed:
            number = next(self._numbers)
            self._expected[number] = round, then
        return self._completions, number

    def _take(self) -> None:
        while not self._session.has_ended:
            try:
                completed = self._completions.next(_LOOK_UP_S)
            except P3Error:
                break
            if completed is None:
                continue
            number, updated = completed
            with self._changed:
                round, then = self._expected.pop(number, (None, None))
            if round is not None:  # else the other thread has ended it
                self.add(round, functools.partial(then, updated))
        self._end()

    def _compute(self) -> None:
        with np.errstate(all="ignore"):  # a gradient that has overflowed
            while not self._session.has_ended:
                with self._changed:
                    if not self._changed.wait_for(lambda: self._due, _LOOK_UP_S):
                        continue
                    round, step = heapq.heappop(self._due)[-2:]
                try:
                    if not self._session.has_ended:
                        step()
                except P3Error:
                    pass  # the job has failed
                except Exception as error:
                    self._session.fail("key %r cannot be compressed by lowrank: %s" % (round.key.name, error))
                if self._session.has_ended and not round.done:
                    round.end(False, self._failure())
        self._end()

    def _end(self) -> None:
        """The session has ended: whoever waits learns it."""
        with self._changed:
            self._has_ended = True
            waiting = [round for round, _ in self._expected.values()] + [entry[-2] for entry in self._due]
            self._expected.clear()
            self._due.clear()
        for round in waiting:
            round.end(False, self._failure())

    def _failure(self) -> P3Error:
        """Not by check(), which notes that the script knows: who waits for the round will, if anybody does."""
        error = self._session.core.error
        return P3Error("%s: the session was closed" % self._session.label) if error is None else error
