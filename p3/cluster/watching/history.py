"""What one process has done by and by: its totals at several moments, and how much that is in a second. No I/O."""

from __future__ import annotations

from typing import Iterable, List, Mapping, Tuple

LONGEST_S = 60.0  # as far back as anybody looks
_LEAST_S = 0.5  # from which a pace is told: the first two rounds that are heard of may come at once
_STEP_S = 4.0  # between two moments that are kept: so there are few of them, however often somebody asks

Totals = Mapping[str, float]


class Stretch:
    """From one moment to a later one."""

    def __init__(self, begin: Tuple[float, Totals], end: Tuple[float, Totals]) -> None:
        self.seconds = end[0] - begin[0]
        self._before, self._after = begin[1], end[1]

    def grown(self, name: str) -> float:
        """By how much that total has grown; what was not there before, from zero on. Never negative: a process that
        took another one's place begins anew."""
        return max(0.0, self._after.get(name, 0.0) - self._before.get(name, 0.0))

    def per_s(self, name: str) -> float:
        return self.grown(name) / self.seconds if self.seconds > 0 else 0.0


class History:
    """Begins with zeros, at second 0 of the clock by which the process counts."""

    def __init__(self) -> None:
        self._moments: List[Tuple[float, Totals]] = [(0.0, {})]

    def add(self, at_s: float, totals: Totals) -> None:
        moments = self._moments
        if at_s <= moments[-1][0]:
            return  # of a clock that does not go on
        if len(moments) > 1 and moments[-1][0] - moments[-2][0] < _STEP_S:
            moments.pop()
        moments.append((at_s, totals))
        while len(moments) > 2 and moments[1][0] <= at_s - LONGEST_S:
            moments.pop(0)

    def over(self, span_s: float) -> Stretch:
        """The last `span_s` seconds before the last moment, or somewhat more; less only if there is no more."""
        end = self._moments[-1]
        begins = [one for one in self._moments if one[0] <= end[0] - span_s]
        return Stretch(begins[-1] if begins else self._moments[0], end)

    @property
    def last(self) -> Totals:
        return self._moments[-1][1]


class Pace:
    """How fast rounds follow each other, from the moments at which each was first heard of: so a step that takes long
    counts as it is, wherever somebody looks between two of them."""

    def __init__(self) -> None:
        self._moments: List[Tuple[float, int]] = []

    def note(self, now: float, round: int) -> None:
        moments = self._moments
        if moments and round <= moments[-1][1]:
            return
        if len(moments) > 1 and moments[-1][0] - moments[-2][0] < _LEAST_S:
            moments.pop()
        moments.append((now, round))
        while len(moments) > 2 and moments[1][0] <= now - LONGEST_S:
            moments.pop(0)

    def per_s(self, now: float, span_s: float) -> float:
        if not self._moments:
            return 0.0
        end = self._moments[-1]
        begins = [one for one in self._moments if one[0] <= now - span_s]
        begin = begins[-1] if begins else self._moments[0]
        seconds = end[0] - begin[0]
        return (end[1] - begin[1]) / seconds if seconds >= _LEAST_S else 0.0


def median(values: Iterable[float]) -> float:
    """Of at least one. As statistics.median(), which takes a twentieth of the scheduler's start to load."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return (ordered[half] + ordered[-half - 1]) / 2
