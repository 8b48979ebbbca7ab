"""Snapshots of a torch job: p3.torch.snapshot() and p3.torch.resume().

The servers' copies are the values of all keys, with the optimizer's state where the servers update. What is left, each
worker writes into its own part: its script's state, the counts of updates, buffers, and where the workers update the
weights and states. Parameters take the rest back when their optimizer is made distributed again.
"""

from __future__ import annotations

import weakref
from typing import Any, Dict, List, Optional

import torch

from p3.snapshots import tree
from p3.torch import job
from p3.torch.arrays import as_numpy
from p3.worker.resumed import Resumed

_optimizers: List[weakref.ref] = []  # Rounds, in the order in which they were made, which is the same on all workers
_made = 0  # so many that follow no other: their places in a snapshot
_released = 0  # and so many were released, whom nobody has followed yet


def _type_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).partition(".")[2]


tree.register(
    "torch",
    tree.ArrayKind(
        torch.Tensor,
        _type_name,
        as_numpy,
        lambda array, dtype: torch.from_numpy(array.copy()).view(getattr(torch, dtype)),
        lambda tensor: tensor.detach().to("cpu", copy=True).contiguous(),
        lambda tensor: "int16" if tensor.dtype == torch.bfloat16 else _type_name(tensor),
    ),
)


def snapshot(round: int, state: Any = None) -> None:
    """Takes a snapshot of the whole job, if P3_SNAPSHOT_DIR is set and this round is due (P3_SNAPSHOT_EVERY).

    Every worker calls it after each optimizer.step(), with the number of steps taken so far. `state` is what this
    worker alone needs to go on: a dict of names to tensors, arrays, numbers, strings, None, and lists and dicts of
    these (the learning rate scheduler's state_dict, random states, the position in the data ...); ValueError names what
    cannot be in it. Where the servers update, it waits only for parameters without a gradient in this step, and for the
    snapshot before if that is still being written.
    """
    session = job.current()
    optimizers = living()
    if not session.snapshots.due(round):
        return session.progress.mark(round)
    keys = [key for one in optimizers for key in one.keys()]
    own = {"script": state, "optimizers": [one.own_state() for one in optimizers]}
    session.progress.mark(round)
    session.snapshots.take(round, keys, own)


def resume() -> Resumed:
    """Brings the job back to its newest valid snapshot: on every worker, before the first DistributedOptimizer.

    Returns (round, state): how many steps were taken, and what this worker gave snapshot() then; (0, None) where there
    is none. Each DistributedOptimizer then begins with the snapshot's parameters, buffers and states instead of the
    script's; make all of them, in the same order. Blocks, at most P3_WAIT_TIMEOUT_S. ValueError if the snapshot does
    not fit this job; a damaged one is logged, and the one before it taken.

    The snapshot's job may have had another number of workers: `workers` of what is returned. A rank that it did not
    have gets rank 0's state and buffers, and then `from_rank` is not its own (docs/reliability.md).
    """
    return job.current().resume(servers_load=True).map(lambda state: state.get("script"))


def living() -> List[Any]:
    """Those that take part, in the order in which they were made."""
    return [one for one in (reference() for reference in _optimizers) if one is not None]


def remove(optimizer: Any) -> None:
    """It was released, and takes part no more."""
    global _released
    _optimizers[:] = [reference for reference in _optimizers if reference() is not optimizer]
    _released += 1


def add(optimizer: Any) -> Optional[Dict[str, Any]]:
    """A distributed optimizer is made: takes part from now on. What it gave as own_state(), if the job has resumed, and
    nobody has begun from that before: who follows an optimizer that was released begins from the model."""
    global _made, _released
    _optimizers.append(weakref.ref(optimizer))
    if _released > 0:
        _released -= 1
        return None
    number, _made = _made, _made + 1
    own = job.current().snapshots.own
    if own is None:
        return None
    saved = own["state"]["optimizers"]
    if number >= len(saved):
        raise ValueError("resume: the snapshot was taken with %d distributed optimizers, and this job makes more"
                         % len(saved))  # fmt: skip
    return saved[number]
