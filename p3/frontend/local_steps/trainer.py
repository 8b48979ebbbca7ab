"""A trainer whose workers take steps by themselves: what is due leaves behind a step, and what has come is merged."""

from __future__ import annotations

import contextlib
import functools
import math
import time
import zlib
from abc import abstractmethod
from typing import (
    Any, Callable, ContextManager, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Set, Tuple,
)  # fmt: skip

import numpy as np

from p3._core import MASTER
from p3.codecs import Ways
from p3.frontend import snapshots, states, waiting
from p3.frontend.check import Digests
from p3.frontend.local_steps.fragments import layers_of, packed
from p3.frontend.local_steps.options import Options
from p3.frontend.local_steps.shares import Counted, OwnNumbers, Shares
from p3.frontend.local_steps.together import Together
from p3.frontend.local_steps.value import Global
from p3.frontend.rounds import let_servers_divide
from p3.plan import choices, combinations
from p3.settings import Settings
from p3.worker.key import Key
from p3.worker.session import Session

_MOMENTUM = 1  # the part of a key's state
ARRAYS = ("global", "exact", "momentum")  # of outer_state()
_PLAIN_STATE = -1  # in the place of a step
_ORDER = "order of weights"


class LocalTrainer(snapshots.Trainer):
    """Of one model. A front end says how its local weights are read and written.

    Threads: the script's, one at a time. Errors: those of Session.
    """

    def __init__(self, session: Session, names: Sequence[str], options: Options, settings: Settings) -> None:
        """`names`: of the weights, in the order of the forward pass. Every worker at the same point, then begin().
        ValueError if rank 0 was given other numbers than this worker, or the strategy does not fit."""
        plan = options.strategy
        planned = choices.of_entries(session.strategy() if plan is None else plan)
        combinations.require("LocalSteps", choices.LOCAL_STEPS, *planned)
        session.entrance.exclude(choices.LOCAL_STEPS, "LocalSteps, whose workers have weights of their own")
        self._session, self._options, self.schedule = session, options, options.schedule
        self.steps_taken = 0  # by this worker
        self._follows_deadlines = settings.priority != "off"
        self._check_every = settings.check
        self._merges = self._waits = self._late = 0
        self._waited_s = 0.0
        self._under_way: Set[int] = set()  # fragments that were sent and not merged yet
        self._has_quorum = 0 < options.quorum < session.num_workers  # one of all workers is as none
        self._sends_weights = options.codec == Ways() and not self._has_quorum  # who is late has an older value
        self._cut = [*self.schedule, int(options.strided)]
        layers = layers_of(names)
        kinds = {name: self.shape_and_type(name) for name in names}
        sizes = [sum(math.prod(kinds[name][0]) * np.dtype(kinds[name][1]).itemsize for name in layer)
                 for layer in layers]  # fmt: skip
        fragments = packed(sizes, self.schedule.fragments, options.strided)
        if plan is not None:
            plan.require(session.num_servers, names)
        self._together = Together(session, plan)  # first: all wait here, also whoever has no strategy
        self.store = session.new_store(plan)
        with self.beginning():
            self._require_alike(names)
            options.require_workers(session.num_workers)
        for option, value in options.codec.options.items():
            session.set_option(self.store, option, value)
        if self._has_quorum:
            quorum = {"type": "workers", "least": options.quorum, "grace_s": options.grace}
            session.set_option(self.store, "quorum", quorum)
        else:
            let_servers_divide(session, self.store)
        session.set_optimizer(self.store, options.outer.description(self._sends_weights))
        with self.beginning():
            self._globals = {name: self._declare(name, *kinds[name]) for name in names}
        self._fragments = [[self._globals[name] for number in numbers for name in layers[number]]
                           for numbers in fragments]  # fmt: skip
        self._digests = Digests(session, self._together.store, names)
        count, other_store = len(self._fragments), self._together.store
        shares: Counted = OwnNumbers(session, count) if self._has_quorum else Shares(session, other_store, count)
        self._shares = shares
        self._kept: Dict[int, Tuple[List[np.ndarray], int]] = {}  # what waits to leave of a fragment, and how urgent

    def begin(self) -> Optional[Dict[str, Any]]:
        """What own_state() gave for the snapshot that the job has resumed from, if it has; else None, and the local
        weights are rank 0's now."""
        with self.beginning():
            resumed = snapshots.add(self._session, self, [self.store])
            if resumed is not None:
                self._require_names(resumed["updates"], "the snapshot")
        for name, one in self._globals.items():
            one.updates = 0 if resumed is None else resumed["updates"][name]
        self._share(self._first)
        for one in self._globals.values():
            self._session.restore(one.key, takes_mean=True)
        if resumed is None:
            self._take_all()
        else:
            self._go_on(resumed)
        return resumed

    def rest(self) -> None:
        """Nobody joins such a job, so values may go on coming."""

    def beginning(self) -> ContextManager[None]:
        """Around a part of the constructor, on every worker: if it fails on any, it does on all, and the servers keep
        nothing."""
        return self._together.failing("LocalSteps", self._drop)

    # What a front end does

    @abstractmethod
    def shape_and_type(self, name: str) -> Tuple[Tuple[int, ...], str]:
        """Of the weight's global value."""

    @abstractmethod
    def local(self, name: str) -> np.ndarray:
        """The local weight as it is now, C-ordered and of that shape and type; it is not kept."""

    @abstractmethod
    def rounded(self, name: str, value: np.ndarray) -> Optional[np.ndarray]:
        """A global value as the local weight would have it, of the same type; None if that is all of it."""

    @abstractmethod
    def merge(self, name: str, value: np.ndarray, alpha: float) -> None:
        """The local weight becomes merged(local, value, alpha). `value` is read during the call alone."""

    def as_array(self, saved: Any) -> np.ndarray:
        """What a state that is loaded has in the place of an array of outer_state()."""
        return np.asarray(saved)

    # Steps

    def weigh(self, samples: Any) -> None:
        """See p3/frontend/local_steps/shares.py; before the step that is of so many samples. Returns at once."""
        self._shares.weigh(samples, self.schedule.due(self.steps_taken + 1))

    def after_step(self) -> None:
        """Behind each step of this worker. Waits only for the values whose deadline this is."""
        self.steps_taken += 1
        due, to_merge = self.schedule.due(self.steps_taken), self.schedule.merged(self.steps_taken)
        self._shares.end_step(due)
        if due is not None:
            priority = -self.schedule.deadline(self.steps_taken) if self._follows_deadlines else 0
            made = [one.made(self.local(one.name), functools.partial(self.rounded, one.name))
                    for one in self._fragments[due]]  # fmt: skip
            self._kept[due] = made, priority
            self._under_way.add(due)
        self._send(tuple(self._kept), waits=False)  # before anything is waited for
        if to_merge in self._under_way:
            self._merge(to_merge)

    def _send(self, numbers: Iterable[int], waits: bool) -> None:
        """What is kept of these fragments, as far as this worker's share in it is known; or `waits` for that."""
        for number in numbers:
            with self._awaiting_others():
                factor = self._shares.factor(number, waits)
            if factor is not None:
                made, priority = self._kept.pop(number)
                for one, sent in zip(self._fragments[number], made):
                    one.push(sent, factor, priority)
        if self._kept:
            self._session.kept_back.add(self._send_all)
        else:
            self._session.kept_back.discard(self._send_all)

    def _send_all(self) -> None:
        self._send(tuple(self._kept), waits=True)

    @contextlib.contextmanager
    def _awaiting_others(self) -> Iterator[None]:
        """Around what waits for others' weights, or for how much they weigh: a time-out says how many steps this worker
        has taken. Where not all have weighed, what is kept cannot leave, which all are told."""
        try:
            yield
        except TimeoutError as error:
            said = "This worker has taken %d local steps"
            if not self._has_quorum:
                said = "All workers must take the same number of local steps; this one has taken %d"
            raise TimeoutError("%s. %s" % (error, said % self.steps_taken)) from None
        except ValueError:
            self._kept.clear()
            self._session.kept_back.discard(self._send_all)
            raise

    def _merge(self, number: int) -> None:
        fragment = self._fragments[number]
        began = time.monotonic()
        is_late = number in self._kept or any(one.is_pending and not one.has_come for one in fragment)
        with self._awaiting_others():
            self._shares.require_alike(number)
        if number in self._kept:
            self._send([number], waits=True)
        self._land_all(fragment)
        if is_late:
            self._waits += 1
            self._waited_s += time.monotonic() - began
        self._take_in(number)

    def _take_in(self, number: int) -> None:
        """A fragment whose value has landed."""
        fragment = self._fragments[number]
        self._shares.end_exchange(number)
        self._merges += 1
        if self._check_every and self._merges % self._check_every == 0:
            self._require_same_bits(fragment)
        for one in fragment:
            if one.is_late:
                self.merge(one.name, one.caught_up(self.local(one.name)), 0.0)
            else:
                self.merge(one.name, one.landing, self._options.alpha)
        self._late += any(one.is_late for one in fragment)
        self._under_way.discard(number)

    def synchronize(self) -> None:
        """Waits for all that is under way, which is merged when its time comes."""
        self._land()

    def take_global(self) -> None:
        """The local weights become the global ones. Waits for what is under way, which is merged by that. RuntimeError
        on all workers if some have taken more steps than others; with a quorum all count as many as the one that has
        taken most."""
        self._agree_on_steps("take_global()")
        self._take_global()

    def _take_global(self) -> None:
        self._land()
        self._take_all()
        for number in self._under_way:
            self._shares.end_exchange(number)
        self._under_way.clear()
        self._shares.forget()

    def broadcast(self) -> None:
        """Rank 0's local weights become the global ones, and all workers' local ones: on every worker at the same
        point. Momentum stays."""
        if self._has_quorum:  # what is under way is not merged into what the script has loaded
            self._gather()
            self._agree_on_most_steps("broadcast()")
        self._land()
        self._session.barrier("broadcast() or load_state_dict()")  # or a late worker would get this value too early
        self._share(self.local)
        self._take_global()

    def _first(self, name: str) -> Any:
        saved = self._session.first_value(self._globals[name].key)
        return self.local(name) if saved is None else saved

    def _share(self, first: Callable[[str], Any]) -> None:
        """Rank 0's become the global values, and this worker's."""
        for name, one in self._globals.items():
            one.init(first(name))
        for one in self._globals.values():
            one.land()
        if self._has_quorum:  # whose rounds wait for nobody: a late worker would get what others have trained since
            self._session.barrier("LocalSteps, broadcast() or load_state_dict()")

    def stats(self) -> Dict[str, float]:
        """step: that this worker has taken; merges: of fragments; waits: how many of them had to wait for the value,
        and waited_s: how long, together; late: how many were of differences that missed their round, with a quorum;
        under_way: fragments that were sent and not merged yet."""
        made = {"step": self.steps_taken, "merges": self._merges, "waits": self._waits, "waited_s": self._waited_s,
                "late": self._late, "under_way": len(self._under_way)}  # fmt: skip
        return {name: float(value) for name, value in made.items()}

    def values(self) -> Dict[str, np.ndarray]:
        """The global weights by name, which later rounds write to. Waits for what is under way."""
        self._land()
        return {name: one.landing for name, one in self._globals.items()}

    # Saved and loaded

    def outer_state(self) -> Dict[str, Any]:
        """The schedule's position, global values and outer momentum: plain numbers, strings and arrays. Any worker may
        call it alone; with a quorum all do, at the same point. Waits for what is under way, and for the servers."""
        if self._has_quorum:
            self._meet()
            self._require_same_steps("state_dict()")
        published = {name: value.copy() for name, value in self.values().items()}
        changed = {name: one for name, one in self._globals.items() if one.updates}
        momenta = {name: np.empty_like(published[name]) for name in changed if self._options.outer.momentum > 0}
        exact = {name: np.empty_like(published[name]) for name, one in changed.items() if one.lands_changes}
        parts = [(changed[name].key, _MOMENTUM, array) for name, array in momenta.items()]
        states.fetch(self._session, parts + [(changed[name].key, MASTER, array) for name, array in exact.items()])
        if self._has_quorum:  # or who comes late would get the momentum of rounds that others have closed since
            self._session.barrier("state_dict()")
        updates = {name: one.updates for name, one in self._globals.items()}
        arrays = {"global": published, "exact": exact, "momentum": momenta}
        return {**self._position(), "updates": updates, **arrays}

    def load_outer_state(self, content: Optional[Mapping[str, Any]], load: Callable[[], Any] = lambda: None) -> None:
        """On every worker at the same point; the values are rank 0's. `load`: what the front end has to load besides;
        of None it loads that alone. ValueError on all workers if one has a state of another model, or of another step
        than the others, and nothing is loaded; or if `load` fails on one, and no global value is."""
        of = "load_state_dict()"
        if self._has_quorum:
            self._gather()
        with self._together.failing(of):
            content = None if content is None else self._fitting(content)
            step = _PLAIN_STATE if content is None else int(content["step"])
        self._require_same_state(of, step)
        with self._together.failing(of):
            load()
        if content is None:
            if self._has_quorum:
                self._take_in_all()
            return
        self._land()
        self._session.barrier(of)  # or who is late would save the new values
        for name, one in self._globals.items():
            one.init(content["global"][name])
        self._land()
        for _ in states.between_barriers(self._session, of):
            self._give_states(content)
        self._go_on(content)

    def _fitting(self, content: Mapping[str, Any]) -> Dict[str, Any]:
        """With NumPy arrays. ValueError if it is of another model."""
        of = "the state of LocalSteps"
        for part in ("global", "updates"):
            self._require_names(content[part], of)
        for part in ("exact", "momentum"):
            self._require_names({**self._globals, **content[part]}, of)
        arrays = {part: {name: np.asarray(self.as_array(array), self._globals[name].landing.dtype, order="C")
                         for name, array in content[part].items()} for part in ARRAYS}  # fmt: skip
        for part in ARRAYS:
            for name, array in arrays[part].items():
                saved, here = tuple(array.shape), self._globals[name].landing.shape
                if saved != here:
                    raise ValueError("%s is of another model: there %s has the shape %s, here %s"
                                     % (of, name, saved, here))  # fmt: skip
        return {**content, **arrays}

    def _require_names(self, found: Mapping[str, Any], of: str) -> None:
        odd = sorted(found.keys() ^ self._globals.keys())
        if odd:
            raise ValueError("%s is of another model: %s is in one of them only" % (of, odd[0]))

    def _require_same_state(self, of: str, step: int) -> None:
        other = self._together.another(step, "for other workers in %s" % of)
        if other is not None:
            has = ["the plain optimizer's" if one == _PLAIN_STATE else "of step %d" % one for one in (step, other[1])]
            raise ValueError("%s: %s: this worker's state is %s, and worker %d's %s: load what all workers have saved "
                             "behind the same step" % (self._session.label, of, has[0], other[0], has[1]))  # fmt: skip

    def _go_on(self, saved: Mapping[str, Any]) -> None:
        """Behind the step that has that position. Fragments that were cut otherwise are not merged before their next
        exchange."""
        self.steps_taken = saved["step"]
        is_cut_alike = list(saved["cut"]) == self._cut
        self._under_way = set(saved["under_way"]) if is_cut_alike else set()
        self._shares.go_on(saved.get("samples") if is_cut_alike else None)

    def _position(self) -> Dict[str, Any]:
        return {"step": self.steps_taken, "under_way": sorted(self._under_way), "cut": list(self._cut),
                "samples": self._shares.since}  # fmt: skip

    def _give_states(self, content: Mapping[str, Any]) -> None:
        parts: List[Tuple[Key, int, Any, int]] = []
        for name, one in self._globals.items():
            one.give_updates(content["updates"][name])
            if not states.has_a_say(self._session, one.key):
                continue
            if self._options.outer.momentum > 0 and (one.has_changed or one.updates > 0):
                momentum = content["momentum"].get(name)
                momentum = np.zeros_like(one.landing) if momentum is None else momentum
                parts.append((one.key, _MOMENTUM, momentum, one.updates))  # which counts with a quorum alone
            if one.lands_changes and name in content["exact"]:
                parts.append((one.key, MASTER, content["exact"][name], 0))
        states.give(self._session, parts)

    def keys_to_capture(self) -> List[Key]:
        return [one.key for one in self._globals.values()]

    def own_state(self) -> Dict[str, Any]:
        """What a snapshot cannot have from the servers, but for the local weights, which the front end has."""
        self._require_same_steps("snapshot()")
        self._send_all()
        updates = {name: one.updates_by_now() for name, one in self._globals.items()}
        return {"stores": [self.store], "updates": updates, **self._position()}

    def release(self) -> None:
        """Ends it: the local weights stay as they are, and the servers keep nothing. On every worker at the same
        point."""
        self._agree_on_steps("release()")
        self._land()
        with self._awaiting_others():
            self._shares.finish()
        self._drop()

    # Within

    def _declare(self, name: str, shape: Tuple[int, ...], dtype: str) -> Global:
        staleness = math.inf if self._has_quorum else 0  # nobody waits for anybody, but for a round
        key = self._session.declare(name, shape, dtype, self.store, staleness=staleness)
        return Global(self._session, key, self._options.outer, self._sends_weights)

    def _drop(self) -> None:
        """On every worker, with nothing under way."""
        self._session.release(self._together.store)
        self._session.release(self.store)
        snapshots.remove(self)

    def _land(self) -> None:
        for number in self._under_way:
            with self._awaiting_others():
                self._shares.require_alike(number)  # or who has not weighed would wait for who has, and has failed
        self._send_all()
        self._land_all(self._globals.values())

    def _land_all(self, values: Iterable[Global]) -> None:
        with self._awaiting_others():
            for one in values:
                one.land()

    def _meet(self) -> None:
        """With a quorum, on every worker at the same point: after it all have the same global weights, and all that was
        under way is merged."""
        self._gather()
        self._take_in_all()

    def _gather(self) -> None:
        """The same, and nothing is merged. Waits for all workers, each of which stands aside of what it sends no more,
        so that nobody waits for it who comes later."""
        self._send_all()
        with self._awaiting_others():
            for one in sorted(self._globals.values(), key=lambda one: one.is_pending):
                one.stand_aside()
        self._land_all(self._globals.values())

    def _take_in_all(self) -> None:
        for number in sorted(self._under_way):
            self._take_in(number)

    def _agree_on_steps(self, of: str) -> None:
        """Where all begin anew from the global weights. `of`: the script's call, which all make."""
        if not self._has_quorum:
            return self._require_same_steps(of)
        self._meet()
        self._agree_on_most_steps(of)

    def _agree_on_most_steps(self, of: str) -> None:
        of_all = self._together.numbers(self.steps_taken, "for other workers in %s" % of)
        self.steps_taken = max(of_all.values())

    def _take_all(self) -> None:
        for name, one in self._globals.items():
            self.merge(name, one.landing, 0.0)

    def _require_alike(self, names: Sequence[str]) -> None:
        """Or workers would wait for fragments that others send at other times."""
        own = {**self._options.numbers, _ORDER: zlib.crc32("\0".join(names).encode())}
        values = np.array(list(own.values()), np.float64)
        key = self._session.declare("schedule", values.shape, "float64", self._together.store)
        of_rank_0 = waiting.from_rank_0(self._session, key, values)
        for (name, here), there in zip(own.items(), of_rank_0):
            if here != there and name == _ORDER:
                raise ValueError("%s: LocalSteps was given weights of other names than worker 0, or in another order, "
                                 "by which fragments are cut: give all workers the same" % self._session.label)
            if here != there:
                raise ValueError("%s: LocalSteps was given %s=%g, and on worker 0 %g: give all workers the same"
                                 % (self._session.label, name, here, there))  # fmt: skip

    def _require_same_steps(self, of: str) -> None:
        """RuntimeError on all workers if some have taken more steps than others: not all have sent the same weights.
        `of`: the script's call, which all make. Waits for all workers."""
        own = self.steps_taken
        what = "for other workers in %s, who take as many steps before: this one has taken %d" % (of, own)
        other = self._together.another(own, what)
        if other is not None:
            raise RuntimeError(
                "%s: %s: this worker has taken %d steps, and worker %d %d. All must call step() equally often, and a "
                "scaler of the loss must leave out the same steps on all (docs/local-steps.md)"
                % (self._session.label, of, own, *other))  # fmt: skip

    def _require_same_bits(self, fragment: Sequence[Global]) -> None:
        """P3_CHECK: RuntimeError if another worker's global values differ. Waits for all workers."""
        values = (one.landing if one in fragment else b"" for one in self._globals.values())
        self._digests.require_same(values, "behind step %d the workers' global weights" % self.steps_taken)
