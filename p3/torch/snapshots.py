"""Snapshots of a torch job: p3.torch.snapshot() and p3.torch.resume(), over p3/frontend/snapshots.py.

What each optimizer adds to them is in rounds.py: the counts of updates, buffers, and where the workers update the
weights and states. Parameters take the rest back when their optimizer is made distributed again.
"""

from __future__ import annotations

from typing import Any, Dict, List

import torch

from p3.frontend import snapshots
from p3.snapshots import tree
from p3.torch.parameters.arrays import as_numpy
from p3.torch.sites import site as sites
from p3.torch.start import job
from p3.worker.snapshots.resumed import Resumed


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
    snapshot before if that is still being written. Of a site() the leader's state counts.
    """
    site = sites.current()
    if site is None or site.is_leader:  # the others have the same
        snapshots.take(job.current(), round, state)


def resume() -> Resumed:
    """Brings the job back to its newest valid snapshot: on every worker, before the first DistributedOptimizer.

    Returns (round, state): how many steps were taken, and what this worker gave snapshot() then; (0, None) where there
    is none. Each DistributedOptimizer then begins with the snapshot's parameters, buffers and states instead of the
    script's; make all of them, in the same order. Blocks, at most P3_WAIT_TIMEOUT_S. ValueError if the snapshot does
    not fit this job; a damaged one is logged, and the one before it taken. In a process that joins a running job it is
    what members() was given there.

    The snapshot's job may have had another number of workers: `workers` of what is returned. A rank that it did not
    have gets rank 0's state and buffers, and then `from_rank` is not its own (docs/reliability.md). All members of a
    site() get what its leader has given; state_of() is for the leader alone.
    """
    site = sites.current()
    return snapshots.resume(job.current()) if site is None else _resume(site)


def _resume(site: sites.Site) -> Resumed:
    found: List[Resumed] = []

    def lead() -> Dict[str, Any]:
        found.append(snapshots.resume(job.current()))
        one = found[0]
        return {"round": one.round, "state": one.state, "workers": one.workers, "from_rank": one.from_rank}

    told = site.tree("resume()", lead)
    return found[0] if site.is_leader else Resumed(**told, states=site.refuse)
