"""What became of a training in which processes died: told from the lines of its workers.

A step of a worker stands until it is done again, by a job that has started anew from what it had saved. What stands at
the end, in the time that it took, is held against a training of which nothing dies and all others is the same.
"""

from __future__ import annotations

import statistics
from typing import Dict, List, NamedTuple, Sequence, Tuple

_MOST_STEPS_OF_A_SPAN = 3


class Line(NamedTuple):
    at: float  # of the monotonic clock
    rank: int
    step: int
    present: int  # workers that took part in it, as far as this one knew


class Story(NamedTuple):
    way: str
    workers: int
    lines: Sequence[Line]  # in the order of their times
    deaths: Sequence[Tuple[float, str]]  # when, and who

    @property
    def begin(self) -> float:
        """The end of the first step that all have done: before that the processes start."""
        seen: Dict[int, set] = {}
        for one in self.lines:
            seen.setdefault(one.step, set()).add(one.rank)
            if len(seen[one.step]) == self.workers:
                return one.at
        return self.lines[0].at

    @property
    def seconds(self) -> float:
        return self.lines[-1].at - self.begin

    def completions(self) -> List[float]:
        """When each step of a single worker that stands at the end was done."""
        return sorted(at for at in self._standing().values() if at >= self.begin)

    def spans(self) -> List[Tuple[float, float]]:
        """Of each such step, from the same worker's one before to its end, and no more than some steps' time: what lies
        before is the time that the worker was away."""
        of_ranks: Dict[int, List[float]] = {}
        for (rank, _), at in self._standing().items():
            of_ranks.setdefault(rank, []).append(at)
        most, found = _MOST_STEPS_OF_A_SPAN * self.step_s, []
        for times in map(sorted, of_ranks.values()):
            begins = [times[0] - self.step_s, *times[:-1]]
            found += [(max(before, at - most), at) for before, at in zip(begins, times) if at >= self.begin]
        return sorted(found)

    def _standing(self) -> Dict[Tuple[int, int], float]:
        """When each step of each worker was done last."""
        last: Dict[Tuple[int, int], float] = {}
        for one in self.lines:
            last[one.rank, one.step] = one.at
        return last

    @property
    def rate(self) -> float:
        """Steps of single workers that stand, a second."""
        return (len(self.completions()) - 1) / self.seconds

    @property
    def step_s(self) -> float:
        """The median of all steps."""
        ends = self._ends()
        return statistics.median(after - before for before, after in zip(ends, ends[1:]))

    @property
    def restarts(self) -> int:
        """How often steps were done again."""
        steps = self._firsts()
        return sum(after.step < before.step for before, after in zip(steps, steps[1:]))

    def pauses(self, role: str = "") -> List[float]:
        """By how much the longest step from each death to the next exceeds the median. `role`: of that one's alone."""
        ends, found = self._ends(), []
        for number, (at, who) in enumerate(self.deaths):
            if not who.startswith(role):
                continue
            until = self.deaths[number + 1][0] if number + 1 < len(self.deaths) else float("inf")
            around = [max((end for end in ends if end < at), default=at), *(end for end in ends if at <= end < until)]
            gaps = [after - before for before, after in zip(around, around[1:])]
            found.append(max(0.0, max(gaps, default=0.0) - self.step_s))
        return found

    def _ends(self) -> List[float]:
        return [one.at for one in self._firsts()]

    def _firsts(self) -> List[Line]:
        """Of the first of the workers that was done with each step, or done with it again. They are one step apart at
        most, so who is farther behind has started anew."""
        found: List[Line] = []
        for one in self.lines:
            if not found or one.step > found[-1].step or one.step < found[-1].step - 1:
                found.append(one)
        return found
