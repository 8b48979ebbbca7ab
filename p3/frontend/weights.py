"""The weights of one model as NumPy arrays, for a framework whose steps are functions of them, as JAX's are.

    weights = Weights(session, first, optimizer)  # first: {name: array}; rank 0's are all workers'
    for batch in batches:
        ... weights["w"] ...                      # where the forward pass needs it: waits for its new value
        weights.push("w", gradient, lr)           # where the backward pass has computed it
        weights.end_step(lr)
    weights.join()                                # if workers have other numbers of batches

The servers update; gradients are averaged over the workers. The order in which a step reads the weights gives the
priorities of their gradients.
"""

from __future__ import annotations

import os
from typing import Any, Callable, Dict, List, Mapping, Union

import numpy as np

from p3.frontend import snapshots
from p3.frontend.compression import Compression, Given
from p3.frontend.order import Order
from p3.frontend.rounds import KeyRounds, Round, let_servers_divide
from p3.frontend.steps import Count, Steps
from p3.plan import choices, combinations
from p3.plan import strategy as strategies
from p3.settings import Settings
from p3.worker.key import Key
from p3.worker.session import Session


class Weights(snapshots.Trainer):
    """Threads: the script's, one at a time. Errors: those of Session; KeyError for a name that there is not."""

    kind = "set of weights"

    def __init__(
        self, session: Session, first: Mapping[str, Any], optimizer: Dict[str, Any],
        compression: Given = None, staleness: Union[int, float] = 0, strategy: strategies.Given = None,
    ) -> None:  # fmt: skip
        """On every worker at the same point. Returns when all have rank 0's values, or if the job has resumed
        (snapshots.resume) those of the snapshot.

        `first`: arrays by name, of any shape and of a type that P3 can train; names, shapes and types are the same on
        every worker. `optimizer`: one of the torch_* of p3/plan/optimizers.py, whose corrections the servers make.
        `compression`: as of p3.codecs.Ways, but not lowrank; or a function of name and shape. `staleness`: see
        Session.declare. `strategy`: which servers hold what of them, as p3.plan.strategy.given() takes it.
        """
        if not str(optimizer.get("name")).startswith("torch_"):
            raise ValueError("the optimizer is %r; it must be a torch_* of p3.plan.optimizers" % (optimizer,))
        self._session, self._staleness, self._compression = session, staleness, Compression(compression)
        settings = Settings.from_env(os.environ)
        combinations.require("weights", choices.of_optimizer(optimizer), *choices.of_strategy(settings.strategy))
        plan = strategies.given(strategy)
        if plan is not None:
            plan.require(session.num_servers, first)
        self._compression = self._compression.planned(session.strategy() if plan is None else plan)
        self._store, control = session.new_store(plan, "weights"), session.new_store(plan, "steps")
        for option, value in self._compression.of_store.options.items():
            session.set_option(self._store, option, value)
        session.set_optimizer(self._store, optimizer)
        let_servers_divide(session, self._store)
        self._weights = {name: self._declare(name, first[name]) for name in first}
        for place, one in enumerate(self._weights.values()):
            one.priority = -place if settings.priority != "off" else 0  # until a step gives another
        self._order = Order(session, self._store) if settings.priority == "auto" else None
        self._used: Dict[str, None] = {}  # in this step, by first use
        self._steps = Steps(session, control)
        resumed = snapshots.add(session, self, [self._store])
        if resumed is not None and resumed["updates"].keys() != self._weights.keys():
            raise ValueError("the weights have the names %s; what they resume from has %s"
                             % (sorted(self._weights), sorted(resumed["updates"])))  # fmt: skip
        for name, one in self._weights.items():
            one.updates = 0 if resumed is None else resumed["updates"][name]
            one.init(np.ascontiguousarray(first[name]))
        self.land()
        for one in self._weights.values():
            session.restore(one.key, takes_mean=True)

    def _declare(self, name: str, first: Any) -> _Weight:
        first = np.asarray(first)
        own = self._compression.options_of(name, first.shape)
        rounds = self._compression.strategy.rounds(name, self._staleness or None)
        key = self._session.declare(name, first.shape, first.dtype, self._store, False, rounds, own)
        return _Weight(self._session, key, first.dtype)

    def __getitem__(self, name: str) -> np.ndarray:
        """Its new value, in memory that later values are written to: copy what you keep. Waits for it; with staleness
        for no more than that asks for."""
        one = self._weights[name]
        one.renew_for_step()
        self._used.setdefault(name)
        return one.value

    def push(self, name: str, gradient: Any, lr: float, wd: float = 0.0) -> None:
        """Sends this worker's gradient, an array of the weight's shape and type, to which nobody writes before the
        weight has its next value. At most once in a step; returns at once. `lr` and `wd` are the same everywhere."""
        one = self._weights[name]
        if one.is_new:
            raise ValueError("%s has a gradient in this step already: call end_step() before the next" % name)
        self._follow_order()
        one.push(np.ascontiguousarray(gradient), lr, wd)

    def end_step(self, lr: float, wd: float = 0.0) -> None:
        """Behind the step's last push, on every worker. A gradient that it has not pushed counts as zero."""
        self._follow_order()
        for one in self._weights.values():
            if not one.is_new:
                one.skip()
            one.end_step()
        self._used.clear()
        self._steps.count(lr, wd)

    def land(self) -> None:
        """Waits for all new values."""
        for one in self._weights.values():
            one.land()

    def join(self, after_step: Callable[[], Any] = lambda: None) -> None:
        """For a worker that has no batches left: returns when every worker has called it. Until then the others' steps
        go on without its gradients; `after_step` is called after each of them."""

        def follow(_count: Count) -> None:
            self.land()
            after_step()

        self.land()
        self._steps.serve_others(self._weights.values(), follow)

    def _follow_order(self) -> None:
        """At a step's first gradient the forward pass is over, and its order is known."""
        if self._order is None or any(one.is_new for one in self._weights.values()):
            return
        if self._order.follow(list(self._used)):
            for name, one in self._weights.items():
                one.priority = -self._order.place(name, len(self._weights))

    def keys_to_capture(self) -> List[Key]:
        return [one.key for one in self._weights.values()]

    def rest(self) -> None:
        self.land()
        self._steps.finish()

    def own_state(self) -> Dict[str, Any]:
        updates = {name: one.updates_by_now() for name, one in self._weights.items()}
        return {"stores": [self._store], "updates": updates}


