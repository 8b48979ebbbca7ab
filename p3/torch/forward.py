"""Where in the forward pass a parameter's new value is waited for: in the module that owns it, just before that runs.

The first step learns which modules run, and in which order: that gives the priorities. A parameter whose own module
never ran, as its weight is used from elsewhere (the out_proj of MultiheadAttention, a method other than forward), is
waited for at the nearest module around it that did; the outermost runs always. A compiled module waits for all of its
parameters at once, because nothing may interrupt what was compiled.
"""

from __future__ import annotations

import logging
from typing import Dict, List, Sequence, Tuple

import torch

from p3.torch import job
from p3.torch.parameter import Parameter

log = logging.getLogger("p3.torch")


class Forward(job.Held):
    """Of one optimizer's parameters in its models. Threads: the script's."""

    def __init__(
        self, models: Sequence[torch.nn.Module], parameters: Dict[torch.Tensor, Parameter], gives_priorities: bool
    ) -> None:
        self._parameters, self._gives_priorities = parameters, gives_priorities
        self._is_learning = True
        self._order: List[torch.nn.Module] = []  # as they ran first
        self._paths: Dict[torch.nn.Module, List[torch.nn.Module]] = {}  # a module, and what is around it, inwards
        self._owners: Dict[Parameter, List[torch.nn.Module]] = {}
        self._waits: Dict[torch.nn.Module, List[Parameter]] = {}
        for model in models:
            self._visit(model, [])
        for module in self._paths:
            # A copy of the module, as for a moving average, has the hooks as well: there they find nothing to wait for.
            module.register_forward_pre_hook(self._before_forward, prepend=True)
            module.register_state_dict_pre_hook(self._before_state_dict)

    def _visit(self, module: torch.nn.Module, path: List[torch.nn.Module]) -> None:
        if module in self._paths:
            return
        path = [*path, module]
        self._paths[module] = path
        is_compiled = _is_compiled(module)
        if is_compiled:
            log.info("%s is compiled: it waits for all of its parameters before it runs", type(module).__name__)
        own = (self._parameters.get(tensor) for tensor in module.parameters(recurse=is_compiled))
        self._waits[module] = [parameter for parameter in own if parameter is not None]
        for parameter in self._waits[module]:
            self._owners.setdefault(parameter, []).append(module)
        if not is_compiled:
            for child in module.children():
                self._visit(child, path)

    @torch.compiler.disable
    def _before_forward(self, module: torch.nn.Module, _inputs: tuple) -> None:
        waits = self._waits.get(module)
        if waits is None:
            return
        if self._is_learning and module not in self._order:
            self._order.append(module)
        for parameter in waits:
            parameter.renew()

    def _before_state_dict(self, module: torch.nn.Module, *_ignored) -> None:
        for parameter in self._waits.get(module, ()):
            parameter.renew()

    def learn(self) -> None:
        """At the end of the first step: who waits for what from now on, and each parameter's priority."""
        if not self._is_learning or not self._order:  # or there was no forward pass
            return
        self._is_learning = False
        ran = set(self._order)
        for parameter, owners in self._owners.items():
            if ran.isdisjoint(owners):
                path = self._paths[owners[0]]
                around = next((module for module in reversed(path) if module in ran), path[0])
                self._waits[around].append(parameter)
        if not self._gives_priorities:
            return
        in_order = dict.fromkeys(parameter for module in self._order for parameter in self._waits[module])
        for position, parameter in enumerate(in_order):
            parameter.priority = -position


def _is_compiled(module: torch.nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def named_parameters(models: Sequence[torch.nn.Module]) -> List[Tuple[str, torch.Tensor]]:
    """Each distinct parameter by its first name; with several models, the model's number comes before it."""
    return _named(models, lambda model: model.named_parameters())


def named_buffers(models: Sequence[torch.nn.Module]) -> List[Tuple[str, torch.Tensor]]:
    return _named(models, lambda model: model.named_buffers())


def _named(models, of) -> List[Tuple[str, torch.Tensor]]:
    named = {}
    for number, model in enumerate(models):
        prefix = "%d." % number if len(models) > 1 else ""
        for name, tensor in of(model):
            named.setdefault(tensor, prefix + name.replace("_orig_mod.", ""))
    return [(name, tensor) for tensor, name in named.items()]
