"""Plans made while a job trains (strategy="auto"): from rates of links and times of layers that its steps have shown.

With each step every worker tells, in a small key's round, what its machine's link carried while it was full. So all
know the same rates, and the first worker has a plan made when they ask for one (p3/plan/occasion.py), in another
process. It says so with the count of a step; the others hear that in the count, and _BEHIND steps later, in which it
has come to all, they rest and go over to the plan (Session.change_strategy), at the same point of the same program.
"""

from __future__ import annotations

import collections
import logging
import math
from typing import Any, Callable, Deque, Dict, Hashable, Iterable, List, Optional, Sequence

from p3.codecs import LOW_RANK
from p3.errors import ConfigError
from p3.frontend.planner import Planner
from p3.frontend.steps import Count, Steps
from p3.frontend.timing import Timing
from p3.plan import strategy as strategies
from p3.plan.occasion import Occasion, Rates
from p3.plan.strategy import Cut, Strategy
from p3.worker.key import Key
from p3.worker.session import Session

log = logging.getLogger("p3")

_BEHIND = 2  # steps, whose counts have come by then, or are about to
_BUDGET_S = 3.0  # of the search
_WORTH = 0.97  # of the present plan's predicted time: what gains less changes nothing
_MBIT = 1e6 / 8


def planned_for(keys: Iterable[Key]) -> List[Key]:
    """Those of them that other servers and slices may be found for."""
    return [key for key in keys if not key.sparse and key.factors is None]


