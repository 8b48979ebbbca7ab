"""Comparisons of parameters on a device, for whose outcome nothing waits: a difference is an error a step later."""

from __future__ import annotations

import collections
from typing import Any, Callable, Deque, Dict, List, Tuple

import torch


Problem = Callable[[], str]  # in words


class Comparisons:
    """Those of one optimizer. Threads: the script's."""

    def __init__(self) -> None:
        self._noted: Dict[Any, List[Tuple[torch.Tensor, Problem]]] = {}  # in this step, by their Staging
        # The outcomes of whole steps that are on their way here.
        self._under_way: Deque[Tuple[Any, torch.Tensor, Any, List[Problem]]] = collections.deque()

    def note(self, staging: Any, differs: torch.Tensor, problem: Problem) -> None:
        """`differs`: one bool on the device of `staging`. If it is true, `problem()` is told."""
        self._noted.setdefault(staging, []).append((differs, problem))

    def end_step(self) -> None:
        """Has the step's outcomes come, and looks at those that are there: ValueError with the first problem."""
        known = self._take(waits=False)
        for staging, noted in self._noted.items():
            differs, problems = zip(*noted)
            self._under_way.append((staging, *staging.to_host(torch.stack(differs)), list(problems)))
        self._noted = {}
        _raise_first(known)

    def finish(self) -> None:
        """The same, and waits for all outcomes."""
        self.end_step()
        _raise_first(self._take(waits=True))

    def _take(self, waits: bool) -> List[str]:
        known: List[str] = []
        while self._under_way and (waits or self._under_way[0][2].query()):
            staging, differs, came, problems = self._under_way.popleft()
            came.synchronize()
            staging.give_back(came)
            known += [problem() for problem, is_told in zip(problems, differs.tolist()) if is_told]
        return known


def _raise_first(problems: List[str]) -> None:
    if problems:
        raise ValueError("a step ago, or earlier, as nothing waits for the device: %s" % problems[0])
