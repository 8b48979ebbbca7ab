"""An optimizer's state between the servers and torch: in the layout of torch's state_dict, which plain torch loads."""

from __future__ import annotations

from typing import Any, Dict, Iterable

import torch

from p3.torch import rules
from p3.torch.arrays import like
from p3.torch.parameter import Parameter
from p3.worker.session import Session

States = Dict[torch.Tensor, Dict[str, Any]]  # as torch.optim.Optimizer.state


def taken(optimizer: torch.optim.Optimizer) -> States:
    """What the optimizer has; its own becomes empty, as from here on the servers have it."""
    states = {tensor: dict(state) for tensor, state in optimizer.state.items() if state}
    optimizer.state.clear()
    return states


def fetch(session: Session, parameters: Iterable[Parameter]) -> States:
    """As torch would hold it now. Waits for the servers. Any worker may call it alone."""
    operations, states = [], {}
    for parameter in parameters:
        if parameter.takes_steps:
            continue  # its momentum is on each worker
        kept = rules.state_of(parameter.description)
        if parameter.updates == 0:
            if parameter.description["name"] == "torch_adagrad":  # which has its state from the beginning
                first = torch.full_like(parameter.tensor, parameter.description["initial_accumulator_value"])
                states[parameter.tensor] = {"step": torch.tensor(0.0), "sum": first.detach()}
            continue
        state = states[parameter.tensor] = {"step": torch.tensor(float(parameter.updates))} if kept.counts else {}
        for part, name in enumerate(kept.arrays, 1):
            array = torch.empty_like(parameter.tensor, dtype=_dtype(parameter), device="cpu", requires_grad=False)
            state[name] = array
            operations.append(parameter.fetch_state(part, array))
    session.wait(operations)
    for tensor, state in states.items():
        for name, array in state.items():
            if name != "step":
                state[name] = array.to(tensor.device, tensor.dtype)
    return states


def give(session: Session, parameters: Iterable[Parameter], states: States) -> None:
    """Makes it the servers' state, before the parameters' next round; on every worker. ValueError if it is not one."""
    operations = []
    for parameter in parameters:
        state = states.get(parameter.tensor)
        kept = rules.state_of(parameter.description)
        if state is None:
            continue
        if parameter.takes_steps:
            raise ValueError(
                "the state of %s has a momentum, which dgc keeps on each worker: p3.torch.resume() brings it back from "
                "a snapshot, and without one leave the optimizer's state out" % parameter.name
            )
        missing = [name for name in kept.arrays if not isinstance(state.get(name), torch.Tensor)]
        if missing and len(missing) < len(kept.arrays):
            raise ValueError("the state of %s has no %s: it is of an optimizer with other settings"
                             % (parameter.name, ", ".join(missing)))  # fmt: skip
        if missing or not kept.arrays and not kept.counts:
            continue
        parameter.updates = int(state["step"]) if kept.counts else 1  # SGD: the momentum has begun
        if parameter.updates == 0 or (session.rank != 0 and not parameter.has_state_here):
            continue
        for part, name in enumerate(kept.arrays, 1):
            content = like(parameter.tensor, state[name].to("cpu", _dtype(parameter)))
            operations.append(parameter.store_state(part, content))
    session.wait(operations)


def _dtype(parameter: Parameter) -> torch.dtype:
    """Half precision is updated in float32."""
    return torch.float64 if parameter.tensor.dtype == torch.float64 else torch.float32
