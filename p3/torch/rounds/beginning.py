"""What an optimizer begins with, for workers that each run their own: the same, or their weights would drift apart.

Settings, and which states there are after how many steps: not the states' elements, which may differ by rounding.
"""

from __future__ import annotations

import zlib
from typing import Any, Dict, List

import torch

from p3.torch import rules
from p3.torch.requirements import parameters_of

# Compared in every step; and how torch computes an update, which each worker may choose for itself.
_NO_MATTER = ("lr", "weight_decay", "foreach", "fused", "capturable", "differentiable")


def digest(kind: type, optimizer: torch.optim.Optimizer) -> float:
    """The same for those that begin alike, whatever process they are in. `kind`: the script's class."""
    settings = [name for name in sorted(optimizer.defaults) if name not in _NO_MATTER]
    groups = [[(name, _shown(group.get(name))) for name in settings] for group in optimizer.param_groups]
    states = [_counted(optimizer.state.get(tensor, {})) for tensor in parameters_of(optimizer)]
    return float(zlib.crc32(repr((kind.__name__, groups, states)).encode()))


def _counted(state: Dict[str, Any]) -> List[str]:
    return sorted("step %s" % _shown(value) if name == "step" else str(name) for name, value in state.items())


def _shown(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return " ".join(map(_shown, value))
    if isinstance(value, torch.Tensor):
        return "%r" % rules.number(value) if value.numel() == 1 else "a tensor"
    if isinstance(value, (int, float)):
        return "%r" % float(value)  # a file may have the one for the other
    return value if isinstance(value, str) else type(value).__name__
