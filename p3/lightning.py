"""P3 for Lightning, in the place of its DDPStrategy.

    import p3.lightning
    trainer = lightning.Trainer(strategy="p3")  # or strategy=p3.lightning.Strategy()

Start the script with `p3 run -n 4 -s 4 python train.py`, with torchrun, or alone. Gradients and weights are P3's; all
else that Lightning asks torch.distributed for goes through p3.torch.process_group().
"""

from __future__ import annotations

import contextlib
import functools
import os
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional

import torch

try:
    from lightning.fabric.plugins import ClusterEnvironment
except ModuleNotFoundError as error:
    if error.name != "lightning":
        raise
    text = "p3.lightning needs Lightning, which is not installed. Run: pip install 'p3-training[lightning]'"
    raise ModuleNotFoundError(text, name="lightning") from None
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_only

import p3.torch
from p3.torch.requirements import parameters_of
from p3.trainers import former, gradients
from p3.trainers.local import Local, Part
from p3.trainers.marks import mark

__all__ = ["Strategy"]


class Strategy(DDPStrategy):
    """As DDPStrategy, from which it has all but gradients and weights. ValueError names what P3 cannot do.

    Making it joins the job. How many workers there are, and where, is the launcher's to say: Trainer's `devices` and
    `num_nodes` may be left out.

    `local_steps`: the arguments of p3.torch.LocalSteps, as {"every": 30}: each worker trains by itself, and weights are
    exchanged now and then. What is validated, saved, and there at the end are the global ones. With "weigh": True each
    worker's differences count in proportion to the samples of its batches, as Lightning counts them; or to what a
    function of a batch returns.
    """

    def __init__(self, checkpoint_io: Any = None, precision_plugin: Optional[Precision] = None,
                 local_steps: Optional[Mapping[str, Any]] = None) -> None:  # fmt: skip
        self._local_steps, self._local = local_steps, Local(local_steps)
        self._shown = contextlib.ExitStack()  # while it validates
        self._trained: List[torch.optim.Optimizer] = []  # by the fit() under way
        self._resumed_from: Any = None
        self._has_failed = False
        p3.torch.process_group()
        super().__init__(
            cluster_environment=_Workers(), checkpoint_io=checkpoint_io, precision_plugin=precision_plugin
        )

    @classmethod
    def register_strategies(cls, registry: Any) -> None:
        registry.register("p3", cls, description="Training by P3's servers, under `p3 run` or torchrun")

    # Who the workers are: P3 says it.

    @property
    def root_device(self) -> torch.device:
        return self.parallel_devices[self.local_rank % len(self.parallel_devices)]

    @property
    def distributed_sampler_kwargs(self) -> Dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def set_world_ranks(self) -> None:
        rank_zero_only.rank = fabric_rank_zero_only.rank = self.global_rank

    def _configure_launcher(self) -> None:
        pass  # the processes are there

    def setup_distributed(self) -> None:
        self._require_workers()
        reset_seed()
        self.set_world_ranks()
        p3.torch.process_group()
        if not torch.distributed.is_initialized():  # one worker, of which Lightning asks the same
            alone = torch.distributed.HashStore()
            torch.distributed.init_process_group("gloo", store=alone, rank=0, world_size=1)
        has_nccl = self.root_device.type == "cuda" and "nccl" in torch.distributed.get_backend_config()
        self._process_group_backend = "nccl" if has_nccl else "gloo"

    def _require_workers(self) -> None:
        devices, size = len(self.parallel_devices), self.world_size
        on_gpus = self.root_device.type == "cuda" and devices == torch.cuda.device_count()  # devices="auto"
        if devices * self.num_nodes not in (1, size) and not on_gpus:
            raise ValueError(
                "Trainer(devices=%d, num_nodes=%d) are %d workers, and P3's job has %d: leave both out, the launcher "
                "says how many there are" % (devices, self.num_nodes, devices * self.num_nodes, size)
            )

    # Training

    def setup(self, trainer: Any) -> None:
        plugin = self.precision_plugin
        if getattr(plugin, "scaler", None) is not None or type(plugin).optimizer_step not in (
            Precision.optimizer_step,
            MixedPrecision.optimizer_step,
        ):
            raise ValueError("precision=%r steps by itself: P3's trainers have 32-true, 64-true, bf16-true and "
                             "bf16-mixed so far" % plugin.precision)  # fmt: skip
        super().setup(trainer)

    def configure_ddp(self) -> None:
        """The model stays itself."""

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        return model

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            if gradients.is_distributed(optimizer):
                raise ValueError("configure_optimizers() returns an optimizer that is P3's already: return the plain "
                                 "one, the strategy makes it P3's itself")  # fmt: skip
            if isinstance(optimizer, torch.optim.LBFGS):
                raise ValueError("LBFGS computes gradients within its step, for which Lightning would clip and call "
                                 "its hooks before P3 has the mean ones: use another optimizer")  # fmt: skip
        self._local, self._has_failed = Local(self._local_steps), False
        for optimizer in self.optimizers:
            self._local.distribute(optimizer, [self.model])
            self._trained.append(optimizer)
        self.optimizers = self.optimizers  # Lightning's wrappers have the classes that their optimizers had before
        plugin = self.precision_plugin
        plugin.backward = self._backward
        plugin.clip_grad_by_norm, plugin.clip_grad_by_value = self._clip_norm, self._clip_value
        if type(plugin).clip_gradients is MixedPrecision.clip_gradients:
            # That one looks for optimizers that a scaler unscales within their step, and here is no scaler.
            plugin.clip_gradients = functools.partial(Precision.clip_gradients, plugin)

    def _backward(self, *arguments: Any, **keywords: Any) -> None:
        """Before the hooks that come behind it."""
        plugin = self.precision_plugin
        type(plugin).backward(plugin, *arguments, **keywords)
        gradients.watch(self.optimizers)

    def _clip_norm(self, optimizer: Any, clip_val: float) -> None:
        gradients.clip_norm([optimizer], list(parameters_of(optimizer)), clip_val, 2.0)

    def _clip_value(self, optimizer: Any, clip_val: float) -> None:
        gradients.clip_value([optimizer], list(parameters_of(optimizer)), clip_val)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if batch_idx == 0:
            mark(self.lightning_module.trainer.global_step)

    def training_step(self, batch: Any, *arguments: Any, **keywords: Any) -> Any:
        self._local.count([batch], lambda: _samples(batch))
        trainer = self.lightning_module.trainer
        if self.lightning_module.automatic_optimization and not trainer.fit_loop._should_accumulate():
            self._local.tell()  # early; else a step of the optimizer says that it is one
        return super().training_step(batch, *arguments, **keywords)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **keywords: Any) -> Any:
        """As Precision's, but the closure comes before the step, and not in it: in between are hooks and clipping."""
        result = self.precision_plugin._wrap_closure(model or self.lightning_module, optimizer, closure)
        self._local.tell(optimizer)
        optimizer.step(**keywords)
        return result

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with gradients.no_sync(self.optimizers):
            yield

    # Local steps: what is evaluated and saved has the global weights

    def on_validation_start(self) -> None:
        super().on_validation_start()
        mark(self.lightning_module.trainer.global_step)
        self._shown.enter_context(self._local.shown())

    def on_validation_end(self) -> None:
        self._shown.close()
        super().on_validation_end()

    def on_train_end(self) -> None:
        self._local.end()
        super().on_train_end()

    def on_exception(self, exception: BaseException) -> None:
        self._has_failed = True
        super().on_exception(exception)

    def teardown(self) -> None:
        self._shown.close()  # if an exception has ended the validation
        if not self._has_failed:
            self._local.end()  # also if there was nothing left to train, of which no hook tells
            gradients.renew_weights(self._trained)  # before Lightning moves the states, and then the weights
        former.set_aside(self._trained)  # another fit() makes others
        self._trained = []
        super().teardown()

    def lightning_module_state_dict(self) -> Dict[str, Any]:
        with self._local.shown():
            state = super().lightning_module_state_dict()
            return {name: _copied(value) for name, value in state.items()} if self._local.is_on else state

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> Dict[str, Any]:
        return super().optimizer_state(optimizer) if self.is_global_zero or not self._local.is_on else {}

    def save_checkpoint(self, checkpoint: Dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, filepath, storage_options)
        part = self._local.part("save_checkpoint()") if "optimizer_states" in checkpoint else None
        if part is not None:
            self.checkpoint_io.save_checkpoint({"optimizers": part}, _own(filepath), storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: Optional[bool] = None) -> Dict[str, Any]:
        self._resumed_from = checkpoint_path
        return super().load_checkpoint(checkpoint_path, weights_only)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)

        def read() -> Optional[Part]:
            try:
                return self.checkpoint_io.load_checkpoint(_own(self._resumed_from), weights_only=True)["optimizers"]
            except FileNotFoundError:
                return None

        self._local.take(read, "fit(ckpt_path=)")

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        if self._local.is_on:
            self.checkpoint_io.remove_checkpoint(_part_of(filepath))  # of a link there is none


