"""Where a worker stands in its program, for when another one is lost (P3_ON_WORKER_LOSS=wait). No I/O.

All workers run the same program, so who is left knows what a lost one was about to do: which keys it would still have
pushed in the step that was cut short, and which number that step has. Each worker keeps a log of its own calls, and
answers the scheduler's question about a lost one from it (p3/cluster/losses.py).

A *step* ends where the script says so (snapshot(), with the script's own number). Until it first does, a step ends
before a push of a key that was pushed since the last end, and in barriers, join() and close(). A key that is not pushed
in each step may be the first of one: in a program that pushes its keys in the order of their priorities, as Trainer and
Module do, a step also ends before a key that comes earlier in that order than the key before. What lies between the end
of a step and the next push, barriers and join() for example, belongs to the step before. Rounds that are skipped belong
to no step.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Callable, Deque, Dict, Hashable, List, Mapping, NamedTuple, Optional, Tuple

Rounds = Dict[Hashable, int]  # of keys: the last one that was called

IN, SKIPPING, JOINED, BEHIND = "in", "skipping", "joined", "behind"  # see Place

_LOG = 64  # steps that are kept without a look at whether they are complete


class Place(NamedTuple):
    """Where this worker stands, as to a lost one."""

    # IN: in the step in which that one was lost, before it, or not yet past what follows it. SKIPPING: the same, in a
    # join() that the lost one had called too. JOINED: in a join() that it called right behind that step, and the lost
    # one had not. BEHIND: it has pushed in a later step, or left.
    state: str
    step: int  # JOINED, BEHIND: the number of that step
    rounds: Rounds  # of the keys: what the lost one would have called as well, as far as is known by now, or all of it
    numbers: Any  # JOINED, BEHIND: those of the optimizers, as of the end of that step


class _End(NamedTuple):
    """Of a step."""

    step: int
    joins: int  # that are over
    numbers: Any
    rounds: Rounds  # that were called in it
    pushes: Rounds  # of these keys: how often this process had pushed them by then


class _Question:
    """About a lost worker."""

    def __init__(self, attempt: int, joins: int, pushed: Mapping[Hashable, int]) -> None:
        self.attempt, self.joins, self.pushed = attempt, joins, pushed
        self.told: Optional[str] = None  # the state
        self.filled: Rounds = dict(pushed)  # by what was told


class Steps:
    """Of one process. `numbers()` describes the optimizers, as JSON can carry it; `completed(key)`: how many of this
    process's pushes of the key have come back. `is_agreed(key)`: servers know the key."""

    def __init__(
        self,
        numbers: Callable[[], Any],
        completed: Callable[[Hashable], int],
        is_agreed: Callable[[Hashable], bool] = lambda key: True,
    ) -> None:
        self._numbers, self._completed, self._is_agreed = numbers, completed, is_agreed
        self.step = 0  # that has ended
        self.joins = 0  # that are over
        self.is_marked = False  # the script says where steps end
        self._rounds: Rounds = {}
        self._pushes: Rounds = {}
        self._open: Rounds = {}  # of the step that has not ended
        self._orders: List[Tuple[int, int]] = []  # of its keys: that of their store, and that in the store
        self._stores: Dict[int, int] = {}  # their order, by what was pushed first
        self._is_ordered: Optional[bool] = None  # as the first step was
        self._settled = _End(0, 0, None, {}, {})  # an end behind which all is complete, and all rounds by then
        self._ended: Deque[_End] = deque()  # later ones
        self._joining: Optional[Rounds] = None  # while in join(): the rounds by then
        self._has_left = False
        self._questions: Dict[int, _Question] = {}

    def begin_behind(self, step: int, joins: int = 0, is_marked: bool = False, numbers: Any = None) -> None:
        """Before the first push: these are behind the job already."""
        self.step, self.joins, self.is_marked = step, joins, is_marked
        self._settled = _End(step, joins, numbers, self._settled.rounds, {})

    def know(self, key: Hashable, round: int) -> None:
        """The same of a key."""
        self._rounds[key] = self._settled.rounds[key] = round

    # The script's calls, in its order

    def push(self, key: Hashable, order: Optional[Tuple[int, int]] = None) -> None:
        """`order`: the key's store, and the key's order in that; None if the script says nothing of an order. Whether
        it means what it says, its first step tells."""
        at = None if order is None else (self._stores.setdefault(order[0], len(self._stores)), order[1])
        is_back = at is not None and self._is_ordered and bool(self._orders) and at < self._orders[-1]
        if not self.is_marked and (key in self._open or is_back):
            self.end()
        elif not self._pushes and self._settled.numbers is None:
            self._settled = self._settled._replace(numbers=self._numbers())
        if self._joining is not None:
            self.joined(self.step)  # sessions may skip without a word
        if at is not None:
            self._orders.append(at)
        self._rounds[key] = self._open[key] = self._rounds.get(key, 0) + 1
        self._pushes[key] = self._pushes.get(key, 0) + 1

    def mark(self, step: int) -> None:
        if not self.is_marked:  # what was taken for ends of steps may have been none
            self.is_marked = True
            for end in reversed(self._ended):
                self._open = {**end.rounds, **self._open}
            self._ended.clear()
        self._end(step)

    def end(self) -> None:
        """Where a step ends unless the script says it."""
        if self._open and not self.is_marked:
            self._end(self.step + 1)

    def join(self) -> None:
        self._end(self.step + 1 if self._open else self.step)
        self._joining = dict(self._rounds)

    def skip(self, key: Hashable) -> None:
        """Also says that this worker has taken over what others pushed in the round that it skipped before."""
        if self._joining is None:
            self.join()
        self._rounds[key] = self._rounds.get(key, 0) + 1

    def joined(self, step: int) -> None:
        """join() returns. `step`: behind the job, by then."""
        self.step, self.joins, self._joining = step, self.joins + 1, None
        self._settled = _End(step, self.joins, self._numbers(), dict(self._rounds), {})
        self._ended.clear()

    def leave(self) -> None:
        self.end()
        self._has_left = True

    # Questions

    def ask(self, rank: int, attempt: int, joins: int, pushed: Mapping[Hashable, int]) -> None:
        """About the worker of that rank, which was lost: `pushed` has the rounds of the keys that it has pushed, all or
        a part of them, and `joins` counts its calls of join(). Replaces a question about it."""
        self._questions[rank] = _Question(attempt, joins, {key: round for key, round in pushed.items() if round > 0})

    def settle(self, rank: int) -> None:
        """Nobody wants to know any more."""
        self._questions.pop(rank, None)

    def news(self) -> List[dict]:
        """What there is to answer, and was not said yet; with Place's fields."""
        answers = []
        for rank, question in list(self._questions.items()):
            place = self.place(question.pushed, question.joins)
            rounds = {
                key: round for key, round in place.rounds.items()
                if self._is_agreed(key) and (place.state in (JOINED, BEHIND) or round > question.filled.get(key, 0))
            }  # fmt: skip
            if place.state == question.told and not (place.state in (IN, SKIPPING) and rounds):
                continue
            question.told = place.state
            question.filled.update(rounds)
            answers.append({"rank": rank, "attempt": question.attempt, **place._replace(rounds=rounds)._asdict()})
            if place.state == BEHIND:
                del self._questions[rank]
        return answers

    def place(self, pushed: Mapping[Hashable, int], joins: int) -> Place:
        if self._joining is not None and joins <= self.joins:
            return self._place_in_join(pushed, joins)
        unknown = any(round > self._rounds.get(key, 0) for key, round in pushed.items())
        found = None if unknown else self._first_end(pushed, joins)
        if found is not None and found.state == BEHIND:
            return found
        # What was called so far, it would have called too.
        return Place(IN if self._joining is None else SKIPPING, self.step, self._rounds, None)

    def _place_in_join(self, pushed: Mapping[Hashable, int], joins: int) -> Place:
        """The lost one had not called join()."""
        behind_us = {key: round - self._joining.get(key, 0) for key, round in pushed.items()}
        alone = max(behind_us.values(), default=0)
        if alone <= 0:
            return self._first_end(pushed, joins)
        if any(pushed[key] >= self._rounds.get(key, 0) for key, rounds in behind_us.items() if rounds > 0):
            return Place(IN, self.step, {}, None)  # some of that is still to come
        rounds = {key: max(round, pushed.get(key, 0)) for key, round in {**pushed, **self._joining}.items()}
        return Place(JOINED, self.step + alone, rounds, self._numbers())  # which do not change without the lost one

    def _first_end(self, pushed: Mapping[Hashable, int], joins: int) -> Optional[Place]:
        """The end of the first step by which all of this was done, None if there is none yet. BEHIND: this worker has
        pushed since, or left; else JOINED."""
        rounds = dict(self._settled.rounds)
        for number, end in enumerate([self._settled, *self._ended]):
            rounds.update(end.rounds)
            if end.joins >= joins and all(rounds.get(key, 0) >= round for key, round in pushed.items()):
                later = list(self._ended)[number:]
                is_over = self._has_left or self._open or any(other.rounds for other in later)
                return Place(BEHIND if is_over else JOINED, end.step, rounds, end.numbers)
        return None

    def _end(self, step: int) -> None:
        self.step = step
        pushes = {key: self._pushes[key] for key in self._open}
        self._ended.append(_End(step, self.joins, self._numbers(), self._open, pushes))
        if self._is_ordered is None and self._orders:
            backs = sum(later < earlier for earlier, later in zip(self._orders, self._orders[1:]))
            self._is_ordered = backs <= 1  # perhaps to the first key of the next step
        self._open, self._orders = {}, []
        while len(self._ended) > _LOG and not self._questions and self._is_complete(self._ended[0]):
            end = self._ended.popleft()
            self._settled = end._replace(rounds={**self._settled.rounds, **end.rounds})

    def _is_complete(self, end: _End) -> bool:
        return all(self._completed(key) >= pushes for key, pushes in end.pushes.items())
