"""How the rounds of a key go: the one place that decides it.

The scheduler asks when rank 0 announces a key, and the job agrees on the answer; a worker asks before that, of the same
options, on which the job has agreed by then. Pure functions.
"""

from __future__ import annotations

from typing import Any, Mapping, Optional, Sequence

from p3 import codecs
from p3.plan.key_plan import Axes

OPTIONS = ("compression", "reduction")  # of a store, that it goes by: a store's first key settles them

Options = Mapping[str, Optional[Mapping[str, Any]]]  # of a store, by name; None or {} where it is not set


def axes(
    shape: Sequence[int], dtype: str, options: Options, sparse: bool = False, staleness: int = 0,
    gathered: bool = False, norm: bool = False,
) -> Axes:  # fmt: skip
    """`options`: OPTIONS of the key's store. `norm`: a key of norms."""
    if norm:
        return Axes(staleness, {}, "norm")
    reduction = (options.get("reduction") or {"type": "sum"})["type"]
    if gathered:
        return Axes(staleness, {}, reduction, "workers")
    compression = options.get("compression") or {}
    if sparse or not compression or not _applies(compression, dtype, len(shape)):
        return Axes(staleness, {}, reduction)
    return Axes(staleness, compression, reduction, "steps" if codecs.of(compression).makes_steps else "servers")


def _applies(compression: Mapping[str, Any], dtype: str, dimensions: int) -> bool:
    from p3._core import codec_applies  # here: without compression the scheduler needs no core

    return codec_applies(compression, dtype, dimensions)
