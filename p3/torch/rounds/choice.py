"""Which way to take steps suits an optimizer, and what the script wants of it."""

from __future__ import annotations

import logging
import os
from typing import Any, Dict, Optional, Sequence, Union

import torch

from p3.errors import ConfigError
from p3.settings import Settings
from p3.torch import rules
from p3.torch.rounds.overlapping import OnServers, Overlapping
from p3.torch.rounds.rounds import Rounds
from p3.torch.rounds.synchronous import Synchronous
from p3.torch.start import job

log = logging.getLogger("p3.torch")


def rounds_of(optimizer: torch.optim.Optimizer, models: Sequence[torch.nn.Module], synchronous: bool,
              max_grad_norm: Optional[float], compression: Optional[Dict[str, Any]], staleness: Union[int, float],
              grad_scaler: Any = None) -> Rounds:  # fmt: skip
    """All workers' parameters are the same when this returns. The arguments are those of DistributedOptimizer."""
    session = job.current()
    if Settings.from_env(os.environ).replaces_workers:
        raise ConfigError(
            "P3_ON_WORKER_LOSS=wait: p3.torch cannot replace a lost worker; unset it, and let the job start again "
            "from a snapshot: p3 run --restarts"
        )
    arguments = (optimizer, models, compression, staleness)
    is_wanted = synchronous or max_grad_norm is not None
    if not is_wanted and _servers_know(optimizer, says_so=session.rank == 0):
        return OnServers(*arguments)
    if not is_wanted and rules.updates_parameters_alone(type(optimizer)):
        return Overlapping(*arguments)
    return Synchronous(*arguments, max_grad_norm=max_grad_norm, grad_scaler=grad_scaler)


def _servers_know(optimizer: torch.optim.Optimizer, says_so: bool) -> bool:
    try:
        for group in optimizer.param_groups:
            rules.describe(type(optimizer), group)
    except rules.NotOnServer as error:
        if says_so:
            log.warning("%s updates on the workers: %s", type(optimizer).__name__, error)
        return False
    return True
