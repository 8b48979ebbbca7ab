"""How a worker joins a store of torch's and leaves it.

Stores: `p3_torch`, `p3_torch:4` with a staleness of 4, `p3_local:30` with local steps and an exchange every 30 (six
fragments at most, merged two steps behind their exchange's begin), `p3_local:30:0.5` with an outer momentum of 0.5
besides, and `ddp:25` for DistributedDataParallel on Gloo with buckets of 25 MB. DDP gets what its documentation
advises: gradient_as_bucket_view and static_graph. `alone` is rank RANK of WORLD_SIZE, and computes as the others do,
but talks to nobody. With a plus and a compression (p3/measure/compressions.py): p3_torch+int8, ddp:25+fp16, which takes
one of torch's communication hooks.

PowerSGD needs all gradients in one bucket: its hook waits, in a thread of Gloo's, for what another one of these must
do, and there are two.

A worker that clips by the global norm gives max_norm to distribute(), for P3's optimizer, which then clips by itself,
and calls clip_as_usual() between backward() and step(), for all others.
"""

import argparse
import math
import os
import sys
from typing import Optional, Tuple

import torch
from torch import nn

from p3.measure.compressions import Compression, parse_hook, split


ALONE = "alone"
_FRAGMENTS, _DELAY = 6, 2  # of local steps, at most


def is_p3(store: str) -> bool:
    return _parts(store)[0] in ("p3_torch", "p3_local")


def is_local(store: str) -> bool:
    return _parts(store)[0] == "p3_local"


def staleness(store: str) -> int:
    """Of one of P3's."""
    return int(_parts(store)[1] or 0)


def compression(store: str) -> Optional[Compression]:
    return Compression.of(split(store)[1]) if split(store)[1] else None


def _parts(store: str) -> Tuple[str, str]:
    name, _, value = split(store)[0].partition(":")
    return name, value


def distribute(
    store: str, net: nn.Module, optimizer: torch.optim.Optimizer, max_norm: Optional[float] = None
) -> Tuple[int, int, nn.Module]:
    """Joins the store's job; rank, number of workers, and the net to call."""
    if store == ALONE:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), net
    encoded = compression(store)
    if is_local(store):
        import p3.torch

        steps, _, momentum = _parts(store)[1].partition(":")
        every = int(steps)
        p3.torch.LocalSteps(
            optimizer, net, every=every, fragments=min(every, _FRAGMENTS), delay=min(every - 1, _DELAY),
            codec=None if encoded is None else encoded.of_torch,
            outer={"momentum": float(momentum)} if momentum else None,
        )  # fmt: skip
        return p3.torch.rank(), p3.torch.size(), net
    if is_p3(store):
        import p3.torch

        p3.torch.DistributedOptimizer(
            optimizer, net, staleness=staleness(store), max_grad_norm=max_norm,
            compression=None if encoded is None else encoded.of_torch,
        )  # fmt: skip
        return p3.torch.rank(), p3.torch.size(), net
    if encoded is not None:
        _require_hook(encoded.up, net, float(_parts(store)[1]))
        for module in net.modules():  # hooks are given dense gradients
            if isinstance(module, nn.Embedding):
                module.sparse = False
    torch.distributed.init_process_group("gloo")
    net = nn.parallel.DistributedDataParallel(
        net, bucket_cap_mb=float(_parts(store)[1]), gradient_as_bucket_view=True, static_graph=True
    )
    if encoded is not None:
        net.register_comm_hook(*_hook(encoded.up))
    return torch.distributed.get_rank(), torch.distributed.get_world_size(), net


def clip_as_usual(store: str, net: nn.Module, max_norm: Optional[float]) -> None:
    """What a script does without P3; None: nothing."""
    if max_norm is not None and (is_local(store) or not is_p3(store)):
        nn.utils.clip_grad_norm_(net.parameters(), max_norm)


def end_training(store: str, optimizer: torch.optim.Optimizer) -> None:
    """Behind the last step, on every worker: all have the same weights from here on."""
    if is_local(store):
        optimizer.take_global()


def wait_for_all(store: str) -> None:
    """Returns when every worker of the store's job has called it."""
    if is_p3(store):
        import p3.torch

        p3.torch.barrier()
    elif store != ALONE:
        torch.distributed.barrier()


def leave(is_right: bool) -> None:
    """The last call of a worker. One of DDP ends here with its exit status, once all have come: with Gloo's threads and
    connections, which torch would end now, a process that had trained rightly was seen to fail."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0 if is_right else 1)


def device_name(device: str) -> str:
    """As results tell it: cpu, or the GPU's own name."""
    return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else device


def weights(net: nn.Module):
    """All of the net's state as NumPy arrays, whatever DDP has put around it."""
    return [value.cpu().numpy() for value in getattr(net, "module", net).state_dict().values()]


def _require_hook(text: str, net: nn.Module, megabytes: float) -> None:
    """ValueError for one that Gloo cannot do."""
    try:
        parse_hook(text)
    except argparse.ArgumentTypeError as error:
        raise ValueError(str(error)) from None
    bytes_ = sum(weights.numel() * weights.element_size() for weights in net.parameters())
    if text.startswith("powersgd") and bytes_ > megabytes * (1 << 20):
        raise ValueError(
            f"PowerSGD on Gloo hangs with several buckets, as it waits in Gloo's two threads; take one bucket, as the "
            f"store ddp_{math.ceil(bytes_ / (1 << 20))}_{text} has it for this model"
        )


def _hook(text: str):
    """As register_comm_hook takes it."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    name, _, rank = text.partition(":")
    if name != "powersgd":
        return None, getattr(default_hooks, name + "_compress_hook")
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=int(rank or 1), start_powerSGD_iter=_POWERSGD_AFTER_STEPS,
        orthogonalization_epsilon=1e-8,
    )  # fmt: skip
    return state, powerSGD_hook.powerSGD_hook


_POWERSGD_AFTER_STEPS = 2  # the fewest that torch allows; in these gradients travel as they are
