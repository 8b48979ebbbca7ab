"""P3 for Hugging Face Accelerate, in the place of its DistributedDataParallel.

    from p3.accelerate import Accelerator  # instead of: from accelerate import Accelerator

Start the script with `p3 run -n 4 -s 4 python train.py`, with torchrun, or alone. Gradients and
weights are P3's; all else that Accelerate asks torch.distributed for goes through p3.torch.process_group().
"""

from __future__ import annotations

import contextlib
import inspect
import os
from typing import Any, Dict, Iterator, List, Mapping, Optional, Union

import torch

try:
    import accelerate
except ModuleNotFoundError as error:
    if error.name != "accelerate":
        raise
    text = "p3.accelerate needs Accelerate, which is not installed. Run: pip install 'p3-training[accelerate]'"
    raise ModuleNotFoundError(text, name="accelerate") from None

import p3.torch
from p3.torch.process_group import wait_for
from p3.trainers import gradients
from p3.trainers.local import Local

__all__ = ["Accelerator"]

# What would take the place of P3, as an argument, or as the variable that `accelerate launch` sets for it.
_OTHERS = {
    "deepspeed_plugin": "ACCELERATE_USE_DEEPSPEED",
    "deepspeed_plugins": "ACCELERATE_USE_DEEPSPEED",
    "fsdp_plugin": "ACCELERATE_USE_FSDP",
    "megatron_lm_plugin": "ACCELERATE_USE_MEGATRON_LM",
    "parallelism_config": "ACCELERATE_USE_PARALLELISM_CONFIG",
    "torch_tp_plugin": "",
}


def join() -> None:
    """Joins the job, and has Accelerate see its workers: before Accelerate's state is made."""
    if not torch.cuda.is_available():
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")  # without which several processes on CPUs train apart
    p3.torch.process_group()


