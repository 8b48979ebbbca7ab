"""torch.distributed beside P3: the default process group over the workers of the job, for what P3 does not do.

Gradients and weights are P3's. The group is for the rest of what scripts and trainers ask torch.distributed for:
metrics, barriers, SyncBatchNorm, samplers. Its traffic is torch's own: neither P3's secret nor its TLS guards it.
"""

from __future__ import annotations

import logging
import os
import socket
from datetime import timedelta
from typing import Optional, Sequence

import torch
import torch.distributed as dist

from p3.cluster.node import address_as_set, address_towards, is_loopback, is_numeric
from p3.plan import choices
from p3.settings import Settings
from p3.torch.collectives import all_gather_object, broadcast_object
from p3.torch.sites import site as sites
from p3.torch.start import job, torchrun

log = logging.getLogger("p3.torch")

_timeout: Optional[timedelta] = None  # of the group that was made here


def process_group() -> None:
    """Makes torch.distributed's default group of all workers, if there is none and they are more than one.

    On every worker at the same point; waits for all. Under torchrun they meet at its store; elsewhere rank 0 opens one
    at a port that is free, and RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set in
    this process, as torchrun sets them. ValueError if a group exists whose ranks are not P3's.
    """
    global _timeout
    sites.refuse("p3.torch.process_group()", choices.TRAINERS)
    session = job.current()
    rank, size = session.rank, session.num_workers
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (rank, size):
            raise ValueError(
                "torch.distributed has made this process rank %d of %d, and P3 made it %d of %d: leave out "
                "init_process_group(), and call p3.torch.process_group() instead"
                % (dist.get_rank(), dist.get_world_size(), rank, size)
            )
        return
    if size == 1:
        return
    settings = Settings.from_env(os.environ)
    _timeout = timeout = timedelta(seconds=settings.wait_timeout_s)
    if settings.tls and rank == 0:
        log.warning("P3_TLS=1 does not encrypt what goes through torch.distributed: metrics, and objects of trainers")
    backend = _backend(all_gather_object(_own_gpu(session.local_rank)))
    if torchrun.started(os.environ) and (os.environ["RANK"], os.environ["WORLD_SIZE"]) == (str(rank), str(size)):
        dist.init_process_group(backend, timeout=timeout)
        return
    store = None
    if rank == 0:
        address = _own_address(settings)
        store = dist.TCPStore(address, 0, size, is_master=True, timeout=timeout, wait_for_workers=False)
    address, port = broadcast_object(None if store is None else [address, store.port])
    if store is None:
        store = dist.TCPStore(address, port, size, is_master=False, timeout=timeout, wait_for_workers=False)
    # Here and not in the launcher: this process has joined its job, and cannot be taken for one that torchrun started.
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(session.local_rank),
        LOCAL_WORLD_SIZE=str(session.local_size), MASTER_ADDR=address, MASTER_PORT=str(port),
    )  # fmt: skip
    store = dist.PrefixStore("p3", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


def wait_for(timeout: timedelta) -> None:
    """From here on the group that process_group() has made waits this long for other workers, if that is longer than
    before (at first P3_WAIT_TIMEOUT_S). For frameworks that would have made the group with this time-out. Each worker
    calls it for itself."""
    global _timeout
    if _timeout is not None and timeout > _timeout and dist.is_initialized():
        dist.distributed_c10d._set_pg_timeout(timeout)
        _timeout = timeout


def _own_gpu(local_rank: int) -> Optional[str]:
    """A name in all the world of the GPU that this worker will have by the usual rule; None: none, or without NCCL."""
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        return None
    device = local_rank % torch.cuda.device_count()
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)  # older releases of torch have none
    if uuid is None:
        return "%d of %s on %s" % (device, os.environ.get("CUDA_VISIBLE_DEVICES"), socket.gethostname())
    return str(uuid)


def _backend(gpus: Sequence[Optional[str]]) -> str:
    """The same on all workers, each of which has one of `gpus`. NCCL refuses two workers on one GPU; Gloo takes arrays
    of GPUs, too."""
    return "gloo" if None in gpus or len(set(gpus)) < len(gpus) else "cpu:gloo,cuda:nccl"


def _own_address(settings: Settings) -> str:
    """At which the other workers reach this one: as node.address_beside() has it, of a connection that is made anew."""
    address = address_as_set(settings) or address_towards(settings.root_host)
    if address is None or (is_loopback(address) and not is_numeric(settings.root_host)):
        return settings.root_host
    return address
