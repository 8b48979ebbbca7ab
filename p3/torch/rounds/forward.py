"""Where in the forward pass a parameter's new value is waited for: in the module that owns it, just before that runs.

The order in which modules run gives the priorities, which follow it if it changes (p3/frontend/order.py). A parameter
whose own module never ran, as its weight is used from elsewhere (the out_proj of MultiheadAttention, a method other
than forward), is waited for at the nearest module around it that did; where none did, as the script calls no forward
of the model but methods of its own, at whatever module runs first in a step. A compiled module waits for all of its
parameters at once, because nothing may interrupt what was compiled.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Set, Tuple

import torch

from p3.frontend.order import Order
from p3.torch.parameters.parameter import Parameter
from p3.torch.parameters.watched import Watched
from p3.torch.start import job

log = logging.getLogger("p3.torch")


class Forward(job.Held):
    """Of one optimizer's parameters in its models. Threads: the script's."""

    def __init__(
        self, models: Sequence[torch.nn.Module], parameters: Dict[torch.Tensor, Parameter], order: Optional[Order],
        renew: Callable[[Iterable[Parameter], bool], None], note_batch: Callable[[tuple, dict], None], watched: Watched,
    ) -> None:
        """`order`: of the parameters' names; None: nobody wants it. `renew(parameters, for_step)` waits for their new
        values, for the step's own forward pass or another one. `note_batch` is told what the first module that
        runs in a step is called with. `watched`: their gradients."""
        self._parameters, self._order, self._renew, self._note_batch = parameters, order, renew, note_batch
        self._watched = watched
        self._ran: Dict[torch.nn.Module, None] = {}  # in this step, as they ran first
        self._ran_before: Optional[int] = None  # how many of them before the step's first gradient left, if one has
        self._ran_late: List[torch.nn.Module] = []  # the others, of the last step
        self._ever_ran: Set[torch.nn.Module] = set()
        self._paths: Dict[torch.nn.Module, List[torch.nn.Module]] = {}  # a module, and what is around it, inwards
        self._owners: Dict[Parameter, List[torch.nn.Module]] = {}
        self._unused: Set[Parameter] = set()  # whose own module has never run, and who had no gradient
        self._used_elsewhere: Set[Parameter] = set()  # who had one in a step in which it had not run
        self._own: Dict[torch.nn.Module, List[Parameter]] = {}
        self._waits: Dict[torch.nn.Module, List[Parameter]] = {}
        self._waits_first: List[Parameter] = []  # in whatever module runs first
        self._compiled: Set[torch.nn.Module] = set()
        self._looked_at: Set[torch.nn.Module] = set()  # models whose first forward pass is over
        self._undo: List[Callable[[], None]] = []  # what takes each hook away again
        for model in models:
            self._visit(model, [])
        for module in self._paths:
            # A copy of the module, as for a moving average, has the hooks as well: there they find nothing to wait for.
            if getattr(module, "_compiled_call_impl", None) is not None:
                self._wait_before_compiled_call(module)
            else:
                is_root = any(module is one for one in models)  # which others call, by name of its arguments perhaps
                hook = module.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=is_root)
                self._undo.append(hook.remove)
                if module in self._compiled:
                    hook = module.register_forward_hook(self._after_compiled, always_call=True)
                    self._undo.append(hook.remove)
            self._undo.append(module.register_state_dict_pre_hook(self._before_state_dict).remove)
        self._roots = list(models)

    def _visit(self, module: torch.nn.Module, path: List[torch.nn.Module]) -> None:
        if module in self._paths:
            return
        path = [*path, module]
        self._paths[module] = path
        is_compiled = _is_compiled(module)
        if is_compiled:
            self._compiled.add(module)
            log.info("%s is compiled: it waits for all of its parameters before it runs", type(module).__name__)
        own = (self._parameters.get(tensor) for tensor in module.parameters(recurse=is_compiled))
        self._waits[module] = self._own[module] = [parameter for parameter in own if parameter is not None]
        for parameter in self._own[module]:
            self._owners.setdefault(parameter, []).append(module)
        if not is_compiled:
            for child in module.children():
                self._visit(child, path)

    def _wait_before_compiled_call(self, module: torch.nn.Module) -> None:
        """Of module.compile(), whose hooks are compiled with it. A copy of the module is not compiled."""
        compiled = module._compiled_call_impl

        def call(*arguments: Any, **keywords: Any) -> Any:
            self._before_forward(module, arguments, keywords)
            try:
                return compiled(*arguments, **keywords)
            finally:
                self._after_compiled(module)

        def undo() -> None:
            if module._compiled_call_impl is call:
                module._compiled_call_impl = compiled

        module._compiled_call_impl = call
        self._undo.append(undo)

    def release(self) -> None:
        """The modules are as they were before."""
        for undo in self._undo:
            undo()

    @torch.compiler.disable
    def _before_forward(self, module: torch.nn.Module, inputs: tuple, keywords: Optional[dict] = None) -> None:
        waits = self._waits.get(module)
        if waits is None:
            return
        if module in self._roots and module not in self._looked_at:
            self._looked_at.add(module)
            _warn_if_within_compiled(module)
        trains = module.training and torch.is_grad_enabled()
        self._renew(waits if self._ran else [*self._waits_first, *waits], trains)
        if trains and not self._ran:
            self._note_batch(inputs, keywords or {})
        if module.training or torch.is_grad_enabled():  # no evaluation
            self._ran.setdefault(module)
        if module in self._compiled:
            self._watched.pause(module)

    @torch.compiler.disable
    def _after_compiled(self, module: torch.nn.Module, *_ignored: Any) -> None:
        self._watched.resume(module)

    def _before_state_dict(self, module: torch.nn.Module, *_ignored) -> None:
        for parameter in self._waits.get(module, ()):
            parameter.renew()

    def before_gradient(self) -> None:
        """A gradient is about to leave. At a step's first one the forward pass is over, and its order is known; what
        runs behind that, as for a second loss, counts in the next step."""
        if self._ran_before is not None:
            return
        self._ran_before = len(self._ran)
        if self._order is None:
            return
        used = dict.fromkeys(one.name for one in self._waits_first if one not in self._unused)
        used.update(
            (parameter.name, None)
            for module in (*self._ran, *self._ran_late)
            for parameter in self._waits[module]
            if parameter not in self._unused or parameter in self._own[module]
        )
        if self._order.follow(list(used)):
            for parameter in self._parameters.values():
                parameter.priority = -self._order.place(parameter.name, len(self._parameters))

    def end_step(self) -> None:
        """No forward pass of this step follows: who waits for what from now on. Before what is left of its gradients
        leaves."""
        if not self._ever_ran.issuperset(self._ran):
            self._ever_ran.update(self._ran)
            self._distribute_waits()
        for parameter in [one for one in self._unused if one.tensor.grad is not None]:
            self._unused.remove(parameter)
            self._used_elsewhere.add(parameter)
        self.before_gradient()
        self._ran_late = list(self._ran)[self._ran_before :]
        self._ran.clear()
        self._ran_before = None

    def _distribute_waits(self) -> None:
        never_ran = {one for one, owners in self._owners.items() if self._ever_ran.isdisjoint(owners)}
        self._unused = never_ran - self._used_elsewhere
        self._waits, self._waits_first = {module: list(own) for module, own in self._own.items()}, []
        for parameter, owners in self._owners.items():
            if parameter not in self._unused and parameter not in self._used_elsewhere:
                continue
            around = reversed(self._paths[owners[0]][:-1])
            ran = next((module for module in around if module in self._ever_ran), None)
            (self._waits_first if ran is None else self._waits[ran]).append(parameter)


def _warn_if_within_compiled(model: torch.nn.Module) -> None:
    """What torch.compile() made of the model is called, and P3 has the model itself."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if getattr(frame.f_locals.get("self"), "_orig_mod", None) is model:
            return log.warning(
                "%s was compiled by torch.compile(), and DistributedOptimizer has the model from before that: each "
                "module interrupts the compiled code to wait for its weights. Give DistributedOptimizer what "
                "torch.compile() returns, or compile blocks of the model before",
                type(model).__name__,
            )
        frame = frame.f_back


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
