"""P3 for the Trainer of Hugging Face transformers, in the place of its DistributedDataParallel.

    from p3.transformers import Trainer  # instead of: from transformers import Trainer

Start the script with `p3 run -n 4 -s 4 python train.py`, with torchrun, or alone. Importing this
joins the job, because TrainingArguments ask for its workers as soon as they are made. For other trainers, such as
TRL's: `class Trainer(p3.transformers.OnP3, trl.SFTTrainer): pass`.
"""

from __future__ import annotations

import copy
import functools
import multiprocessing
from typing import Any, Callable, Mapping, Optional

try:
    import transformers
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    text = "p3.transformers needs transformers, which is not installed. Run: pip install 'p3-training[transformers]'"
    raise ModuleNotFoundError(text, name="transformers") from None

from transformers.trainer_pt_utils import find_batch_size

from p3.accelerate import Accelerator, join
from p3.torch.process_group import wait_for
from p3.trainers import gradients
from p3.trainers.local import Local
from p3.trainers.marks import mark

__all__ = ["OnP3", "Seq2SeqTrainer", "Trainer"]

if multiprocessing.parent_process() is None:  # a DataLoader's process that imports the script is no worker
    join()


def _hear_timeouts() -> None:
    """Of the group, which is there before TrainingArguments are made: its ddp_timeout counts as if that made it, where
    transformers itself heeds it on GPUs alone. Call it once."""
    check = transformers.TrainingArguments.__post_init__

    @functools.wraps(check)
    def heard(self: Any) -> None:
        check(self)
        wait_for(self.ddp_timeout_delta)

    transformers.TrainingArguments.__post_init__ = heard


_hear_timeouts()


class OnP3:
    """What a Trainer needs to train by P3; to be named before it among the bases.

    `local_steps`: the arguments of p3.torch.LocalSteps, as {"every": 30}: each worker trains by itself, and weights are
    exchanged now and then. What is evaluated, saved, and there at the end are the global ones. With "weigh": True each
    worker's differences count in proportion to the tokens that have labels, by which the Trainer divides its loss, or
    where it counts none to samples; or to what a function of a batch returns.
    """

    def __init__(self, *arguments: Any, local_steps: Optional[Mapping[str, Any]] = None, **keywords: Any) -> None:
        self._local = Local(local_steps)
        super().__init__(*arguments, **keywords)

    def create_accelerator_and_postprocess(self) -> None:
        _require_possible(self.args)
        if self._local.is_on and self.args.average_tokens_across_devices:
            # Each loss is of its worker's tokens, and no step waits to count the others'.
            self.args = copy.copy(self.args)  # the script may have another Trainer with the same ones
            self.args.average_tokens_across_devices = False
        if hasattr(self, "accelerator"):  # of a trial of hyperparameter_search()
            self.accelerator.free_memory()
        super().create_accelerator_and_postprocess()
        Accelerator.take_over(self.accelerator, self._local)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """The batches of a step of the optimizer: all of them are known before it begins."""
        batches, tokens = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._local.count(batches, lambda: sum(map(_samples, batches)) if tokens is None else tokens)
        if len(batches) == num_batches:  # else data have ended early, and the step goes on with the next epoch's
            self._local.tell()
        return batches, tokens

    def _run_epoch(self, *arguments: Any, **keywords: Any) -> Any:
        mark(self.state.global_step)
        return super()._run_epoch(*arguments, **keywords)

    def _save_checkpoint(self, *arguments: Any, **keywords: Any) -> None:
        super()._save_checkpoint(*arguments, **keywords)
        mark(self.state.global_step)

    def evaluate(self, *arguments: Any, **keywords: Any) -> Any:
        with self._local.shown():
            return super().evaluate(*arguments, **keywords)

    def predict(self, *arguments: Any, **keywords: Any) -> Any:
        with self._local.shown():
            return super().predict(*arguments, **keywords)

    def save_model(self, *arguments: Any, **keywords: Any) -> None:
        with self._local.shown():
            super().save_model(*arguments, **keywords)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        self._local.save_in(output_dir, "a checkpoint")

    def _load_optimizer_and_scheduler(self, checkpoint: Optional[str]) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self._local.load_from(checkpoint, "resume_from_checkpoint")

    def _load_best_model(self) -> None:
        with gradients.loads_apart(self.accelerator.inner_optimizers):
            super()._load_best_model()

    def _finalize_training(self, *arguments: Any, **keywords: Any) -> Any:
        self._local.end()
        if not self.args.load_best_model_at_end:
            return super()._finalize_training(*arguments, **keywords)
        callbacks = self.callback_handler.callbacks
        callbacks.insert(0, _AtEnd(self._share_best_model))  # others look at the model
        try:
            return super()._finalize_training(*arguments, **keywords)
        finally:
            del callbacks[0]

    def _share_best_model(self) -> None:
        """Other hosts' disks may know nothing of it."""
        for optimizer in self.accelerator.inner_optimizers:
            optimizer.broadcast()


class _AtEnd(transformers.TrainerCallback):
    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def on_train_end(self, *_arguments: Any, **_keywords: Any) -> None:
        self._call()


class Trainer(OnP3, transformers.Trainer):
    """As transformers' own, which says what its arguments and methods do. ValueError names what P3 cannot do."""


class Seq2SeqTrainer(OnP3, transformers.Seq2SeqTrainer):
    """As transformers' own."""


def _samples(batch: Any) -> int:
    found = find_batch_size(batch)
    if found is None:
        raise ValueError('local_steps has weigh=True, and a batch has no tensor, by which to count its samples: give a '
                         'function, as {"weigh": lambda batch: len(batch["texts"])}')  # fmt: skip
    return found


def _require_possible(args: Any) -> None:
    for name in ("deepspeed", "fsdp", "parallelism_config"):
        if getattr(args, name, None):
            raise ValueError("TrainingArguments(%s=): it splits up the training itself; P3 trains whole models. Leave "
                             "it out, or use transformers' own Trainer" % name)  # fmt: skip
    if args.auto_find_batch_size:
        raise ValueError("auto_find_batch_size: a worker that runs out of memory would leave the others behind in its "
                         "step; set per_device_train_batch_size")  # fmt: skip
    optimizer = str(getattr(args.optim, "value", args.optim))
    if "layerwise" in optimizer or "lomo" in optimizer:
        raise ValueError("optim=%r updates within backward(): P3 cannot train with it" % optimizer)
    if args.n_gpu > 1:
        raise ValueError("this process sees %d GPUs, which Trainer would use by DataParallel: start a worker for each, "
                         "or set CUDA_VISIBLE_DEVICES to one" % args.n_gpu)  # fmt: skip
