"""Which way to take steps suits an optimizer, and what the script wants of it."""

from __future__ import annotations

import logging
import os
from typing import Any, List, Optional, Sequence, Union

import torch

from p3.codecs import Ways
from p3.errors import ConfigError
from p3.plan import choices, combinations, key_plan
from p3.plan.choices import Choice
from p3.settings import Settings
from p3.torch import rules
from p3.torch.grad_scaler import GradScaler
from p3.torch.requirements import is_factored, parameters_of, require_parameters, require_together
from p3.torch.rounds.clipping import Clipping
from p3.torch.rounds.forward import named_parameters
from p3.torch.rounds.declared import Declared, DeclaredClipping
from p3.torch.rounds.overlapping import OnServers, Overlapping
from p3.torch.rounds.rounds import Rounds
from p3.torch.rounds.synchronous import Synchronous
from p3.torch.start import job

log = logging.getLogger("p3.torch")


def rounds_of(optimizer: torch.optim.Optimizer, models: Sequence[torch.nn.Module], synchronous: bool,
              max_grad_norm: Optional[float], compression: Ways, staleness: Union[int, float],
              grad_scaler: Any = None, independent: bool = False) -> Rounds:  # fmt: skip
    """All workers' parameters are the same when this returns. The arguments are those of DistributedOptimizer."""
    session, settings = job.current(), Settings.from_env(os.environ)
    of_job = choices.of_job(takes_snapshots=False, replaces_workers=settings.replaces_workers)
    refusal = combinations.refusal(choices.TORCH, *of_job)
    if refusal:
        raise ConfigError(refusal)
    scales = isinstance(grad_scaler, GradScaler)
    clips = max_grad_norm is not None or scales and not synchronous
    is_known = rules.updates_parameters_alone(type(optimizer))
    can_clip = (is_known or independent) and not any(map(is_factored, parameters_of(optimizer)))
    waits = synchronous or clips and not can_clip
    why = "synchronous=True" if synchronous else "max_grad_norm is set" if not scales else "grad_scaler is set"
    updates = _updates(optimizer, why if synchronous or clips else "", says_so=session.rank == 0)
    asked = [choices.of_compression(compression.up), choices.of_value_compression(compression.down)]
    asked += [choices.of_staleness(key_plan.staleness(staleness)), *updates]
    asked += [choices.CHECK] * (settings.check > 0)
    asked += [choices.NAMED_SCALER] * (grad_scaler is not None and not scales)
    asked += [choices.UNAWAITED] * (not waits)
    if grad_scaler is not None and choices.NO_RULE in updates:
        asked += [*choices.of_sums_back(compression.down), *[choices.LATE_SCALER] * scales]
    if independent:
        asked += [choices.INDEPENDENT.said(type(optimizer).__name__)]
        asked += [choices.AWAITED] * synchronous + [choices.JOINT] * isinstance(optimizer, torch.optim.LBFGS)
    names = {tensor: name for name, tensor in named_parameters(models)}
    require_parameters(optimizer, names)
    require_together(session, optimizer, names, asked)
    arguments = (optimizer, models, compression, staleness)
    if choices.NO_RULE not in updates:
        return OnServers(*arguments)
    if not waits and clips:
        return (Clipping if is_known else DeclaredClipping)(*arguments, max_grad_norm=max_grad_norm)
    if not waits and (is_known or independent):
        return (Overlapping if is_known else Declared)(*arguments)
    return Synchronous(*arguments, max_grad_norm=max_grad_norm, grad_scaler=grad_scaler)


def _updates(optimizer: torch.optim.Optimizer, why_not: str, says_so: bool) -> List[Choice]:
    """What updates each group on the servers; or why nothing does. `why_not`: what the script has asked for."""
    if why_not:
        return [choices.no_optimizer(why_not)]
    try:
        return [choices.of_optimizer(rules.describe(type(optimizer), one)) for one in optimizer.param_groups]
    except rules.NotOnServer as error:
        if says_so:
            log.warning("%s updates on the workers: %s", type(optimizer).__name__, error)
        return [choices.no_optimizer(str(error))]