class Plans:
    """Of one trainer's stores. Threads: the script's, one at a time."""

    def __init__(self, session: Session, store: int, keys: Sequence[Key], updates_behind: str,
                 change: Callable[[Optional[Strategy]], None]) -> None:  # fmt: skip
        """On every worker at the same point; waits for them. `store`: not that of `keys`, of planned_for() and at least
        one, in the order of the forward pass. `updates_behind`: what each update of a step waits for besides its own
        sum: "none", the "norm" that servers tell, or "wait", until all sums are here. `change`: rests, and then has all
        go over to a strategy; None: to the first worker's, which this one does not know."""
        self._session, self._change = session, change
        self._updates_behind = updates_behind
        self._keys = list(keys)
        self._places = len(session.placement.workers)
        self._steps = Steps(session, store, tells=1 + self._places, name="plans")
        self._counted: Deque[Count] = collections.deque()  # not looked at yet
        self._rates, self._occasion = Rates(self._places), Occasion()
        self.timing = Timing()
        # Of the first worker:
        self._planner: Optional[Planner] = None
        self._assumes: Dict[Hashable, float] = {}  # what it plans for
        self._proposal: Optional[Strategy] = None
        self._is_told = False  # to all

    def propose(self, strategy: Strategy) -> None:
        """On the first worker: all go over to it, a few steps from now."""
        self._proposal, self._is_told = strategy, False

    # Each worker, in each step

    def end_step(self) -> None:
        """A step of this worker has ended; all its rounds have begun. May take the time in which all go over."""
        self.timing.end_step(sum((self._session.waits.by_group() or {}).values()))
        told = [0.0] * (1 + self._places)
        if self._proposal is not None and not self._is_told:
            told[0], self._is_told = 1.0, True
        told[1 + self._session.rank] = float(self._session.core.take_full_rate())
        self._counted.append(self._steps.count(0.0, 0.0, told))
        self.follow()

    def skip(self) -> None:
        """In join(): this worker has no step, which others may. Then follow(), if any had one."""
        self._counted.append(self._steps.skip())

    def follow(self) -> None:
        if len(self._counted) > _BEHIND:
            self._look_at(self._counted.popleft())

    def settle(self) -> None:
        """Before another process enters, which knows of no step: all that the steps so far have told."""
        while self._counted:
            self._look_at(self._counted.popleft())

    def finish(self) -> None:
        """Until all steps have been counted."""
        self._steps.finish()

    def close(self) -> None:
        if self._planner is not None:
            self._planner.close()
            self._planner = None

    def _look_at(self, count: Count) -> None:
        self._steps.wait(count)
        asked, *rates = count.told
        self._rates.note(rates)
        if asked > 0:
            self._go_over()
        elif self._session.is_first and self._proposal is None:
            self._plan()

    def _go_over(self) -> None:
        proposal, self._proposal, self._is_told = self._proposal, None, False
        self._change(proposal)
        self.timing.begin_anew()

    # The first worker

    def _plan(self) -> None:
        if self._planner is not None:
            self._take_answer(self._planner)
            return
        placement, members = self._session.placement, self._session.members
        rates = self._rates.of_hosts({rank: placement.workers[rank] for rank in members})
        if not self._occasion.is_there(rates) or self.timing.least is None:
            return
        self._occasion.plan(rates)
        self._assumes = rates
        try:
            self._planner = Planner(self._question(rates))
        except OSError as error:
            self._say_none("no process for it could be started: %s" % error)

    def _take_answer(self, planner: Planner) -> None:
        try:
            answer = planner.answer()
            if answer is None:
                return
            self._planner = None
            found = strategies.parse(answer["strategy"], "made while the job trains")
        except (RuntimeError, ConfigError, ValueError) as error:  # what it has said may be no JSON
            self._planner = None
            self._say_none(str(error))
            return
        rates = ", ".join("%.0f" % (rate / _MBIT) for _, rate in sorted(self._assumes.items(), key=str))
        before_s, now_s = answer["before_s"], answer["seconds"]
        if now_s > _WORTH * before_s or found == self._in_use()._replace(path=found.path):
            log.info("%s: links carry %s Mbit/s; servers keep their shares, with which a step takes %.3g s, by the "
                     "simulator", self._session.label, rates, before_s)  # fmt: skip
            return
        self.propose(found)
        log.warning("%s: links carry %s Mbit/s; servers get other shares, with which a step takes %.3g s in place of "
                    "%.3g, by the simulator: %s", self._session.label, rates, now_s, before_s,
                    found.text().replace("\n", ""))  # fmt: skip

    def _say_none(self, why: str) -> None:
        log.warning("%s: servers keep their shares, as no plan could be made: %s", self._session.label, why)

    def _question(self, rates: Dict[Hashable, float]) -> Dict[str, Any]:
        """See p3/measure/planning/answer.py. A host that has servers alone is taken to be as fast as the fastest."""
        session, placement = self._session, self._session.placement
        workers = [placement.workers[rank] for rank in session.members]
        hosts = sorted({*workers, *placement.servers})
        up = [rates.get(host) or max(rates.values()) for host in hosts]
        return {
            "rates_mbit": [rate / _MBIT for rate in up],
            "workers": [hosts.index(host) for host in workers],
            "servers": [hosts.index(host) for host in placement.servers],
            "compute_s": self.timing.least.total,
            "layers": [[key.name, list(key.shape), self.timing.least.backward.get(key.name, 0.0)]
                       for key in self._keys],
            "slice_elements": session.slice_size.setting,
            "keeps_slices": any(key.compression is not None or key.axes.value_codec for key in self._keys),
            "clip": self._updates_behind,
            "compression": _ways(max(self._keys, key=lambda key: math.prod(key.shape))),
            "adds_up": placement.aggregates,
            "strategy": self._in_use().text(),
            "budget_s": _BUDGET_S,
        }  # fmt: skip

    def _in_use(self) -> Strategy:
        """All of these keys are cut by one rule."""
        plans, usual = [self._session.keys.wait_for(key).plan for key in self._keys], self._session.slice_size
        is_usual = all(plan.slice_elements == usual.of(plan.elements) for plan in plans)
        return Strategy(Cut(plans[0].servers or None, None if is_usual else plans[0].slice_elements))


def _ways(key: Key) -> Dict[str, Any]:
    """How it travels, as scripts say it."""
    up = {"type": LOW_RANK.name, "rank": key.rank} if key.rank else dict(key.axes.codec)
    return {"up": up or None, "down": dict(key.axes.value_codec) or None}
