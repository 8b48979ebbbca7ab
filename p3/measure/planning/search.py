"""A search for the strategy with which the simulator's iteration is shortest: coordinate descent from the best builder.

One coordinate is what a server holds: a unit of it moves to the server whose host's link has most time to spare, or all
of it to the others. The other is the size of slices. What is tried is the same in every run; how much of it, the time
decides that is given for it.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Dict, Iterator, List, NamedTuple, Sequence, Tuple

from p3.measure.planning import builders
from p3.measure.simulate.predict import Prediction, predict
from p3.measure.simulate.setting import Setting
from p3.plan.strategy import Strategy

SLICES = (2500, 5000, 10000, 20000, 50000, 100000, 200000)
_LEAST_GAIN = 0.001  # of the time so far: what is less is chance
_RECEIVERS = 3  # servers that are tried for a unit of another


class Tried(NamedTuple):
    shares: Tuple[int, ...]  # of the servers, in units
    slice_elements: int
    strategy: Strategy
    prediction: Prediction

    @property
    def seconds(self) -> float:
        return self.prediction.mean_s


class Search:
    """Of one setting, whose own strategy does not count. Simulates nothing twice."""

    def __init__(self, setting: Setting, slices: Sequence[int] = SLICES) -> None:
        """`slices`: sizes that may be tried beside the usual one."""
        self._slices = slices
        self._setting = dataclasses.replace(setting, strategy=Strategy())
        self._known: Dict[Tuple[Tuple[int, ...], int], Tried] = {}
        self.usual_slice = self._setting.slice_size.most

    @property
    def tried(self) -> int:
        return len(self._known)

    def at(self, shares: Sequence[int], slice_elements: int) -> Tried:
        key = tuple(shares), slice_elements
        if key not in self._known:
            made = builders.strategy(self._setting, *key)
            prediction = predict(dataclasses.replace(self._setting, strategy=made))
            self._known[key] = Tried(*key, made, prediction)
        return self._known[key]

    def of(self, strategy: Strategy) -> Prediction:
        """Of one that is none of the search's."""
        return predict(dataclasses.replace(self._setting, strategy=strategy))

    def without(self) -> Tried:
        return self.at(builders.equal(self._setting), self.usual_slice)

    def proportional(self) -> Tried:
        return self.at(builders.proportional(self._setting), self.usual_slice)

    def best(self, budget_s: float) -> Tried:
        """The builders are always tried; everything else while the time lasts."""
        end = time.monotonic() + budget_s
        best = self._better(self.without(), self.proportional())
        while True:
            before = best
            for shares, slice_elements in self._moves(best):
                if time.monotonic() >= end:
                    return best
                best = self._better(best, self.at(shares, slice_elements))
                if best is not before:
                    break  # go on from there
            if best is before:
                return best

    @staticmethod
    def _better(best: Tried, other: Tried) -> Tried:
        return other if other.seconds < best.seconds * (1 - _LEAST_GAIN) else best

    def _moves(self, best: Tried) -> Iterator[Tuple[List[int], int]]:
        hosts, shares = self._setting.server_hosts, best.shares
        use = [max(up["use"], down["use"]) for up, down in zip(best.prediction.up, best.prediction.down)]
        by_use = sorted(range(len(hosts)), key=lambda server: (use[hosts[server]], server))
        giving = [server for server in reversed(by_use) if shares[server] > 0]
        for slice_elements in self._neighbours(best.slice_elements):
            yield list(shares), slice_elements
        for giver in giving:
            for taker in [server for server in by_use if hosts[server] != hosts[giver]][:_RECEIVERS]:
                moved = list(shares)
                moved[giver] -= 1
                moved[taker] += 1
                yield moved, best.slice_elements
        for giver in giving:
            if shares[giver] < sum(shares):
                yield _without(shares, giver), best.slice_elements

    def _neighbours(self, slice_elements: int) -> List[int]:
        below = [one for one in self._slices if one < slice_elements][-1:]
        return below + [one for one in self._slices if one > slice_elements][:1]


def _without(shares: Sequence[int], giver: int) -> List[int]:
    """Its units go to the others in turn, to those first that hold least."""
    left = list(shares)
    rest, left[giver] = left[giver], 0
    others = [server for server in range(len(left)) if server != giver and left[server] > 0]
    for number in range(rest):
        left[sorted(others, key=lambda server: (shares[server], server))[number % len(others)]] += 1
    return left