class _Weight(KeyRounds):
    def __init__(self, session: Session, key: Key, dtype: np.dtype) -> None:
        landing, self.value = np.empty(key.shape, dtype), np.empty(key.shape, dtype)
        super().__init__(session, key, landing, landing)

    def init(self, first: np.ndarray) -> None:
        """Rank 0's first value, or the snapshot's. Waits for nothing."""
        value = self._session.first_value(self.key)
        if value is None and self._session.is_first:
            value = first
        self._under_way = Round(self._session.init(self.key, value, self._array, self.priority), self._take_value)

    def push(self, gradient: np.ndarray, lr: float, wd: float) -> None:
        self._make_room()
        if (gradient.shape, gradient.dtype) != (self.value.shape, self.value.dtype):
            raise ValueError(
                "the gradient of %s has shape %s and type %s; the weight has %s and %s"
                % (self.name, gradient.shape, gradient.dtype, self.value.shape, self.value.dtype)
            )
        counted = (0.0, 0.0) if self._is_stale else (self.updates + 1.0, 1.0)  # with staleness by the servers
        scalars = (lr, wd, self._rescale, *counted)
        operation = self._session.pushpull(self.key, gradient, self._array, self.priority, *scalars)
        self._begin(operation, is_skip=False)

    def _take_value(self, _operation: Any) -> bool:
        self._take_result(_operation)
        return True

    def _take_result(self, _operation: Any) -> None:
        np.copyto(self.value, self.landing)
