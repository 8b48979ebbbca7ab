"""What can be trained: checked before anything is declared, so that a refusal leaves everything as it was."""

from __future__ import annotations

import operator
from itertools import chain, islice, starmap, zip_longest
from typing import Any, Dict, Iterable, List, Sequence

import torch

from p3.plan import choices, combinations
from p3.plan.choices import Choice
from p3.plan.strategy import Strategy
from p3.torch.parameters.arrays import DTYPES, is_dense


def require_model(model: Any, of: str = "DistributedOptimizer") -> None:
    """`of`: the script's call."""
    if not isinstance(model, torch.nn.Module):
        raise ValueError("%s takes a torch.nn.Module or several, not a %s" % (of, type(model).__name__))
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise ValueError("the model has modules of torch.jit, which can wait for nothing: use torch.compile instead")
    if any(isinstance(module, torch.nn.parallel.DistributedDataParallel) for module in model.modules()):
        within = ", or where its group is a site call p3.torch.site(group) before" * (of == "LocalSteps")
        raise ValueError("the model is wrapped in DistributedDataParallel, whose place P3 takes: pass the model "
                         "itself%s" % within)  # fmt: skip
    for name, module in model.named_modules():
        if of != "LocalSteps" and _writes_to_its_weight(module):
            raise ValueError(
                "module %r is an %s with max_norm, which writes to its weight in the forward pass, on each worker to "
                "the rows of its own batch: the workers' weights would drift apart. Leave max_norm out; to bound the "
                "rows, scale those of the whole weight between optimizer.synchronize() and optimizer.broadcast()"
                % (name, type(module).__name__)
            )


def _writes_to_its_weight(module: torch.nn.Module) -> bool:
    is_embedding = isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag))
    return is_embedding and module.max_norm is not None and module.weight.requires_grad


def require_norm(value: Any, name: str) -> None:
    """What gradients are to be clipped by; infinity: by nothing."""
    if not (isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0):
        raise ValueError("%s is %r; it must be a positive number" % (name, value))


def require_parameters(optimizer: torch.optim.Optimizer, names: Dict[torch.Tensor, str],
                       of: str = "DistributedOptimizer") -> None:  # fmt: skip
    """`names`: of the model's parameters. `of`: the script's call."""
    parameters = list(parameters_of(optimizer))
    for tensor in parameters:
        if tensor not in names:
            raise ValueError(
                "%s: a parameter of the optimizer, of shape %s, is in no module of the model; pass all models that it "
                "trains, in a list" % (of, tuple(tensor.shape))
            )
        _require_supported(names[tensor], tensor, of)
    _require_apart(parameters, names)


def require_together(session, optimizer: torch.optim.Optimizer, tensors: Sequence[torch.Tensor],
                     names: Dict[torch.Tensor, str], asked: Iterable[Choice], strategy: Strategy) -> None:  # fmt: skip
    """ValueError unless what the script, or the strategy, has `asked` for these parameters goes together, and with this
    optimizer."""
    found = {choices.FACTORS: filter(is_factored, tensors),
             choices.GPU: (one for one in tensors if one.device.type != "cpu")}  # fmt: skip
    chosen = [choice.said(names[one]) for choice, those in found.items() for one in islice(those, 1)]
    states = (optimizer.state[one] for one in tensors if one in optimizer.state)
    if any(isinstance(value, torch.Tensor) for state in states if isinstance(state, dict) for value in state.values()):
        chosen.append(choices.STEPS_TAKEN)
    is_for_all = len(tensors) == sum(len(group["params"]) for group in optimizer.param_groups)
    by_strategy = strategy.said_of(names[tensors[0]])
    parameter = "" if is_for_all and not by_strategy else ", parameter %s%s" % (names[tensors[0]], by_strategy)
    where = "%s: DistributedOptimizer%s" % (session.label, parameter)
    combinations.require(where, *asked, *chosen)


def require_same_parameters(optimizer: torch.optim.Optimizer, known: Iterable[torch.Tensor]) -> None:
    if not all(starmap(operator.is_, zip_longest(parameters_of(optimizer), known))):
        raise ValueError(
            "the parameters in the optimizer's groups have changed since DistributedOptimizer: make a new optimizer "
            "with all of them first"
        )


def is_factored(tensor: torch.Tensor) -> bool:
    """Its gradients leave as factors (p3/torch/factors.py), if that pays."""
    return hasattr(tensor, "_p3_layer")


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


def _require_supported(name: str, tensor: torch.Tensor, of: str) -> None:
    if torch.nn.parameter.is_lazy(tensor):
        raise ValueError("parameter %s has no shape yet: run a forward pass before %s" % (name, of))
    if type(tensor.data) is not torch.Tensor:
        raise ValueError("parameter %s is a %s; P3 trains plain tensors only" % (name, type(tensor.data).__name__))
    if tensor.device.type not in ("cpu", "cuda"):
        where = (name, tensor.device)
        raise ValueError("parameter %s is on %s; p3.torch trains parameters on the CPU and on CUDA devices" % where)
    if tensor.dtype not in DTYPES:
        known = ", ".join(str(dtype) for dtype in DTYPES)
        raise ValueError("parameter %s has type %s; P3 can train %s" % (name, tensor.dtype, known))
    if not is_dense(tensor):
        raise ValueError("parameter %s shares memory among its elements, or leaves gaps; make it contiguous()" % name)


def _require_apart(parameters: List[torch.Tensor], names: Dict[torch.Tensor, str]) -> None:
    spans = sorted((tensor.data_ptr(), tensor.nbytes, names[tensor]) for tensor in parameters)
    for (begin, length, name), (following, _, other) in zip(spans, spans[1:]):
        if begin + length > following:
            raise ValueError(
                "parameters %s and %s share memory; to share weights, give both modules the same Parameter"
                % (name, other)
            )
