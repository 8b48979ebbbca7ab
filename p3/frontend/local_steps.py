"""Local steps: every worker trains by itself, and only now and then they exchange what has become of their weights.

DiLoCo (arXiv 2311.08105) and, in fragments that overlap with training, Streaming DiLoCo (arXiv 2501.18512). For each
weight there is a global value, the same on all workers, which the servers keep. When its fragment is due
(fragments.py), a worker sends what says how far its local weight is from that; the servers average, take a step of the
outer optimizer, and send the new global value. `delay` steps later each worker merges it:

    local = alpha * local + (1 - alpha) * global

Without compression the local weight itself is sent, from which the servers take the difference ("outer_sgd" of their
rules): so with an outer learning rate of 1 and no momentum the global value is the workers' mean, to the bit. With
compression it is global - local, as the codecs encode what is small, and keep what they leave out ("torch_sgd").

Each weight is a key of its own, with one round for each exchange. Urgency goes by rounds first, so priorities are the
deadlines: of what waits to leave, the fragment that training needs first goes first.
"""

from __future__ import annotations

import math
import numbers
import time
import zlib
from abc import abstractmethod
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

import numpy as np

from p3._core import MASTER
from p3.codecs import Ways
from p3.frontend import snapshots, states, waiting
from p3.frontend.fragments import Schedule, packed
from p3.frontend.rounds import KeyRounds, Round
from p3.plan.strategy import Strategy
from p3.settings import Settings
from p3.worker.key import Key
from p3.worker.session import Session

_MOMENTUM = 1  # the part of a key's state


class Outer(NamedTuple):
    """The servers' optimizer: SGD on the workers' mean difference. The standard values are DiLoCo's."""

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    @classmethod
    def checked(cls, given: Optional[Mapping[str, Any]]) -> Outer:
        """What is not given is standard. ValueError, which names the field, for what there is not."""
        given = {} if given is None else given
        if not isinstance(given, Mapping):
            raise ValueError("outer is %.100r; it must be a dict, as {'lr': 0.7, 'momentum': 0.9}" % (given,))
        for field in given:
            if field not in cls._fields:
                raise ValueError("outer has the field %.100r, which there is not: it may have %s"
                                 % (field, ", ".join(cls._fields)))  # fmt: skip
        outer = cls(**given)
        for field in ("lr", "momentum"):
            value = getattr(outer, field)
            is_number = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
            if not is_number or value < 0 or (field == "lr" and value == 0):
                raise ValueError("the outer %s is %.100r; it must be a number %s" % (
                    field, value, "above 0" if field == "lr" else "of at least 0"))  # fmt: skip
        if not isinstance(outer.nesterov, bool):
            raise ValueError("the outer nesterov is %.100r; it must be True or False" % (outer.nesterov,))
        if outer.nesterov and outer.momentum == 0 and "nesterov" in given:
            raise ValueError("the outer nesterov is True and its momentum 0: give it a momentum, or leave nesterov out")
        return outer._replace(lr=float(outer.lr), momentum=float(outer.momentum))

    def description(self, sends_weights: bool) -> Dict[str, Any]:
        """For the servers (p3/plan/optimizers.py)."""
        nesterov = self.nesterov and self.momentum > 0
        made = {"momentum": float(self.momentum), "nesterov": nesterov, "multi_precision": False}
        return {"name": "outer_sgd", **made} if sends_weights else {
            "name": "torch_sgd", "dampening": 0.0, "maximize": False, **made}  # fmt: skip


def checked_alpha(alpha: Any, delay: int) -> float:
    """How much of the local weight stays in a merge. None: 0.5 with a delay, during which it has moved on; else 0."""
    if alpha is None:
        return 0.5 if delay else 0.0
    if isinstance(alpha, bool) or not isinstance(alpha, numbers.Real) or not 0 <= alpha <= 1:
        raise ValueError("alpha is %.100r; it must be a number from 0, where the global weight takes the local one's "
                         "place, to 1, where the local one stays" % (alpha,))  # fmt: skip
    return float(alpha)


