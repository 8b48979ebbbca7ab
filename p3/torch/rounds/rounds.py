"""The rounds of one distributed optimizer: what stands between it and the job. optimizer.py is its face.

In each step every parameter has one round: its gradient goes out when it is complete, or the round is skipped; the new
value, or the sum, comes back and is taken over when the forward pass needs it (parameter.py). Here is what all have in
common, with an update on the workers; overlapping.py and synchronous.py have the two ways to take a step.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from abc import abstractmethod
from typing import Any, Callable, Dict, Iterable, Iterator, List, NoReturn, Optional, Sequence, Set, Union

import torch

from p3.frontend import partitions, snapshots
from p3.frontend.compression import Compression
from p3.frontend.order import Order
from p3.frontend.plans import Plans, planned_for
from p3.frontend.steps import Count
from p3.plan import choices, combinations
from p3.plan.strategy import Strategy
from p3.settings import Settings
from p3.torch import rules
from p3.torch.batches.weights import Weights
from p3.torch.device import staging
from p3.torch.device.comparisons import Comparisons
from p3.torch.factors import FactoredParameter
from p3.torch.parameters import advice, pending, trained
from p3.torch.parameters.arrays import on_host
from p3.torch.parameters.parameter import Parameter
from p3.torch.parameters.watched import Watched
from p3.torch.requirements import is_factored, parameters_of, require_same_parameters
from p3.torch.rounds import beginning
from p3.torch.rounds.check import Check
from p3.torch.rounds.control import Control
from p3.torch.rounds.forward import Forward, named_parameters
from p3.torch.rounds.released import Released
from p3.torch.rounds.watch import Watch
from p3.torch.rounds.zero_grad import ZeroGrad
from p3.torch.start import job
from p3.worker.key import Key

log = logging.getLogger("p3.torch")

_MANY_DROPPED = 10


class Rounds(job.Held, snapshots.Trainer):
    """What stands between one optimizer and the job."""

    kind = "DistributedOptimizer"

    _updates_here = True  # the workers update, from the mean gradients
    _guards = True  # nobody else may write to parameters
    _watches_all = False  # all changes that torch does not count are found, in every step
    _updates_behind = "none"  # what all updates of a step wait for besides their own sum: as Plans has it

    def __init__(self, optimizer: torch.optim.Optimizer, models: Sequence[torch.nn.Module],
                 compressions: Sequence[Compression], stale: Dict[torch.Tensor, Union[int, float]],
                 strategy: Optional[Strategy] = None, plans: bool = False) -> None:  # fmt: skip
        """`compressions`: of each of the optimizer's groups. `stale`: each parameter's staleness. `strategy`: of all
        stores. `plans`: others are made while the job trains, for the parameters."""
        self._session = session = job.current()
        settings = Settings.from_env(os.environ)
        self._optimizer, self._kind, self._models = optimizer, type(optimizer), models
        self._is_as_ddp, self._advice = False, advice.OF_SCRIPTS
        self._shares_loads = True
        self._is_paused = self._is_joining = self._has_begun = False
        self._dropped = 0  # times that the script has dropped gradients before it had a step
        self._is_counted = False  # the step under way, with all of its rounds
        self._factor: Optional[float] = None  # of the round's gradients; None: none of them has left
        self._descriptions: List[Optional[dict]] = [None] * len(optimizer.param_groups)  # the servers have them
        self._stale, self._staleness = stale, max(stale.values(), default=0)
        names = {tensor: name for name, tensor in named_parameters(models)}
        snapshots.release_former(parameters_of(optimizer), "another DistributedOptimizer")
        self._stores = [session.new_store(strategy, "parameters") for _ in optimizer.param_groups]
        self._parameters: Dict[torch.Tensor, Parameter] = {}
        self._comparisons = Comparisons()
        self._watched_gradients = Watched(self.show_gradients)
        self._undo: List[Callable[[], None]] = []  # what takes each hook away again
        self._sparse = _with_sparse_gradients(models)
        for store, compression in zip(self._stores, compressions):
            for option, value in compression.of_store.options.items():
                session.set_option(store, option, value)
        self._choose_reduction()
        self._declare(names, compressions, settings)
        self._watch = Watch(self._parameters, self._watches_all or settings.check > 0)
        if session.is_first:
            self._log_other_mathematics(names, compressions)
        self._control = Control(session, models, strategy)
        self._check = Check(session, self._parameters, settings.check, strategy)
        self._order = Order(session, self._stores[0]) if settings.priority == "auto" else None
        self._forward = Forward(models, self._parameters, self._order, self._renew, self._control.alike.note,
                                self._watched_gradients)  # fmt: skip
        self._weights = Weights(session, self._control.steps, self._count_step)
        self._plans: Optional[Plans] = None
        planned = planned_for(parameter.key for parameter in self._parameters.values()) if plans else []
        if planned and session.num_servers > 1:
            self._plans = Plans(session, self._control.store, planned, self._updates_behind, self._go_over)
        for model in models:
            self._undo += [
                model._register_load_state_dict_pre_hook(self._before_loading, with_module=True).remove,
                model.register_load_state_dict_post_hook(self._on_loaded).remove,
                ZeroGrad(model, self).undo,
            ]
        self._unreleased = [*self._stores, self._control.store, *self._check.stores]
        self._start(snapshots.add(session, self, self._stores))

    # What a trainer asks for, whose scripts expect what DistributedDataParallel does (p3/trainers/gradients.py)

    def act_as_ddp(self) -> None:
        """From the first step on: the script may write to parameters between two steps, and leave out a step by
        zero_grad(), as long as every worker does so alike. Errors say what it can do, who has no DistributedOptimizer
        of its own."""
        if self._session.goes_on_without:
            combinations.require(self._session.label, choices.LEAVING, choices.TRAINERS)
        self._is_as_ddp, self._advice = True, advice.OF_TRAINERS
        for parameter in self._parameters.values():
            parameter.advice = self._advice

    @contextlib.contextmanager
    def joining(self) -> Iterator[None]:
        """Within it some workers may be in join() by now, who take every step of the others: no step is left out."""
        self._is_joining = True
        try:
            yield
        finally:
            self._is_joining = False

    def watch_gradients(self) -> None:
        """Behind a backward pass: whoever looks at a gradient from here to step() gets show_gradients() before. At any
        of them, also one that this worker has not used: another one may have. But where the pass has left no gradient
        in any of them, it was no pass of this optimizer's step, and nobody is told."""
        self._watched_gradients.begin(self._parameters if self._has_gradients else ())

    @property
    def _has_gradients(self) -> bool:
        """Of the step under way, on this worker: a backward pass outside no_sync() has reached one of them."""
        return any(one.is_new or one.fires for one in self._parameters.values())

    @property
    def has_sums(self) -> bool:
        """Whether clip_grad_norm_() waits for nothing: nobody has clipped the gradients of this step before, or changed
        them otherwise."""
        return False

    @abstractmethod
    def show_gradients(self) -> None:
        """The parameters have the mean gradients, clipped if they are by now, until step(), which goes by what the
        script makes of them. Waits for them; each worker by itself. Behind the step's last backward pass."""

    def renew_weights(self) -> None:
        """The parameters have what the last step has made of them. Waits for that; gradients under way stay so."""
        self._renew(self._parameters.values(), for_step=False)

    @contextlib.contextmanager
    def loads_apart(self) -> Iterator[None]:
        """Within it load_state_dict() of a model waits for nobody, so some workers may load and others not: all call
        broadcast() behind it."""
        self._shares_loads = False
        try:
            yield
        finally:
            self._shares_loads = True

    # What the ways to take a step differ in

    @abstractmethod
    def _step(self, closure: Optional[Callable]) -> Any:
        """Ends the step, and has it updated."""

    @abstractmethod
    def synchronize(self) -> None:
        """See optimizer.py."""

    def take_exact_weights(self) -> None:
        """Behind synchronize(); see optimizer.py."""

    def require_mean_gradients(self) -> bool:
        """False, or ValueError unless the gradients are the mean ones, and what is left out can follow the scaler."""
        raise ValueError(
            "GradScaler must see the mean gradients: take p3.torch.GradScaler in its place, as grad_scaler= of "
            "DistributedOptimizer, so that nothing waits; or pass synchronous=True, and call optimizer.synchronize() "
            "before scaler.unscale_() and scaler.step()"
        )

    @abstractmethod
    def _follow(self) -> None:
        """In join(): takes over what a step of the others has made."""

    def _skip_more(self) -> None:
        """In join(), behind the parameters: begins what else has a round in each step."""

    def _update_one(self, parameter: Parameter, gradient: torch.Tensor, group: Dict[str, Any]) -> bool:
        """The mean gradient of a parameter has landed. See Parameter, `update_here`."""
        return True

    def _renew(self, parameters: Iterable[Parameter], for_step: bool) -> None:
        """A module needs their new values, for the step's own forward pass or another one."""
        for parameter in parameters:
            parameter.renew_for_step() if for_step else parameter.renew()

    def _has_rows(self, tensor: torch.Tensor, group: Dict[str, Any]) -> bool:
        """Whether only the rows of its gradients travel."""
        return False

    def _before_push(self) -> None:
        """Of a round's first gradient."""

    def _loss_scale(self) -> Optional[float]:
        """Of what compression has left out, for a snapshot."""
        return None

    def clip_grad_norm_(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
        """See optimizer.py."""
        raise ValueError(
            "to clip by the global norm, pass max_grad_norm to DistributedOptimizer, or max_grad_norm=math.inf if "
            "clip_grad_norm_() alone is to say by what"
        )

    # What depends on who updates

    def _choose_reduction(self) -> None:
        for store in self._stores:  # the mean is what may be rounded to half precision on its way back, not the sum
            self._session.set_option(store, "reduction", {"type": "mean"})

    def _describe(self) -> List[Optional[Dict[str, Any]]]:
        """How the servers update each group."""
        return [None] * len(self._optimizer.param_groups)

    def _look_at_groups(self) -> None:
        """Their numbers may have changed since they were described."""

    def _give_loaded(self) -> None:
        """States that were loaded."""

    def _own_weights(self) -> Dict[str, Any]:
        """What a snapshot cannot have from the servers. Waits for the step under way."""
        self._land()
        return {one.name: on_host(one.tensor) for one in self._parameters.values()}

    def _bring_states_back(self) -> None:
        """The optimizer's, when the training ends."""

    @property
    def parameters(self) -> Iterable[Parameter]:
        return self._parameters.values()

    def _start(self, resumed: Optional[Dict[str, Any]]) -> None:
        """First values for all; `resumed`: what own_state() gave for the snapshot that the job has resumed from."""
        has_entered = self._session.entrance.is_on_trial
        if resumed is not None:
            torch.optim.Optimizer.load_state_dict(self._optimizer, resumed["optimizer"])
            self._relink_groups()
        if has_entered:
            self._require_same(resumed)
        for parameter in self._parameters.values():
            value = self._session.first_value(parameter.key)
            if resumed is not None:
                parameter.updates = resumed["updates"].get(parameter.name, 0)
                parameter.lacks = tuple(resumed.get("lacks", {}).get(parameter.name, ()))
                value = resumed["weights"].get(parameter.name, value)
            if self._updates_here:
                self._session.entrance.skip_value(parameter.key)
            parameter.init(value)
        self._land()
        if has_entered and self._updates_here:
            for parameter in self._parameters.values():
                parameter.take(resumed["weights"][parameter.name])
        self._control.broadcast()
        if resumed is None:
            self._tell_beginning()
        else:
            self._control.take(resumed["buffers"])

    # Another strategy, between two steps

    def change_strategy(self, strategy: Optional[Strategy]) -> None:
        """See optimizer.py."""
        if strategy is not None:
            strategy.require(self._session.num_servers, (one.name for one in self._parameters.values()))
        self._go_over(strategy or Strategy())

    def _go_over(self, strategy: Optional[Strategy]) -> None:
        """None: to what the first worker says."""
        self._land()
        self._finish()
        self._session.change_strategy(self._stores, strategy)

    # What a process gets that joins the running job (p3/frontend/snapshots.py)

    def rest(self) -> None:
        self._land()
        self._finish()
        if self._plans is not None:
            self._plans.settle()

    def own_state_now(self) -> Dict[str, Any]:
        if not self._has_begun:
            self._begin()  # or who joins would wait, in settle(), for what the first worker says in its first step
        tells = self._control.beginning is not None
        return {**self.own_state(), "like": self._like(), "tells": tells, "checked": self._check.steps}

    def _like(self) -> Dict[str, Any]:
        """What must be the same on one that joins, beside what the scheduler compares."""
        return {"class": self._kind.__name__, "the workers update": self._updates_here,
                "settings and states": beginning.digest(self._kind, self._optimizer),
                "P3_CHECK": self._check.every}  # fmt: skip

    def _require_same(self, first: Dict[str, Any]) -> None:
        names, own = {one.name for one in self._parameters.values()}, self._like()
        if names != first["updates"].keys():
            only = sorted(names ^ first["updates"].keys())
            raise ValueError("%s: this process has joined a running job, which trains other parameters: only here or "
                             "only there are %s" % (self._session.label, ", ".join(only[:5])))  # fmt: skip
        differing = [what for what, here in own.items() if here != first["like"][what]]
        if differing:
            raise ValueError("%s: this process has joined a running job, whose training differs, in %s: make it "
                             "the same" % (self._session.label, ", ".join(differing)))  # fmt: skip
        if first["tells"]:
            self._tell_beginning()
        self._check.steps = first["checked"]

    def give_more(self) -> None:
        self._control.frozen.hand_over()

    def settle(self) -> None:
        self._begin()
        self._control.frozen.hand_over()

    def order_stats(self) -> Dict[str, float]:
        return {} if self._order is None else self._order.stats()

    def keys_to_capture(self) -> List[Key]:
        return [parameter.key for parameter in self._parameters.values()]

    def own_state(self) -> Dict[str, Any]:
        """Where the workers update, it waits for the step under way."""
        weights, loss_scale = self._own_weights(), self._loss_scale()
        return {
            "loss_scale": loss_scale,
            "stores": list(self._stores),
            "updates": {one.name: one.updates_by_now() for one in self._parameters.values()},
            "lacks": {one.name: list(one.lacks) for one in self._parameters.values() if one.lacks},
            "weights": weights,
            "buffers": self._control.values(),
            "optimizer": torch.optim.Optimizer.state_dict(self._optimizer),
        }

    def _log_other_mathematics(self, names: Dict[torch.Tensor, str], compressions: Sequence[Compression]) -> None:
        """What makes training differ from that on the joined batch. That compression is lossy, the session has said."""
        if self._staleness != 0:
            log.warning("staleness %s: each gradient updates the weights at once, so no two runs are alike",
                        " or ".join(map(str, sorted(set(self._stale.values())))))  # fmt: skip
        asked = [compression.of(names[tensor], tuple(tensor.shape))
                 for group, compression in zip(self._optimizer.param_groups, compressions)
                 for tensor in group["params"]]  # fmt: skip
        keys = [one.key for one in self._parameters.values()]
        axes = [key.axes for key in keys]
        for codec in dict.fromkeys(ways.up["type"] for ways in asked if ways.up is not None):
            log.info("compression: the gradients of %d of %d parameters travel as %s; sparse ones, those of other "
                     "types than float32, and with dgc, topk and lowrank those of one dimension, as they are",
                     sum(one.compression == codec for one in keys), len(keys), codec)  # fmt: skip
        what = "the mean gradients" if self._updates_here else "changes of the weights"
        for codec in dict.fromkeys(ways.down["type"] for ways in asked if ways.down is not None):
            log.info("compression: %s of %d of %d parameters come back as %s; those of sparse ones, of other types "
                     "than float32 and of one dimension, as they are",
                     what, sum(one.value_codec.get("type") == codec for one in axes), len(axes), codec)  # fmt: skip

    def _declare(self, names: Dict[torch.Tensor, str], compressions: Sequence[Compression],
                 settings: Settings) -> None:  # fmt: skip
        by_index = settings.priority != "off"
        for store, group, compression in zip(self._stores, self._optimizer.param_groups, compressions):
            for tensor in group["params"]:
                name = names[tensor]
                kind = staging.kind_of(name, tensor, self._has_rows(tensor, group))
                if is_factored(tensor):
                    kind = FactoredParameter
                own = compression.options_of(name, tuple(tensor.shape))
                parameter = kind(self._session, store, name, tensor, group, self._update_one, self._stale[tensor], own)
                parameter.comparisons = self._comparisons
                parameter.is_guarded = self._guards
                parameter.priority = -len(self._parameters) if by_index else 0  # until a forward pass gives others
                self._parameters[tensor] = parameter
                self._add_hook(parameter)

    def _add_hook(self, parameter: Parameter) -> None:
        tensor, needed = parameter.tensor, parameter.tensor.requires_grad
        trained.names[tensor] = parameter.name
        tensor.requires_grad_(True)  # a frozen one can be thawed later, and takes a hook only so
        hook = tensor.register_post_accumulate_grad_hook(functools.partial(self._on_gradient, parameter))
        self._undo.append(hook.remove)
        tensor.requires_grad_(needed)

    def _is_ours(self, model: torch.nn.Module) -> bool:
        return any(model is one for one in self._models)  # no copy

    def _before_loading(self, model: torch.nn.Module, *_ignored: Any) -> None:
        if self._is_ours(model):
            self._land()  # an error of it comes before anything is loaded

    def _on_loaded(self, model: torch.nn.Module, _keys: Any) -> None:
        if not self._is_ours(model):
            return
        present = {tensor for _, tensor in named_parameters(self._models)}
        replaced = [one.name for tensor, one in self._parameters.items() if tensor not in present]
        if replaced:
            raise ValueError(
                "load_state_dict(assign=True) has replaced %s by other tensors, which the optimizer does not train: "
                "load without assign, or before the optimizer is made" % ", ".join(replaced)
            )
        if self._shares_loads:
            self.broadcast()

    def broadcast(self) -> None:
        self._land()  # so that rank 0 gives what its last step has made
        # Or a worker that is late would get this value in the place of the one before.
        self._session.barrier("broadcast() or load_state_dict() of a model")
        for parameter in self._parameters.values():
            parameter.init()
        self._land()
        self._control.broadcast()

    def _land(self) -> None:
        for parameter in self._parameters.values():
            if parameter.is_new:
                raise ValueError(
                    "the gradient of %s is under way, and step() has not ended its step: %s"
                    % (parameter.name, self._advice.to_wait)
                )
            parameter.land()

    # Gradients

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        was, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = was

    def _on_gradient(self, parameter: Parameter, _tensor: torch.Tensor) -> None:
        if self._watched_gradients.are_any:
            self._watched_gradients.end()
        if parameter.is_new or parameter.is_pending:
            self._refuse_gradient(parameter)
        if self._is_paused:
            return parameter.forget_gradient()
        if self._plans is not None:
            self._plans.timing.note_gradient(parameter.name)
        if parameter.count_gradient():
            if self._factor is None:  # it is the step's first to leave
                self._forward.before_gradient()
            self._push(parameter, more=True)  # at the end of the step, at the latest

    def _refuse_gradient(self, parameter: Parameter) -> NoReturn:
        if not parameter.is_new:
            raise RuntimeError(
                "%s was used before its new value had been waited for, by a function in C++ (an extension, or one of "
                "torch.jit.script) and outside its own module. Call optimizer.synchronize() before that"
                % parameter.name
            )
        raise RuntimeError(
            "the gradient of %s was computed again after it had been sent, and before optimizer.step(). Run all "
            "but the last backward pass of a step in `with optimizer.no_sync():`. If another model's loss goes "
            "through this one, run its backward pass so, too, or switch off requires_grad. To leave out a step "
            "behind its backward pass, %s. Where a module that a step uses more than once is checkpointed, pass "
            "use_reentrant=False to checkpoint()" % (parameter.name, self._advice.to_leave_out)
        )

    def _push(self, parameter: Parameter, more: bool = False) -> None:
        factor = self._factor
        if factor is None:
            factor = self._factor = self._begin_pushes()
        if factor == 0.0:
            parameter.forget_gradient()
            if not parameter.take_zero_gradient():
                return parameter.skip()
        if parameter.key.sparse:
            partitions.note_push(self._session, parameter.key)
        if factor not in (0.0, 1.0):
            parameter.scale_gradient(factor)
        parameter.push(more)

    def _begin_pushes(self) -> float:
        """Before the round's first one. By what its gradients are to be multiplied."""
        factor = self._weights.factor()
        self._before_push()
        return factor

    def weigh(self, samples: Any) -> None:
        """See optimizer.py."""
        combinations.require(self._session.label, choices.WEIGHTS, choices.of_staleness(self._staleness))
        left = next((one.name for one in self._parameters.values() if one.is_new), None)
        if left is not None:
            raise ValueError("weigh() comes before the step's last backward pass, and the gradient of %s is under way "
                             "already. Call it before that, and run all but the last backward pass of a step in `with "
                             "optimizer.no_sync():`" % left)  # fmt: skip
        self._weights.begin(samples)
        self._factor = None

    def _count_step(self, samples: Optional[float]) -> Any:
        return self._control.count_step(self._optimizer.param_groups, samples)

    # Steps

    def step(self, closure: Optional[Callable]) -> Any:
        self._watched_gradients.end()
        if closure is None and self._only_makes_states():
            return self._make_states()
        return self._step(closure)

    def _only_makes_states(self) -> bool:
        """Whether the step trains nothing: torch.distributed.checkpoint takes one so that the optimizer has its states,
        with a learning rate of zero, and gradients of zero that no backward pass has made."""
        if any("lr" not in group or rules.number(group["lr"]) != 0 for group in self._optimizer.param_groups):
            return False
        if self._has_gradients:
            return False
        gradients = [tensor.grad for tensor in self._parameters if tensor.grad is not None]
        return bool(gradients) and not any(gradient.any() for gradient in gradients)

    def _make_states(self) -> None:
        self._land()
        self._update()
        for parameter in self._parameters.values():
            parameter.note_written()

    def _update(self, closure: Optional[Callable] = None) -> Any:
        """The optimizer's own step; its hooks have run around ours."""
        step = self._kind.step
        return getattr(step, "__wrapped__", step)(self._optimizer, *(() if closure is None else (closure,)))

    def _complete_round(self, learns: bool = True) -> None:
        """Each parameter that has no round in this step gets one: with its gradient, if there is one. `learns`: of how
        many backward passes a gradient is, in later steps, too; one that is left out may have fewer."""
        self._watched_gradients.end()
        self._begin()
        self._forward.end_step()
        for parameter in self._parameters.values():
            if parameter.is_new:
                continue
            if parameter.tensor.grad is None and not parameter.take_zero_gradient():
                parameter.skip()
                continue
            parameter.require_gradient_of_backward()
            if learns:
                parameter.expected_fires = parameter.expected_fires or parameter.fires
            self._push(parameter)
        self._weights.end_pushes()
        self._is_counted, self._factor = True, None

    def zero_grad(self, zero_grad: Callable[[bool], None], set_to_none: bool,
                  parameters: Optional[Iterable[Parameter]] = None) -> None:  # fmt: skip
        """`zero_grad()` of torch's, and what it means to the gradients of `parameters` that have left; None: of all."""
        if not self._has_begun and any(one.fires > 0 for one in self._parameters.values()):
            self._note_dropped()
        with pending.untouched(), self._watched_gradients.paused():
            zero_grad(set_to_none)
        for parameter in self._parameters.values() if parameters is None else parameters:
            parameter.zero_left_gradient(set_to_none)
            if not parameter.is_new:
                parameter.forget_gradient()
        if not self._has_gradients:
            self._watched_gradients.end()

    def _drops_gradients(self, parameters: Optional[Iterable[Parameter]]) -> bool:
        """Whether zero_grad() of these, or of all, does so with gradients that all workers' step is made of. ValueError
        if it may not."""
        dropped = self._parameters.values() if parameters is None else parameters
        if not self._is_as_ddp or not any(one.is_new or one.fires for one in dropped):
            return False
        if self._is_joining:
            combinations.require(self._session.label, choices.JOIN, choices.LEFT_OUT)
        return True

    def _note_dropped(self) -> None:
        self._dropped += 1
        if self._dropped == _MANY_DROPPED and self._session.is_first:
            log.warning(
                "%s: %s.zero_grad() has dropped gradients %d times, and step() was never called. P3 shares what step() "
                "does: with an optimizer that steps by other methods, as SAM's first_step() and second_step(), each "
                "worker trains by itself",
                self._session.label, self._kind.__name__, self._dropped,
            )  # fmt: skip

    def parameters_of(self, model: torch.nn.Module) -> List[Parameter]:
        return [self._parameters[tensor] for tensor in model.parameters() if tensor in self._parameters]

    def _begin(self) -> None:
        require_same_parameters(self._optimizer, self._parameters)
        if self._has_begun:
            return self._look_at_groups()
        self._has_begun, self._descriptions = True, self._describe()
        for store, description in zip(self._stores, self._descriptions):
            if description is not None:
                self._session.set_optimizer(store, description)
        self._relink_groups()
        for parameter in self._parameters.values():
            self._session.restore(parameter.key, takes_mean=True)
        self._give_loaded()

    def _relink_groups(self) -> None:
        """Each parameter gets its group, of which load_state_dict makes new ones, and what the servers have for it."""
        for group, description in zip(self._optimizer.param_groups, self._descriptions):
            for tensor in group["params"]:
                self._parameters[tensor].group, self._parameters[tensor].description = group, description

    def _end_step(self) -> None:
        self._watch.end_step()
        self._is_counted, self._control.left_out = False, 0
        self._weights.end_step()
        self._check.after_step(self._land)
        self._comparisons.end_step()
        rules.forget_numbers()
        if self._plans is not None:
            self._plans.end_step()

    # Uneven data

    def join(self, after_step: Optional[Callable[[], Any]]) -> None:
        if self._weights.is_begun:
            raise ValueError("%s: weigh() has begun a step, which the others wait for: call step() before join()"
                             % self._session.label)  # fmt: skip
        if self._weights.is_used and self._session.goes_on_without:
            combinations.require("%s: join()" % self._session.label, choices.LEAVING, choices.WEIGHTS_OF_ENDED)
        self._begin()
        self._land()
        self._control.left_out = 0

        def follow(count: Count) -> None:
            if self._updates_here:
                self._control.require_same_updates(count, self._optimizer.param_groups)
            self._follow()
            self._check.after_step(self._land)
            if self._plans is not None:
                self._plans.follow()
            if after_step is not None:
                after_step()

        def skip_more() -> None:
            self._skip_more()
            if self._plans is not None:
                self._plans.skip()

        self._control.steps.serve_others(self._parameters.values(), follow, skip_more)

    # The end

    def release(self, why: str = "") -> None:
        """See optimizer.py. `why`: not by the script's own call."""
        self._watched_gradients.end()
        if any(one.is_new for one in self._parameters.values()) or self._weights.is_begun:
            self._break_off()
        for parameter in self._parameters.values():
            parameter.take_last()
        self._land()
        self._bring_states_back()
        self._comparisons.finish()
        self._finish()
        if self._plans is not None:
            self._plans.close()
        while self._unreleased:  # all that are left, if a call before has not come to its end
            self._session.release(self._unreleased[-1])
            store = self._unreleased.pop()
            partitions.forget(self._session, store)
        for undo in self._undo:
            undo()
        self._forward.release()
        for parameter in self._parameters.values():
            parameter.leave()
        snapshots.remove(self)
        self._optimizer._p3 = Released(why)

    def _finish(self) -> None:
        """Until what else the steps have begun is over."""
        self._control.steps.finish()
        if self._plans is not None:
            self._plans.finish()

    def _break_off(self) -> None:
        """The step under way has not come to its step(): all workers end its rounds, and no weight changes."""
        for parameter in self._parameters.values():
            if not parameter.is_new:
                parameter.skip()
        if not self._is_counted:  # others may be further in it
            self._weights.end_pushes()
        for parameter in self._parameters.values():
            parameter.end_without_result()

    # state_dict

    @abstractmethod
    def with_states(self, state_dict: Callable[[], Dict[str, Any]]) -> Dict[str, Any]:
        """`state_dict()`, while the optimizer has all its states. Waits for the device as well."""

    def load(self, load_state_dict: Callable[[Dict[str, Any]], None], content: Dict[str, Any]) -> None:
        self._land()
        load_state_dict(content)
        self._relink_groups()
        self._tell_beginning()

    def _tell_beginning(self) -> None:
        """Workers that each update would drift apart, if they did not begin alike."""
        if self._updates_here:
            self._control.beginning = lambda: beginning.digest(self._kind, self._optimizer)


def _with_sparse_gradients(models: Sequence[torch.nn.Module]) -> Set[torch.Tensor]:
    modules = (module for model in models for module in model.modules())
    return {
        tensor
        for module in modules
        if getattr(module, "sparse", False) is True
        for tensor in module.parameters(recurse=False)
    }
