"""The rounds of one key, as a front end takes part in them. The arrays and the arithmetic on them are its own.

In each step every worker has one round of every key: a push if it has a gradient, else a skip. The round's result lands
in an array of its own, as it may come while the old value is still in use; land() takes it over when it is needed.

With staleness a step need not wait for the round before: where that has not landed, it goes on with the result of the
round before that one, if the pushes of all workers that must be in it are (renew_for_step). Then there are two rounds:
one whose answer may come during the step, in an array of its own, and the step's, which leaves behind it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Callable, List, Optional, Tuple

import numpy as np

from p3.frontend import waiting
from p3.plan import choices
from p3.plan.choices import Choice
from p3.worker.key import Key
from p3.worker.session import Session


class Round:
    """One that is under way."""

    __slots__ = ("operation", "take", "pushed")

    def __init__(self, operation: Any, take: Callable[[Any], bool]) -> None:
        self.operation = operation
        self.take = take  # what becomes of its result, and whether any worker pushed
        self.pushed: Any = None  # what the front end wants to see again when it lands


def let_servers_divide(session: Session, store: int) -> None:
    """By the number of workers, where that may fall: they know it in the very round. Before the store has a key."""
    if session.goes_on_without:
        session.set_option(store, "reduction", {"type": "mean"})


class KeyRounds(ABC):
    """Threads: those of the script, one at a time."""

    goes_ahead = True  # with staleness; else each step waits for the answer to the one before

    def __init__(self, session: Session, key: Key, landing: Any, array: Any) -> None:
        """New values land in `landing`, of which `array` is what the core writes to, in CPU memory."""
        self.name, self.key = key.name, key
        self._awaited = "a new value of %s" % key.name  # in words
        self.priority = 0
        self.updates = 0  # that have been taken over
        self.counts = True  # whether rounds that begin now are updates, if any worker pushes
        self.has_changed = False  # in any round of which this process knows, whatever state the script has given since
        self.is_new = False  # has a round of the current step
        self.landing = landing
        self.takes_steps = key.axes.takes_steps  # what is pushed
        self.lands_changes = key.axes.lands_changes  # of what landed before: nobody else may write to `landing`
        self._array = array
        self._session = session
        session.waits.expect(key)  # land() notes them
        self._rescale = 1.0 if key.axes.reduction == "mean" else 1.0 / session.num_workers
        self._rounds = 0  # of this worker, begun
        self._under_way: Optional[Round] = None
        self._before: Optional[Round] = None  # with staleness: one that a step has not waited for
        self._other_landing: Optional[Tuple[Any, Any]] = None  # and where that lands; the two are used in turn
        self._is_skip = False  # this worker's part of the last round
        self._counts = True  # the last round
        self._is_stale = key.staleness > 0
        self._may_go_ahead = self.goes_ahead and self._is_stale
        self.also_awaited: Optional[Callable[[], Any]] = None  # before a result is taken over; may be interrupted

    @property
    def state_key(self) -> Key:
        """Whose state the optimizer's of this key is."""
        return self.key

    @property
    def comes_back_compressed(self) -> bool:
        return bool(self.key.axes.value_codec)

    @property
    def kept(self) -> List[Choice]:
        """What compression keeps of what it has left out, and adds to the next gradient or sum."""
        of_slices = self._session.core.keeps_residual(self.key.handle)
        of_gradients = [choices.LOW_RANK] * (self.key.rank > 0) + [choices.RESIDUAL] * of_slices
        return of_gradients + choices.of_sums_back(self.key.axes.value_codec)

    @property
    def is_pending(self) -> bool:
        """The result of a round, or the first value, is still to be taken over."""
        return self._under_way is not None

    @property
    def has_come(self) -> bool:
        """The last step's result is still to be taken over, and nobody need wait for it."""
        return not self.is_new and self._under_way is not None and self._under_way.operation.done

    def give_updates(self, number: int) -> None:
        """So many are in the state that the script gives; also once more, if who gave it before died meanwhile."""
        self.has_changed = self.has_changed or self.updates > 0  # as in a job that has resumed
        self.updates = number

    def updates_by_now(self) -> int:
        """With the round under way. Waits for that if this worker has skipped it, as others may have pushed."""
        if self._is_skip:
            self.land()
        return self.updates + (self.is_pending and self._counts)

    # What the front end does with values

    def _new_landing(self) -> Tuple[Any, Any]:
        """Another one, with its array: of NumPy, which is both."""
        landing = np.empty_like(self.landing)
        return landing, landing

    @abstractmethod
    def _take_value(self, operation: Any) -> bool:
        """A first value, or the last one, is in `landing`."""

    @abstractmethod
    def _take_result(self, operation: Any) -> None:
        """What a round with gradients has made is in `landing`."""

    # A round

    def _begin(self, operation: Any, is_skip: bool) -> None:
        """It is the current step's; behind _make_room()."""
        self._under_way, self._is_skip, self._counts = Round(operation, self._take_round), is_skip, self.counts
        self._rounds += 1
        self.is_new = True

    def skip(self) -> None:
        """Begins a round without a gradient of this worker."""
        self._make_room()
        self._begin(self._skip(), is_skip=True)

    def _skip(self, goes_on: bool = True) -> Any:
        return self._session.skip(self.key, self._array, self.priority, goes_on=goes_on)

    def end_step(self) -> None:
        """The step's round has begun: the next one is of another step."""
        self.is_new = False

    def take_last(self) -> None:
        """When no worker steps any more: lands the value that all end with, where they have been steps apart."""
        self.land()
        if self._is_stale:
            self._under_way = Round(self._skip(goes_on=False), self._take_value)
            self._rounds += 1

    def end_without_result(self) -> None:
        """Waits for the round under way, and nobody takes its result over: the value stays as it is."""
        round, self._under_way = self._under_way, None
        if round is not None:
            waiting.or_time_out(self._session, round.operation, self._awaited)
        self.land()  # of a step before this one
        self.is_new = False

    # Its result

    def renew(self) -> None:
        """Before the value is read: takes over the last step's result, and not what comes before its end."""
        if not self.is_new and self._under_way is not None:
            self.land()

    def renew_for_step(self) -> None:
        """The same, for the step's own forward pass."""
        if not self.is_new and self._under_way is not None:
            self._make_room()

    def _make_room(self) -> None:
        """Another round may begin: nothing is under way, or with staleness one round that the value may do without.

        Which is so if the value lacks that one alone of this worker's rounds, and of the others' none that is more
        than `staleness` rounds behind the last one of this worker.
        """
        round = self._under_way
        if round is None:
            return
        if not self._may_go_ahead or round.operation.done:
            self.land()
            return
        if self._before is not None:
            self._take_before()
        landed, least_clock = self._session.landed_round(self.key)
        if landed == self._rounds or least_clock < self._rounds - self.key.staleness:
            self.land()
            return
        self._session.check()
        self._go_ahead(round)

    def _go_ahead(self, round: Round) -> None:
        self._before, self._under_way = round, None
        self._change_landings()

    def _take_before(self) -> None:
        """The round that the last step has not waited for is what the value holds from here on."""
        round, self._under_way = self._under_way, self._before
        self._change_landings()
        try:
            self.land()
        finally:
            self._change_landings()
            self._under_way = round

    def _change_landings(self) -> None:
        other = self._other_landing or self._new_landing()
        self._other_landing, (self.landing, self._array) = (self.landing, self._array), other

    def land(self) -> bool:
        """Waits for all that is under way, and takes the last result over. Whether any worker pushed in the last step's
        round, if nobody has waited for it yet."""
        round = self._under_way
        if round is None:
            if self._before is not None:
                self._take_before()
            return False
        if round.operation.done:  # as of most, by the time that it is needed
            self._session.check()
        else:
            self.await_result()
        if self.also_awaited is not None:
            self.also_awaited()
        return self._take_over(round)

    def await_result(self) -> Any:
        """Waits for the round under way, whose result nobody takes over; its operation."""
        operation = self._under_way.operation
        waiting.on_training_thread(self._session, self.key, operation, self._awaited)
        return operation

    def _take_over(self, round: Round) -> bool:
        """It has landed."""
        self._under_way = self._before = None
        return round.take(round.operation)

    def _take_round(self, operation: Any) -> bool:
        if not operation.updated:
            return False
        self.has_changed = True
        self.updates = self._session.updates(self.key) if self._is_stale else self.updates + self._counts
        self._take_result(operation)
        return True
