"""P3 for PyTorch: data-parallel training in which every layer starts when its own new weights have come.

    import p3.torch
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    optimizer = p3.torch.DistributedOptimizer(optimizer, model)

Start the script with `p3 run -n 4 -s 4 python train.py`, or alone: then it trains in this process.
"""

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    text = "p3.torch needs PyTorch, which is not installed. Run: pip install 'p3-training[torch]'"
    raise ModuleNotFoundError(text, name="torch") from None
try:
    torch.empty(0, device="cpu").numpy()
except RuntimeError:
    text = "torch %s was built for another NumPy than the one installed. Run: pip install 'numpy<2'" % torch.__version__
    raise ImportError(text, name="numpy") from None

from p3.frontend import snapshots as _snapshots
from p3.torch import ddp as _ddp
from p3.torch.collectives import all_gather_object, all_reduce, broadcast_object
from p3.torch.factors import factors
from p3.torch.grad_scaler import GradScaler
from p3.torch.local_steps import LocalSteps
from p3.torch.optimizer import DistributedOptimizer
from p3.torch.process_group import process_group
from p3.torch.sites import site as _sites
from p3.torch.snapshots import resume, snapshot
from p3.torch.start import job as _job

__all__ = [
    "DistributedOptimizer", "GradScaler", "LocalSteps", "all_gather_object", "all_reduce", "barrier",
    "broadcast_object", "factors", "local_rank", "local_size", "members", "process_group", "rank", "resume", "site",
    "size", "snapshot", "stats",
]  # fmt: skip

_ddp.refuse()


def site(group: Any) -> None:
    """The processes of this group of torch.distributed are a site: they train synchronously, as by
    DistributedDataParallel, and are one worker of the job, whose sites share their weights by LocalSteps.

    On every process of the default group at the same point, each with the group of its own site, before all else of
    p3.torch; it joins the job, and waits for the other sites. The group's first process, the leader, is the worker: to
    it all of p3.torch is as ever, but for DistributedOptimizer. On the others there are LocalSteps, rank(), size(),
    snapshot() and resume(); all else is a RuntimeError there. See docs/local-steps.md for how to start them.

    ValueError for what is no such group; RuntimeError if this process has joined a job; ConfigError if nothing says how
    the sites meet; errors as of DistributedOptimizer."""
    _sites.enter(group)


def rank() -> int:
    """Rank of this worker, starting at 0. The first call joins the job, as DistributedOptimizer does. The same on all
    processes of a site()."""
    of = _sites.current()
    return _job.current().rank if of is None else of.rank


def size() -> int:
    """Number of workers with which the job has begun. Where lost workers do not end it there may be fewer, and where
    others join it more: members(). Of sites, where there are: site()."""
    of = _sites.current()
    return _job.current().num_workers if of is None else of.size


def members(round: Optional[int] = None, state: Any = None) -> Tuple[int, ...]:
    """The ranks of all workers that are part of the job: all, without those that have departed where lost workers do
    not end it (P3_ON_WORKER_LOSS=continue). The same on every worker: all call it at the same point, where data is
    shared out anew, and it waits for them.

    With `round`, how many epochs or steps are behind all of them, another process may join the job here (`p3 join`, `p3
    run --rejoin`), in the place of a worker that has departed or, up to P3_MAX_WORKERS, as a further one. Its script
    runs from the beginning: p3.torch.resume() returns this `round`, and the `state` that the first worker gives here (a
    dict as of snapshot(): the learning rate scheduler's state_dict, the sampler's, the scaler's ...);
    DistributedOptimizer gets weights, buffers and the optimizer's state; and its first members(round) is this very
    call. So it calls nothing collective between DistributedOptimizer and that, and all wait for it meanwhile.
    ValueError in the middle of a step.

    A process that comes for a lost server takes its place here, too (P3_ON_SERVER_LOSS=continue); it needs no `state`.
    """
    return _snapshots.members(_job.current(), round, state)


def local_rank() -> int:
    """Rank of this worker among those of its machine, starting at 0: to choose a GPU, for example."""
    return _job.current().local_rank


def local_size() -> int:
    """Number of workers on this machine."""
    return _job.current().local_size


def stats() -> Dict[str, float]:
    """What this worker has done so far, flat, for TensorBoard or Weights & Biases: `p3/steps_per_s`, `p3/waited_share`,
    `p3/sent_bytes` and others (docs/watching.md). Cheap: nothing is sent, and nobody is waited for."""
    return _job.current().stats()


def barrier() -> None:
    """Returns when every worker has called it. TimeoutError after P3_WAIT_TIMEOUT_S."""
    _job.current().barrier()