def _own(checkpoint: Any) -> str:
    """The file of this worker's part; beside what a link leads to."""
    path = os.fspath(checkpoint)
    return _part_of(os.path.realpath(path) if os.path.islink(path) else path)


def _part_of(path: Any) -> str:
    return "%s.p3_local_%d" % (os.fspath(path), p3.torch.rank())


def _samples(batch: Any) -> int:
    try:
        return extract_batch_size(batch)
    except MisconfigurationException:
        raise ValueError('local_steps has weigh=True, and Lightning cannot count the samples of a %s: give a function, '
                         'as {"weigh": lambda batch: len(batch.x)}' % type(batch).__name__) from None  # fmt: skip


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


class _Workers(ClusterEnvironment):
    """P3's workers, as Lightning asks for them."""

    creates_processes_externally = True

    @property
    def main_address(self) -> str:
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        return int(os.environ.get("MASTER_PORT", "0"))

    @staticmethod
    def detect() -> bool:
        return False  # the strategy brings it

    def world_size(self) -> int:
        return p3.torch.size()

    def set_world_size(self, size: int) -> None:
        pass

    def global_rank(self) -> int:
        return p3.torch.rank()

    def set_global_rank(self, rank: int) -> None:
        pass

    def local_rank(self) -> int:
        return p3.torch.local_rank()

    def node_rank(self) -> int:
        """Lightning asks whether it is the first one, on which ranks are counted as they are in the job."""
        return 0 if p3.torch.rank() == p3.torch.local_rank() else 1


if "p3" not in StrategyRegistry.available_strategies():
    Strategy.register_strategies(StrategyRegistry)
