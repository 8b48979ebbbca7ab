"""Which way to take steps suits an optimizer, and what the script wants of it."""

from __future__ import annotations

import logging
import os
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Union

import torch

from p3.codecs import Ways
from p3.errors import ConfigError
from p3.frontend.compression import Compression, Given
from p3.plan import choices, combinations, key_plan
from p3.plan.choices import Choice
from p3.plan.strategy import AUTO, Strategy
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


def compressions_of(optimizer: torch.optim.Optimizer, given: Given) -> List[Compression]:
    """Of each param group: its own entry, or what is `given` for all. ValueError if there is no such compression."""
    return [_of_group(number, group["compression"]) if "compression" in group else Compression(given)
            for number, group in enumerate(optimizer.param_groups)]  # fmt: skip


def _of_group(number: int, given: Any) -> Compression:
    where = "param group %d of the optimizer" % number
    if callable(given):  # state_dict() has the group's entries, and no function can be saved
        raise ValueError("%s: its compression is a function; give that to DistributedOptimizer" % where)
    try:
        return Compression(given)
    except ValueError as error:
        raise ValueError("%s: %s" % (where, error)) from None


def rounds_of(optimizer: torch.optim.Optimizer, models: Sequence[torch.nn.Module], synchronous: bool,
              max_grad_norm: Optional[float], compressions: Sequence[Compression], staleness: Union[int, float],
              grad_scaler: Any = None, independent: bool = False,
              strategy: Union[None, str, Strategy] = None) -> Rounds:  # fmt: skip
    """All workers' parameters are the same when this returns. The arguments are those of DistributedOptimizer, but
    `compressions`: of each param group. `strategy`: as it was read, or AUTO."""
    session, settings = job.current(), Settings.from_env(os.environ)
    recuts = choices.of_strategy(settings.strategy if strategy is None else None)
    if strategy == AUTO:
        strategy, recuts = None, [choices.RECUT.said('strategy="auto"')]
    refusal = combinations.refusal(*choices.of_server_losses(settings.on_server_loss), *recuts)
    if refusal:
        raise ConfigError(refusal)
    scales = isinstance(grad_scaler, GradScaler)
    clips = max_grad_norm is not None or scales and not synchronous
    is_known = rules.updates_parameters_alone(type(optimizer))
    names = {tensor: name for name, tensor in named_parameters(models)}
    require_parameters(optimizer, names)
    if strategy is not None:
        strategy.require(session.num_servers, (names[tensor] for tensor in parameters_of(optimizer)))
    in_force = session.strategy() if strategy is None else strategy
    compressions = [one.planned(in_force) for one in compressions]
    for tensor in parameters_of(optimizer):
        if is_factored(tensor):
            tensor._p3_layer.follow(in_force, names[tensor])
        else:
            in_force.require_no_factors(names[tensor])
    key_plan.staleness(staleness)
    stale = {one: in_force.rounds(names[one], staleness or None) for one in parameters_of(optimizer)}
    staleness = max(stale.values(), default=staleness)
    alike = _treated_alike(optimizer, compressions, names, stale)
    is_low_rank = any(choices.of_compression(one.ways.up) == choices.LOW_RANK for one in alike)
    servers_have_sums = not is_low_rank and not any(map(is_factored, parameters_of(optimizer)))
    can_clip = (is_known or independent) and servers_have_sums
    waits = synchronous or clips and not can_clip
    why = "compression by lowrank" if is_low_rank else ""
    if synchronous or clips:
        why = "synchronous=True" if synchronous else "max_grad_norm is set" if not scales else "grad_scaler is set"
    if not why and settings.outlives_servers and not staleness:
        why = "P3_ON_SERVER_LOSS=continue is set"
    if not why and recuts and not staleness:
        why = str(recuts[0])
    updates = _updates(optimizer, why, says_so=session.is_first)
    asked = [*updates, *recuts]
    asked += [choices.CHECK] * (settings.check > 0)
    asked += [choices.NAMED_SCALER] * (grad_scaler is not None and not scales)
    asked += [choices.UNAWAITED] * (not waits)
    scales_sums = grad_scaler is not None and choices.NO_RULE in updates
    asked += [choices.LATE_SCALER] * (scales_sums and scales)
    if independent:
        asked += [choices.INDEPENDENT.said(type(optimizer).__name__)]
        asked += [choices.AWAITED] * synchronous + [choices.JOINT] * isinstance(optimizer, torch.optim.LBFGS)
    for one in alike:
        ways = [choices.of_compression(one.ways.up), choices.of_value_compression(one.ways.down)]
        ways += choices.of_sums_back(one.ways.down) if scales_sums or recuts else []
        asked_of_it = [choices.of_staleness(key_plan.staleness(one.staleness)), *ways, *asked]
        require_together(session, optimizer, one.tensors, names, asked_of_it, in_force)
    arguments = (optimizer, models, compressions, stale, strategy, bool(recuts))
    if choices.NO_RULE not in updates:
        return OnServers(*arguments)
    if not waits and clips:
        return (Clipping if is_known else DeclaredClipping)(*arguments, max_grad_norm=max_grad_norm)
    if not waits and (is_known or independent):
        return (Overlapping if is_known else Declared)(*arguments)
    return Synchronous(*arguments, max_grad_norm=max_grad_norm, grad_scaler=grad_scaler)


class _Alike(NamedTuple):
    ways: Ways
    staleness: Union[int, float]
    tensors: List[torch.Tensor]


def _treated_alike(
    optimizer: torch.optim.Optimizer, compressions: Sequence[Compression], names: Dict[torch.Tensor, str],
    stale: Dict[torch.Tensor, Union[int, float]],
) -> List[_Alike]:  # fmt: skip
    """The optimizer's parameters, by how they are compressed, and their staleness."""
    found: List[_Alike] = []
    for group, compression in zip(optimizer.param_groups, compressions):
        for tensor in group["params"]:
            ways = compression.of(names[tensor], tuple(tensor.shape))
            alike = next((one for one in found if (one.ways, one.staleness) == (ways, stale[tensor])), None)
            if alike is None:
                found.append(_Alike(ways, stale[tensor], [tensor]))
            else:
                alike.tensors.append(tensor)
    return found


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