class Global(KeyRounds):
    """One weight's global value: `landing`, which holds it whenever no round is under way."""

    def __init__(self, session: Session, key: Key, outer: Outer, sends_weights: bool) -> None:
        landing = np.empty(key.shape, key.dtype)
        super().__init__(session, key, landing, landing)
        self._outer, self._sends_weights = outer, sends_weights

    def init(self, first: np.ndarray) -> None:
        """Rank 0's value becomes all workers'; waits for nothing."""
        value = first if self._session.rank == 0 else None
        self._under_way = Round(self._session.init(self.key, value, self._array, self.priority), self._take_value)

    def push(self, local: np.ndarray, priority: int) -> None:
        """Begins an exchange; `local` may be written to afterwards. Returns at once."""
        self._make_room()
        self.priority = priority
        sent = np.array(local) if self._sends_weights else np.asarray(self.landing - local)
        scalars = (self._outer.lr, 0.0, self._rescale, self.updates + 1.0, 1.0)
        self._begin(self._session.pushpull(self.key, sent, self._array, priority, *scalars), is_skip=False)
        self.end_step()

    def _new_landing(self) -> Tuple[np.ndarray, np.ndarray]:
        landing = np.empty_like(self.landing)
        return landing, landing

    def _take_value(self, _operation: Any) -> bool:
        return True

    def _take_result(self, _operation: Any) -> None:
        pass


