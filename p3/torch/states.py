"""An optimizer's state between the servers and torch: in the layout of torch's state_dict, which plain torch loads."""

from __future__ import annotations

from typing import Any, Dict, Iterable

import torch

from p3.frontend import states as states_of_servers
from p3.plan import choices, combinations
from p3.torch import rules
from p3.torch.parameters.arrays import in_memory_order, like, master_type
from p3.torch.parameters.parameter import Parameter
from p3.worker.session import Session

States = Dict[torch.Tensor, Dict[str, Any]]  # as torch.optim.Optimizer.state


def taken(optimizer: torch.optim.Optimizer) -> States:
    """What the optimizer has; its own becomes empty, as from here on the servers have it."""
    states = {tensor: dict(state) for tensor, state in optimizer.state.items() if state}
    optimizer.state.clear()
    return states


def fetch(session: Session, parameters: Iterable[Parameter]) -> States:
    """As torch would hold it now. Waits for the servers. Any worker may call it alone."""
    parts, states, parameters = [], {}, list(parameters)
    for parameter in parameters:
        if parameter.takes_steps:
            continue  # its momentum is on each worker
        kept = rules.state_of(parameter.description)
        if parameter.unread_state:
            states[parameter.tensor] = dict(parameter.unread_state)
        if parameter.updates == 0:
            if parameter.description["name"] == "torch_adagrad":  # which has its state from the beginning
                states[parameter.tensor] = {"step": torch.tensor(0.0, device="cpu"), "sum": _initial(parameter)}
            continue
        state = states.setdefault(parameter.tensor, {})
        if kept.counts:
            state["step"] = torch.tensor(float(parameter.updates), device="cpu")
        for part, name in enumerate(kept.arrays, 1):
            if name in parameter.lacks:
                continue
            array = torch.empty_like(parameter.tensor, dtype=_dtype(parameter), device="cpu", requires_grad=False)
            state[name] = array
            parts.append((parameter.state_key, part, in_memory_order(array)))
    states_of_servers.fetch(session, parts)
    for parameter in parameters:
        if parameter.key.staleness > 0 and "step" in states.get(parameter.tensor, ()):
            states[parameter.tensor]["step"].fill_(session.updates(parameter.key))
    for tensor, state in states.items():
        for name, array in state.items():
            if name != "step" and isinstance(array, torch.Tensor):
                state[name] = array.to(tensor.device, tensor.dtype)
    return states


def give(session: Session, parameters: Iterable[Parameter], states: States) -> None:
    """Makes it the servers' state, before the parameters' next round; on every worker. A parameter that `states` has
    nothing of begins anew, as in torch. ValueError if it is no state of these parameters."""
    parts = []
    for parameter in parameters:
        state = states.get(parameter.tensor, {})
        if parameter.takes_steps:
            _require_no_momentum(parameter, state)
            continue
        kept = rules.state_of(parameter.description)
        read = {"step", *kept.arrays}
        parameter.unread_state = {name: value for name, value in state.items() if name not in read}
        given = [name for name in kept.arrays if isinstance(state.get(name), torch.Tensor)]
        missing = tuple(name for name in kept.arrays if name not in given)
        unread = rules.unread_states(parameter.description, parameter.fields)
        if given and not set(missing) <= set(unread):
            raise ValueError("the state of %s has no %s: it is of an optimizer with other settings"
                             % (parameter.name, ", ".join(name for name in missing if name not in unread)))  # fmt: skip
        if not given:
            parameter.give_updates(0)
            arrays = [_initial(parameter)] * len(kept.arrays)
        else:
            parameter.lacks = missing
            parameter.give_updates(int(state["step"]) if kept.counts else 1)  # SGD: the momentum has begun
            arrays = [
                _initial(parameter) if name in missing
                else like(parameter.tensor, state[name].to("cpu", _dtype(parameter)))
                for name in kept.arrays
            ]  # fmt: skip
        key = parameter.state_key
        if not states_of_servers.has_a_say(session, key):
            continue
        if parameter.has_changed or any(not array.equal(_initial(parameter)) for array in arrays):
            parts += [(key, part, in_memory_order(array), parameter.updates) for part, array in enumerate(arrays, 1)]
    states_of_servers.give(session, parts)


def _require_no_momentum(parameter: Parameter, state: Dict[str, Any]) -> None:
    if state:
        combinations.require("parameter %s" % parameter.name, choices.DGC, choices.STATE_FILES.said("with a momentum"))
    if parameter.updates > 0:
        raise ValueError(
            "the state has no momentum of %s, but dgc keeps one on each worker, and cannot begin anew: load an "
            "optimizer's state before the first step" % parameter.name
        )


def _initial(parameter: Parameter) -> torch.Tensor:
    """What the arrays of its state are before the first update."""
    first = parameter.description.get("initial_accumulator_value", 0.0)  # of Adagrad
    return torch.full_like(parameter.tensor, first, dtype=_dtype(parameter), device="cpu", requires_grad=False)


def _dtype(parameter: Parameter) -> torch.dtype:
    return master_type(parameter.tensor)