class Accelerator(accelerate.Accelerator):
    """As accelerate's, which says what its methods do. Every worker makes the same calls in the same order.

    prepare() gets each optimizer with its models, or after them. ValueError names what P3 cannot do.

    `local_steps`: the arguments of p3.torch.LocalSteps, as {"every": 30}: each worker trains by itself, and weights are
    exchanged now and then. Then evaluate `with accelerator.global_weights():`, and end with take_global(). Where
    batches are of different sizes, weigh() says so.
    """

    _is_preparing = _is_joining = False

    def __init__(self, *arguments: Any, local_steps: Optional[Mapping[str, Any]] = None, **keywords: Any) -> None:
        self._local = Local(local_steps)
        if self._local.weighs:
            raise ValueError('local_steps has "weigh": Accelerator does not see which batches are trained on; leave it '
                             "out, and call accelerator.weigh(len(x)) for each batch")  # fmt: skip
        given = inspect.signature(accelerate.Accelerator.__init__).bind(self, *arguments, **keywords).arguments
        _require_alone(given)
        join()
        super().__init__(*arguments, **keywords)
        if self.init_handler is not None:  # it is for a group that Accelerate would have made
            wait_for(self.init_handler.timeout)
        self.require_fitting()

    @classmethod
    def take_over(cls, accelerator: accelerate.Accelerator, local: Local) -> None:
        """One that a framework has made, after join(), becomes P3's. ValueError as of a new one."""
        accelerator.__class__ = cls
        accelerator._local = local
        accelerator.require_fitting()

    def require_fitting(self) -> None:
        """ValueError if what Accelerate has found out is not the job, or not for P3."""
        job = (p3.torch.rank(), p3.torch.size())
        if (self.process_index, self.num_processes) != job:
            raise ValueError(
                "Accelerate has made this process number %d of %d, and P3 made it %d of %d: import p3.accelerate or "
                "p3.transformers before anything makes Accelerate's state (Accelerator, PartialState, "
                "TrainingArguments), and leave the number of processes to the launcher"
                % (self.process_index, self.num_processes, *job)
            )
        if self.distributed_type.value not in ("NO", "MULTI_CPU", "MULTI_GPU"):
            raise ValueError("Accelerate is set up for %s: P3 trains whole models, on CPUs and CUDA devices. Undo "
                             "that, or use accelerate's own Accelerator" % self.distributed_type.value)
        if self.mixed_precision not in ("no", "bf16"):
            raise ValueError("mixed_precision=%r: P3's trainers have 'no' and 'bf16' so far" % self.mixed_precision)
        if self.ddp_handler is not None and self.ddp_handler.comm_hook.value != "no":
            raise ValueError("comm_hook is DistributedDataParallel's, whose place P3 takes: leave it out")

    def prepare(self, *arguments: Any, **keywords: Any) -> Any:
        for one in arguments:
            if isinstance(one, torch.optim.Optimizer):
                self._require_plain(one)
        self._is_preparing = True
        try:
            prepared = super().prepare(*arguments, **keywords)
        finally:
            self._is_preparing = False
        models = [one for one in (prepared if len(arguments) > 1 else [prepared]) if isinstance(one, torch.nn.Module)]
        # First those that are P3's, which were prepared before: what no training takes up, a new one releases.
        for optimizer in sorted(self._optimizers, key=lambda one: not gradients.is_distributed(one.optimizer)):
            self._distribute(optimizer, models)
        return prepared

    def free_memory(self, *objects: Any) -> Any:
        """As Accelerate's. Call it on every worker when the training of the prepared optimizers is over: when a new one
        is prepared next, they are released, with all that servers keep for them, except those that have been prepared
        again by then."""
        self._local.set_aside(self.inner_optimizers)
        return super().free_memory(*objects)

    def prepare_model(self, model: torch.nn.Module, device_placement: Any = None, evaluation_mode: bool = False) -> Any:
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            raise ValueError("the model is in DistributedDataParallel, whose place P3 takes: pass the model itself")
        return super().prepare_model(model, device_placement, evaluation_mode=True)  # which wraps it in nothing

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: Any = None) -> Any:
        self._require_plain(optimizer)
        prepared = super().prepare_optimizer(optimizer, device_placement)
        if not self._is_preparing:
            self._distribute(prepared, [])
        return prepared

    def _require_plain(self, optimizer: torch.optim.Optimizer) -> None:
        if gradients.is_distributed(optimizer):
            raise ValueError("the optimizer is P3's already: give Accelerator the plain one, it makes it P3's itself")
        if type(optimizer).__name__ in ("Lomo", "AdaLomo"):
            raise ValueError("%s updates within backward(): P3 cannot train with it" % type(optimizer).__name__)

    def _distribute(self, optimizer: Any, models: List[torch.nn.Module]) -> None:
        """`models`: that came with it, as they were returned: compiled, perhaps; else all that Accelerate knows."""
        if gradients.is_distributed(optimizer.optimizer):
            return self._local.take_up(optimizer.optimizer)
        if gradients.has_unknown(optimizer, models):
            models = list(self._models)
        if gradients.has_unknown(optimizer, models):
            raise ValueError(
                "prepare() has not seen the model of which this optimizer has parameters: pass it to the same "
                "prepare(), or to one before: accelerator.prepare(model, optimizer)"
            )
        self._local.distribute(optimizer.optimizer, models)

    @property
    def inner_optimizers(self) -> List[torch.optim.Optimizer]:
        """The prepared ones, without Accelerate's wrappers."""
        return [one.optimizer for one in self._optimizers]

    @contextlib.contextmanager
    def no_sync(self, model: torch.nn.Module) -> Iterator[None]:
        with gradients.no_sync(gradients.training(self.inner_optimizers, model.parameters())):
            yield

    @staticmethod
    def trigger_sync_in_backward(model: torch.nn.Module) -> Any:
        raise ValueError("trigger_sync_in_backward: with P3, what counts is where backward() is called; call the last "
                         "one outside no_sync()")  # fmt: skip

    def backward(self, loss: torch.Tensor, **keywords: Any) -> None:
        # With sync_each_batch, too: the mean of the sums is the sum of the means.
        with contextlib.nullcontext() if self.sync_gradients else gradients.no_sync(self.inner_optimizers):
            super().backward(loss, **keywords)
        if not self._is_joining:  # a worker that has run out of batches could not change gradients with the others
            gradients.watch(self.inner_optimizers)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        self._require_clipping("clip_grad_norm_")
        return gradients.clip_norm(self.inner_optimizers, _listed(parameters), max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        self._require_clipping("clip_grad_value_")
        gradients.clip_value(self.inner_optimizers, _listed(parameters), clip_value)

    def _require_clipping(self, name: str) -> None:
        if not self.sync_gradients and not self._local.is_on:
            raise ValueError("%s while gradients are accumulated would clip those of this worker alone: call it in `if "
                             "accelerator.sync_gradients:`" % name)  # fmt: skip
        if self._is_joining:
            raise ValueError("%s in join_uneven_inputs: a worker that has run out of batches could not clip with the "
                             "others; leave even_batches=True" % name)  # fmt: skip

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: Any = None) -> Iterator[None]:
        """Workers that run out of batches follow the others' steps, with gradients of zero. ValueError with prepared
        schedulers, several optimizers, or if gradients are clipped or a step is left out in it, which a worker that
        follows could not do."""
        if self.even_batches if even_batches is None else even_batches:
            yield
            return
        if self._local.is_on:
            raise ValueError("join_uneven_inputs: with local_steps all workers take the same number of steps: leave "
                             "even_batches=True")  # fmt: skip
        if self._schedulers:
            raise ValueError("join_uneven_inputs: a worker that has run out of batches cannot step a scheduler with "
                             "the others; do not prepare the scheduler, or leave even_batches=True")  # fmt: skip
        if len(self._optimizers) > 1:
            raise ValueError("join_uneven_inputs: a worker that has run out of batches follows the steps of one "
                             "optimizer; prepare one, or leave even_batches=True")  # fmt: skip
        samplers = [one.batch_sampler for one in self._dataloaders if hasattr(one.batch_sampler, "even_batches")]
        before = [one.even_batches for one in samplers]
        self._is_joining = True
        try:
            for one in samplers:
                one.even_batches = False
            with gradients.joining(self.inner_optimizers):
                yield
        finally:
            self._is_joining = False
            for one, value in zip(samplers, before):
                one.even_batches = value

    # Local steps: what is evaluated and saved has the global weights

    @contextlib.contextmanager
    def global_weights(self) -> Iterator[None]:
        """With local_steps: within it the prepared models have the global weights, to evaluate or to save them. Without
        it does nothing."""
        with self._local.shown():
            yield

    def weigh(self, samples: Union[float, torch.Tensor]) -> None:
        """With local_steps: this batch is of so many samples or tokens, and this worker's differences weigh as much in
        the mean as all of them since the last exchange. For each batch, before its backward pass, also of a step that
        accumulates several `with accelerator.accumulate(model):`; on every worker. ValueError if it is no number from 0
        on, a second time in a step, before prepare(), and without local_steps."""
        if not self._local.optimizers:
            raise ValueError("accelerator.weigh() is of local steps: say Accelerator(local_steps=...), and prepare() "
                             "the optimizer before; without local steps leave it out")  # fmt: skip
        self._local.add(samples)
        if self.sync_gradients:
            self._local.tell()

    def take_global(self) -> None:
        """With local_steps, at the end of a training: the prepared models have the global weights from here on. On
        every worker; RuntimeError if some have taken more steps than others. Without it does nothing."""
        self._local.end()

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> Dict[str, Any]:
        """As Accelerate's; with local_steps a copy of the global weights."""
        with self.global_weights():
            state = super().get_state_dict(model, unwrap)
            return {name: value.clone() for name, value in state.items()} if self._local.is_on else state

    def save_state(self, output_dir: Any = None, *arguments: Any, **keywords: Any) -> Any:
        folder = super().save_state(output_dir, *arguments, **keywords)
        self._local.save_in(folder, "save_state()")
        return folder

    def load_state(self, input_dir: Any = None, *arguments: Any, **keywords: Any) -> None:
        folders: List[str] = []
        hook = self.register_load_state_pre_hook(lambda _models, folder: folders.append(folder))
        try:
            super().load_state(input_dir, *arguments, **keywords)
        finally:
            hook.remove()
        self._local.load_from(folders[0], "load_state()")


def _require_alone(given: Any) -> None:
    for name, variable in _OTHERS.items():
        if given.get(name) is not None:
            raise ValueError("Accelerator(%s=): it splits up the training itself; P3 trains whole models. Leave it "
                             "out, or use accelerate's own Accelerator" % name)  # fmt: skip
        if os.environ.get(variable, "false").lower() == "true":
            raise ValueError("%s=true, as accelerate's configuration says: P3 cannot train with it. Unset it, or use "
                             "accelerate's own Accelerator" % variable)  # fmt: skip
    if given.get("mixed_precision") not in (None, "no", "bf16"):
        raise ValueError("mixed_precision=%r: P3's trainers have 'no' and 'bf16' so far" % given["mixed_precision"])


def _listed(parameters: Any) -> List[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