class LocalSteps(snapshots.Trainer):
    """Of one model. A front end says how its local weights are read and written.

    Threads: the script's, one at a time. Errors: those of Session.
    """

    kind = "LocalSteps"

    def __init__(self, session: Session, layers: Sequence[Sequence[str]], schedule: Schedule, outer: Outer,
                 alpha: float, codec: Ways, strided: bool, settings: Settings,
                 strategy: Optional[Strategy] = None) -> None:  # fmt: skip
        """`layers`: the names of the weights of each, in the order of the forward pass. Every worker at the same point;
        returns when all have rank 0's weights, or if the job has resumed each its own (snapshots.resume). ValueError if
        rank 0 was given other numbers than this worker."""
        self._session, self.schedule, self._outer, self._alpha = session, schedule, outer, alpha
        self.step = 0  # that this worker has taken
        self._follows_deadlines = settings.priority != "off"
        self._check_every = settings.check
        self._merges = self._waits = 0
        self._waited_s = 0.0
        self._under_way: Set[int] = set()  # fragments that were sent and not merged yet
        self._sends_weights = codec == Ways()
        self.store, self._control = session.new_store(strategy), session.new_store(strategy)
        self._cut = [*schedule, int(strided)]
        self._require_alike()
        for option, value in codec.options.items():
            session.set_option(self.store, option, value)
        session.set_optimizer(self.store, outer.description(self._sends_weights))
        names = [name for layer in layers for name in layer]
        self._globals = {name: self._declare(name) for name in names}
        sizes = [sum(self._globals[name].landing.nbytes for name in layer) for layer in layers]
        self._fragments = [[self._globals[name] for number in numbers for name in layers[number]]
                           for numbers in packed(sizes, schedule.fragments, strided)]  # fmt: skip
        self._digests = session.declare("digests", (len(names),), "int64", self._control)
        waiting.from_rank_0(session, self._digests, np.zeros(len(names), np.int64))
        self._steps_taken = session.declare("steps taken", (2,), "int64", self._control)
        waiting.from_rank_0(session, self._steps_taken, np.zeros(2, np.int64))

    def begin(self) -> Optional[Dict[str, Any]]:
        """What own_state() gave for the snapshot that the job has resumed from, if it has; else None, and the local
        weights are rank 0's now."""
        resumed = snapshots.add(self._session, self, [self.store])
        for name, one in self._globals.items():
            one.updates = 0 if resumed is None else resumed["updates"][name]
            first = self._session.first_value(one.key)
            one.init(self.local(name) if first is None else first)
        self._land()
        for one in self._globals.values():
            self._session.restore(one.key, takes_mean=True)
        if resumed is None:
            self._take_all()
        else:
            self._go_on(resumed)
        return resumed

    # What a front end does

    @abstractmethod
    def shape_and_type(self, name: str) -> Tuple[Tuple[int, ...], Any]:
        """Of the weight's global value."""

    @abstractmethod
    def local(self, name: str) -> np.ndarray:
        """The local weight as it is now, C-ordered and of that shape and type; it is not kept."""

    @abstractmethod
    def merge(self, name: str, value: np.ndarray, alpha: float) -> None:
        """The local weight becomes merged(local, value, alpha). `value` is read during the call alone."""

    # Steps

    def after_step(self) -> None:
        """Behind each step of this worker. Waits only for the values whose deadline this is."""
        self.step += 1
        due, to_merge = self.schedule.due(self.step), self.schedule.merged(self.step)
        if due is not None:  # before anything is waited for
            priority = -self.schedule.deadline(self.step) if self._follows_deadlines else 0
            for one in self._fragments[due]:
                one.push(self.local(one.name), priority)
            self._under_way.add(due)
        if to_merge in self._under_way:
            self._merge(to_merge)

    def _merge(self, number: int) -> None:
        fragment = self._fragments[number]
        began = time.monotonic()
        is_late = any(one.is_pending and not one.has_come for one in fragment)
        try:
            for one in fragment:
                one.land()
        except TimeoutError as error:
            raise TimeoutError("%s. All workers must take the same number of local steps; this one has taken %d"
                               % (error, self.step)) from None  # fmt: skip
        if is_late:
            self._waits += 1
            self._waited_s += time.monotonic() - began
        self._merges += 1
        if self._check_every and self._merges % self._check_every == 0:
            self._require_same_bits(fragment)
        for one in fragment:
            self.merge(one.name, one.landing, self._alpha)
        self._under_way.discard(number)

    def synchronize(self) -> None:
        """Waits for all that is under way, which is merged when its time comes."""
        self._land()

    def take_global(self) -> None:
        """The local weights become the global ones. Waits for what is under way, which is merged by that. RuntimeError
        on all workers if some have taken more steps than others."""
        self._require_same_steps("take_global()")
        self._take_global()

    def _take_global(self) -> None:
        self._land()
        self._take_all()
        self._under_way.clear()

    def broadcast(self) -> None:
        """Rank 0's local weights become the global ones, and all workers' local ones: on every worker at the same
        point. Momentum stays."""
        self._land()
        self._session.barrier("broadcast() or load_state_dict()")  # or a late worker would get this value too early
        for name, one in self._globals.items():
            one.init(self.local(name))
        self._take_global()

    def stats(self) -> Dict[str, float]:
        """step: that this worker has taken; merges: of fragments; waits: how many of them had to wait for the value,
        and waited_s: how long, together; under_way: fragments that were sent and not merged yet."""
        made = {"step": self.step, "merges": self._merges, "waits": self._waits, "waited_s": self._waited_s,
                "under_way": len(self._under_way)}  # fmt: skip
        return {name: float(value) for name, value in made.items()}

    def values(self) -> Dict[str, np.ndarray]:
        """The global weights by name, which later rounds write to. Waits for what is under way."""
        self._land()
        return {name: one.landing for name, one in self._globals.items()}

    # Saved and loaded

    def outer_state(self) -> Dict[str, Any]:
        """The schedule's position, global values and outer momentum: plain numbers, strings and arrays. Any worker may
        call it alone. Waits for what is under way, and for the servers."""
        published = {name: value.copy() for name, value in self.values().items()}
        changed = {name: one for name, one in self._globals.items() if one.updates}
        momenta = {name: np.empty_like(published[name]) for name in changed if self._outer.momentum > 0}
        exact = {name: np.empty_like(published[name]) for name, one in changed.items() if one.lands_changes}
        parts = [(changed[name].key, _MOMENTUM, array) for name, array in momenta.items()]
        states.fetch(self._session, parts + [(changed[name].key, MASTER, array) for name, array in exact.items()])
        updates = {name: one.updates for name, one in self._globals.items()}
        arrays = {"global": published, "exact": exact, "momentum": momenta}
        return {**self._position(), "updates": updates, **arrays}

    def load_outer_state(self, content: Mapping[str, Any]) -> None:
        """On every worker at the same point; the values are rank 0's. ValueError if it is of another model."""
        self.require_state_fits(content)
        self._land()
        with states.between_barriers(self._session, "load_state_dict()"):
            for name, one in self._globals.items():
                one.init(np.ascontiguousarray(content["global"][name], one.landing.dtype))
            self._land()
            self._give_states(content)
        self._go_on(content)

    def require_state_fits(self, content: Mapping[str, Any]) -> None:
        """ValueError unless load_outer_state() can take it; nothing is loaded."""
        if content["global"].keys() != self._globals.keys():
            odd = sorted(content["global"].keys() ^ self._globals.keys())
            raise ValueError("the state of LocalSteps is of another model: %s is in one of them only" % odd[0])
        for part in ("global", "exact", "momentum"):
            for name, array in content[part].items():
                saved, here = tuple(array.shape), self._globals[name].landing.shape
                if saved != here:
                    raise ValueError("the state of LocalSteps is of another model: there %s has the shape %s, here %s"
                                     % (name, saved, here))  # fmt: skip

    def _go_on(self, saved: Mapping[str, Any]) -> None:
        """Behind the step that has that position. Fragments that were cut otherwise are not merged before their next
        exchange."""
        self.step = saved["step"]
        self._under_way = set(saved["under_way"]) if list(saved["cut"]) == self._cut else set()

    def _position(self) -> Dict[str, Any]:
        return {"step": self.step, "under_way": sorted(self._under_way), "cut": list(self._cut)}

    def _give_states(self, content: Mapping[str, Any]) -> None:
        parts: List[Tuple[Key, int, Any, int]] = []
        for name, one in self._globals.items():
            had_updates, one.updates = one.updates > 0, content["updates"][name]
            if not states.has_a_say(self._session, one.key):
                continue
            if self._outer.momentum > 0 and (had_updates or one.updates > 0):
                momentum = content["momentum"].get(name)
                parts.append((one.key, _MOMENTUM, np.zeros_like(one.landing) if momentum is None else momentum, 0))
            if one.lands_changes and name in content["exact"]:
                parts.append((one.key, MASTER, content["exact"][name], 0))
        states.give(self._session, parts)

    def keys_to_capture(self) -> List[Key]:
        return [one.key for one in self._globals.values()]

    def own_state(self) -> Dict[str, Any]:
        """What a snapshot cannot have from the servers, but for the local weights, which the front end has."""
        self._require_same_steps("snapshot()")
        updates = {name: one.updates_by_now() for name, one in self._globals.items()}
        return {"stores": [self.store], "updates": updates, **self._position()}

    def release(self, why: str = "") -> None:
        """Ends it: the local weights stay as they are, and the servers keep nothing. On every worker at the same
        point."""
        self._require_same_steps("release()")
        self._land()
        self._session.release(self._control)
        self._session.release(self.store)
        snapshots.remove(self)

    # Within

    def _declare(self, name: str) -> Global:
        shape, dtype = self.shape_and_type(name)
        key = self._session.declare(name, shape, dtype, self.store)
        return Global(self._session, key, self._outer, self._sends_weights)

    def _land(self) -> None:
        for one in self._globals.values():
            one.land()

    def _take_all(self) -> None:
        for name, one in self._globals.items():
            self.merge(name, one.landing, 0.0)

    def _require_alike(self) -> None:
        """Or workers would wait for fragments that others send at other times."""
        own = np.array([*self._cut, self._alpha], np.float64)
        key = self._session.declare("schedule", own.shape, "float64", self._control)
        of_rank_0 = waiting.from_rank_0(self._session, key, own)
        for name, here, there in zip(("every", "fragments", "delay", "strided", "alpha"), own, of_rank_0):
            if here != there:
                raise ValueError("%s: LocalSteps was given %s=%g, and on worker 0 %g: give all workers the same"
                                 % (self._session.label, name, here, there))  # fmt: skip

    def _require_same_steps(self, of: str) -> None:
        """RuntimeError on all workers if some have taken more steps than others: not all have sent the same weights.
        `of`: the script's call, which all make. Waits for all workers."""
        own = np.array([self.step, self.step**2], np.int64)
        total = np.empty_like(own)
        what = "for other workers in %s, who take as many steps before: this one has taken %d" % (of, self.step)
        self._session.wait([self._session.pushpull(self._steps_taken, own, total)], what)
        workers, (steps, squares) = self._session.num_workers, total.tolist()
        if squares * workers != steps**2:  # equal only where all are
            raise RuntimeError(
                "%s: %s: this worker has taken %d steps, and all %d workers together %d. They must call "
                "optimizer.step() equally often, and a GradScaler must skip the same steps on all "
                "(docs/local-steps.md)" % (self._session.label, of, self.step, workers, steps))  # fmt: skip

    def _require_same_bits(self, fragment: Sequence[Global]) -> None:
        """P3_CHECK: RuntimeError if another worker's global values differ. Waits for all workers."""
        members = {one.name for one in fragment}
        own = np.array([zlib.crc32(one.landing) if name in members else 0 for name, one in self._globals.items()])
        total = np.empty_like(own)
        what = "for the digests of other workers (P3_CHECK), which take the same steps"
        self._session.wait([self._session.pushpull(self._digests, own, total)], what)
        is_same = total == own * self._session.num_workers
        differing = [name for name, same in zip(self._globals, is_same) if not same]
        if differing:
            raise RuntimeError("%s: behind step %d the workers' global weights differ, in %s"
                               % (self._session.label, self.step, ", ".join(differing)))  # fmt: skip


def merged(local: Any, value: Any, alpha: float) -> Any:
    """Of arrays or tensors. With an alpha of 0 it is the value, whatever the local weight is. Of equal ones it is that,
    to the bit."""
    return value if alpha == 0 else local if alpha == 1 else local + (1 - alpha) * (value - local)
