"""New values that have come to CPU memory: a thread has them copied to their device at once, before a module asks.

So the copies of most weights are behind them when the forward pass begins. A module that comes first, as its value has
just landed, has the copy made itself: nobody waits for the thread.
"""

from __future__ import annotations

import itertools
import threading
from typing import Callable, Dict, Optional, Tuple

from p3._core import Completions, P3Error

_LOOK_UP_S = 3600.0


class Arrivals:
    """Of one session's rounds whose values go to one device. Threads: the script's, and the one that work() has."""

    def __init__(self) -> None:
        self._completions = Completions()
        self._expected: Dict[int, Arrival] = {}
        self._numbers = itertools.count()

    def expect(self, bring: Callable[[], None]) -> Arrival:
        """Of a round that begins now, with the arrival's `tell`. `bring` queues the copy of its value."""
        number = next(self._numbers)
        arrival = self._expected[number] = Arrival(bring, (self._completions, number))
        return arrival

    def work(self) -> None:
        """Until the job fails, of which the script learns where it waits for a value."""
        while True:
            try:
                completed = self._completions.next(_LOOK_UP_S)
            except P3Error:
                return self._expected.clear()
            if completed is None:
                continue
            number, is_updated = completed
            arrival = self._expected.pop(number, None)
            if arrival is not None and is_updated:
                arrival.begin_early()
            del arrival  # and the parameter whose it is


class Arrival:
    """The value of one round."""

    def __init__(self, bring: Callable[[], None], tell: Optional[Tuple[Completions, int]] = None) -> None:
        self.tell = tell
        self._bring: Optional[Callable[[], None]] = bring  # None: the copy is queued
        self._lock = threading.Lock()  # held while a copy is queued, which waits for nothing

    def begin(self) -> None:
        """The copy is queued when this returns, by this thread or the other."""
        with self._lock:
            if self._bring is not None:
                self._bring()
                self._bring = None

    def begin_early(self) -> None:
        try:
            self.begin()
        except Exception:  # as a device that has failed: whoever needs the value tries again, and gets the error
            pass
