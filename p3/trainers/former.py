"""Optimizers whose training is over, of all trainers of this process: the next one to begin releases them.

A framework drops an optimizer without a word, and the garbage collector has its own time on each worker, while to
release is a call of all workers. So they wait here for the point that all come to, the last ones to the end of the job.
Until then they work on, as a script may save them; or train on, if a framework takes them up again.
"""

from __future__ import annotations

from typing import Any, Iterable, List

from p3.trainers import gradients

_former: List[Any] = []


def set_aside(optimizers: Iterable[Any]) -> None:
    """On every worker, when their training is over."""
    _former.extend(one for one in optimizers if gradients.is_distributed(one) and not _is_former(one))


def take_up(optimizer: Any) -> None:
    """It trains again."""
    _former[:] = [one for one in _former if one is not optimizer]


def release_all() -> None:
    """On every worker, before another training. Waits for the others. One whose release() raises is given up: it would
    do so before each later training, too."""
    while _former:
        optimizer = _former.pop(0)
        if gradients.is_distributed(optimizer):  # the script may have released it
            optimizer.release()


def _is_former(optimizer: Any) -> bool:
    return any(one is optimizer for one in _former)
