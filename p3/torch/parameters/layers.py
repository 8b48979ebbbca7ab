"""A class over a tensor's own, for a while, by which P3 steps in where the tensor is used.

Several may lie over one tensor, in any order, and each is taken away by itself: a weight may be under way (pending.py)
and its gradient watched (watched.py) at once.
"""

from __future__ import annotations

import functools
from typing import Tuple

import torch


def lay(tensor: torch.Tensor, layer: type) -> None:
    """Above all that lie there. None of them is this one."""
    tensor.__class__ = _with(type(tensor), layer)


def take_away(tensor: torch.Tensor, layer: type) -> None:
    tensor.__class__ = _without(type(tensor), layer)


def _layers(kind: type) -> Tuple[type, ...]:
    return kind.__dict__.get("_p3_layers", ())


def _own(kind: type) -> type:
    return kind.__bases__[-1] if _layers(kind) else kind


@functools.lru_cache(maxsize=None)
def _with(kind: type, layer: type) -> type:
    return _made(_own(kind), (layer, *_layers(kind)))


@functools.lru_cache(maxsize=None)
def _without(kind: type, layer: type) -> type:
    return _made(_own(kind), tuple(one for one in _layers(kind) if one is not layer))


@functools.lru_cache(maxsize=None)
def _made(own: type, layers: Tuple[type, ...]) -> type:
    if not layers:
        return own
    return type(own.__name__, (*layers, own), {"__module__": own.__module__, "_p3_layers": layers})
