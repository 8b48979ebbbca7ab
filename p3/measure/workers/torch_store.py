"""How a worker joins a store of torch's and leaves it.

Stores: `p3_torch`, `p3_torch:4` with a staleness of 4, and `ddp:25` for DistributedDataParallel on Gloo with buckets of
25 MB. DDP gets what its documentation advises: gradient_as_bucket_view and static_graph.

A worker that clips by the global norm gives max_norm to distribute(), for P3's optimizer, which then clips by itself,
and calls clip_as_usual() between backward() and step(), for all others.
"""

import os
import sys
from typing import Optional, Tuple

import torch
from torch import nn


def is_p3(store: str) -> bool:
    return store.partition(":")[0] == "p3_torch"


def staleness(store: str) -> int:
    """Of one of P3's."""
    return int(store.partition(":")[2] or 0)


def distribute(
    store: str, net: nn.Module, optimizer: torch.optim.Optimizer, max_norm: Optional[float] = None
) -> Tuple[int, int, nn.Module]:
    """Joins the store's job; rank, number of workers, and the net to call."""
    if is_p3(store):
        import p3.torch

        p3.torch.DistributedOptimizer(optimizer, net, staleness=staleness(store), max_grad_norm=max_norm)
        return p3.torch.rank(), p3.torch.size(), net
    torch.distributed.init_process_group("gloo")
    net = nn.parallel.DistributedDataParallel(
        net, bucket_cap_mb=float(store.partition(":")[2]), gradient_as_bucket_view=True, static_graph=True
    )
    return torch.distributed.get_rank(), torch.distributed.get_world_size(), net


def clip_as_usual(store: str, net: nn.Module, max_norm: Optional[float]) -> None:
    """What a script does without P3; None: nothing."""
    if max_norm is not None and not is_p3(store):
        nn.utils.clip_grad_norm_(net.parameters(), max_norm)


def wait_for_all(store: str) -> None:
    """Returns when every worker of the store's job has called it."""
    if is_p3(store):
        import p3.torch

        p3.torch.barrier()
    else:
        torch.distributed.barrier()


def leave(is_right: bool) -> None:
    """The last call of a worker. One of DDP ends here with its exit status, once all have come: with Gloo's threads and
    connections, which torch would end now, a process that had trained rightly was seen to fail."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0 if is_right else 1)


def weights(net: nn.Module):
    """All of the net's state as NumPy arrays, whatever DDP has put around it."""
    return [value.numpy() for value in getattr(net, "module", net).state_dict().values()]
