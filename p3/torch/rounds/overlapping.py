"""Steps that wait for nothing: each parameter is updated when its module needs the new value.

On the servers, where they have the optimizer with torch's arithmetic; else on the workers, from the mean gradient.
"""

from __future__ import annotations

import operator
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence

import torch

from p3._core import MASTER
from p3.frontend import states as states_of_servers
from p3.frontend.rounds import let_servers_divide
from p3.plan import choices, combinations
from p3.plan.strategy import Strategy
from p3.torch import rules, states
from p3.torch.live import LiveGroups
from p3.torch.parameters.arrays import in_memory_order
from p3.torch.parameters.parameter import Parameter, as_now
from p3.torch.rounds.rounds import Rounds
from p3.torch.rounds.updates import Updates


class Overlapping(Rounds):
    """Of an optimizer that updates each parameter by itself, on every worker."""

    _joins_updates = True  # of several parameters, into one step of the optimizer

    def __init__(self, optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        self._updates = Updates(optimizer, self._update, self._joins_updates)
        self._coming: List[Parameter] = []  # of the last step, what the forward pass needs last to first
        super().__init__(optimizer, *arguments)

    def _has_rows(self, tensor: torch.Tensor, group: Dict[str, Any]) -> bool:
        return tensor in self._sparse

    def _step(self, closure: Optional[Callable]) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._complete_round()
        self._leave_step()
        return loss

    def _leave_step(self) -> None:
        """All of its rounds have begun. ValueError if one of them is not as it must be: then none is taken over."""
        for parameter in self._parameters.values():
            parameter.require_as_sent(awaits_mean=False)
        groups = self._optimizer.param_groups if self._updates_here else ()
        groups_then = {id(group): as_now(group) for group in groups}
        for parameter in self._parameters.values():
            parameter.end_step(groups_then.get(id(parameter.group)))
            parameter.tensor.grad = None  # it belongs to P3 until it has left
            parameter.leave_pending()
        if self._joins_updates:
            coming = [one for one in self._parameters.values() if self._updates.may_join(one, one.group)]
            self._coming = sorted(coming, key=operator.attrgetter("priority"))
        self._end_step()

    def show_gradients(self) -> None:
        raise ValueError("this optimizer waits for no mean gradients: pass synchronous=True to DistributedOptimizer")

    def synchronize(self) -> None:
        self._land()
        for parameter in self._watch.on_host:
            parameter.watch()  # now the script may write to it

    def _follow(self) -> None:
        self._land()

    def _update_one(self, parameter: Parameter, gradient: torch.Tensor, group: Dict[str, Any]) -> bool:
        return self._updates.make(parameter, gradient, group)

    def _renew(self, parameters: Iterable[Parameter], for_step: bool) -> None:
        if not self._coming and not any(one.is_pending for one in parameters):
            return super()._renew(parameters, for_step)
        with self._updates.gathered():
            super()._renew(parameters, for_step)
            while self._coming and (self._coming[-1].has_come or not self._coming[-1].is_pending):
                self._coming.pop().renew()

    def _land(self) -> None:
        with self._updates.gathered():
            super()._land()

    def with_states(self, state_dict: Callable[[], Dict[str, Any]]) -> Dict[str, Any]:
        self._comparisons.finish()
        self._land()
        return state_dict()


class OnServers(Overlapping):
    """Of an optimizer that the servers have: they have its states, too."""

    _updates_here = _joins_updates = False
    _update_one = None  # type: ignore[assignment]
    _exact: Sequence[Parameter] = ()  # have exact weights, not those that all compute with
    _live: LiveGroups  # once it is described
    _loaded: Optional[states.States]  # what the servers' state has to become before the next round

    def _start(self, resumed: Optional[Dict[str, Any]]) -> None:
        taken = states.taken(self._optimizer)
        self._loaded = taken if resumed is None else None
        is_on_trial = self._session.entrance.is_on_trial
        super()._start(resumed)
        if resumed is not None and not is_on_trial:
            self._begin()  # or who asks for states or exact weights before the first step would get none
            self._control.wait_for_rank_0()  # which brings them back, if the servers have not done that themselves

    def _choose_reduction(self) -> None:
        for store in self._stores:
            let_servers_divide(self._session, store)  # else the update does, by the number of workers

    def _has_rows(self, tensor: torch.Tensor, group: Dict[str, Any]) -> bool:
        return super()._has_rows(tensor, group) and rules.updates_rows_alone(rules.describe(self._kind, group), group)

    def _describe(self) -> List[Optional[Dict[str, Any]]]:
        groups = self._optimizer.param_groups
        descriptions = [rules.describe(self._kind, group) for group in groups]
        self._live = LiveGroups(self._kind, descriptions, groups)
        return descriptions

    def _look_at_groups(self) -> None:
        self._live.look(self._optimizer.param_groups, self._parameters.__getitem__)

    def _before_push(self) -> None:
        self._live.look_once(self._optimizer.param_groups, self._parameters.__getitem__)

    def _end_step(self) -> None:
        self._live.end_step()
        super()._end_step()

    def take_exact_weights(self) -> None:
        parts = [
            (one, torch.empty_like(one.tensor, device="cpu", requires_grad=False))
            for one in self._parameters.values()
            if one.comes_back_compressed and (one.has_changed or one.updates > 0)
        ]
        states_of_servers.fetch(self._session, [(one.key, MASTER, in_memory_order(array)) for one, array in parts])
        for parameter, array in parts:
            parameter.show(array)
        self._exact = [parameter for parameter, _ in parts]

    def _renew(self, parameters: Iterable[Parameter], for_step: bool) -> None:
        if for_step and self._exact:
            self._show_published()
        Rounds._renew(self, parameters, for_step)

    def _show_published(self) -> None:
        """Gradients are of these: others have no exact ones, nor has a job that resumes."""
        for parameter in self._exact:
            parameter.show(parameter.landing)
        self._exact = ()

    def rest(self) -> None:
        super().rest()
        self._show_published()

    def change_strategy(self, strategy: Optional[Strategy]) -> None:
        rules_there = [choices.of_optimizer(rules.describe(self._kind, one)) for one in self._optimizer.param_groups]
        stale = choices.of_staleness(self._staleness)
        combinations.require("change_strategy()", choices.RECUT, stale, *rules_there)

    def _give_loaded(self) -> None:
        if self._loaded is not None:
            states.give(self._session, self._parameters.values(), self._loaded)
            if self._staleness > 0:  # a push of another worker would update without, and be lost to it
                self._control.wait_for_rank_0()
        self._loaded = None

    def _make_states(self) -> None:
        pass  # state_dict() has them from the servers

    def _own_weights(self) -> Dict[str, Any]:
        return {}

    def _states(self) -> states.States:
        """Waits for the servers."""
        return states.fetch(self._session, self._parameters.values()) if self._has_begun else self._loaded or {}

    def _bring_states_back(self) -> None:
        self._optimizer.state.update(self._states())

    def with_states(self, state_dict: Callable[[], Dict[str, Any]]) -> Dict[str, Any]:
        self._comparisons.finish()
        self._land()
        optimizer = self._optimizer
        optimizer.state.update(self._states())
        try:
            return state_dict()
        finally:
            optimizer.state.clear()

    def load(self, load_state_dict: Callable[[Dict[str, Any]], None], content: Dict[str, Any]) -> None:
        super().load(load_state_dict, content)
        self._loaded = loaded = states.taken(self._optimizer)
        if self._has_begun:
            self._begin()
            self._live.end_step()  # what follows is a step's beginning, which may set other numbers
            for _ in states_of_servers.between_barriers(self._session, "load_state_dict() of the optimizer"):
                self._loaded = loaded
                self._give_loaded()
