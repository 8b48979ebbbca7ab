"""What errors tell a script to do instead: that depends on who has made its optimizer P3's."""

from __future__ import annotations

from typing import NamedTuple


class Advice(NamedTuple):
    to_change: str  # a gradient of which other workers have theirs
    to_change_awaited: str  # the same in a step that waits for them: when the mean ones are there to be changed
    to_wait: str  # for a step to end, whose gradients are under way
    to_write: str  # to a parameter whose value is under way
    to_leave_out: str  # a step behind its backward pass


OF_SCRIPTS = Advice(
    to_change="To clip it, pass max_grad_norm; for other changes pass synchronous=True and call "
    "optimizer.synchronize() before them",
    to_change_awaited="synchronize(): call that before scaler.unscale_(), clipping and other changes",
    to_wait="call this after step() or before backward(), or pass synchronous=True to DistributedOptimizer and call "
    "optimizer.synchronize() before this",
    to_write="Call optimizer.synchronize() before writing to parameters, and optimizer.broadcast() afterwards, on "
    "every worker",
    to_leave_out="pass synchronous=True and call optimizer.synchronize() first",
)

_IN_TRAINERS = (
    "Read it as parameter.grad behind backward(), and change what that gives, which is the mean over all workers: not "
    "a tensor kept from a hook or from before. To clip it, have the trainer do so: TrainingArguments(max_grad_norm=) "
    "of transformers, clip_grad_norm_() of the Accelerator, Trainer(gradient_clip_val=) of Lightning"
)

# Whoever trains by transformers, Accelerate or Lightning makes no DistributedOptimizer (p3/trainers/gradients.py).
OF_TRAINERS = Advice(
    to_change=_IN_TRAINERS,
    to_change_awaited="step(). " + _IN_TRAINERS,
    to_wait="call this behind the optimizer's step or before backward(), in a callback at the step's end: on_step_end "
    "of transformers, on_train_batch_end of Lightning",
    to_write="Write to the parameter itself, which waits for its value, on every worker, and not to a view or an array "
    "of it from before the step",
    to_leave_out="call zero_grad() on every worker before the next one's backward pass",
)
