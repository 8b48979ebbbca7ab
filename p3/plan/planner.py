"""How the rounds of a key go: the one place that decides it.

The scheduler asks when rank 0 announces a key, and the job agrees on the answer; a worker asks before that, of the same
options, on which the job has agreed by then. Pure functions.
"""

from __future__ import annotations

from typing import Any, Mapping, Optional, Sequence

from p3 import codecs
from p3.plan.key_plan import Axes

OPTIONS = ("compression", "value_compression", "reduction", "quorum")  # of a store: its first key settles them
STRATEGY = "strategy"  # it settles this too, which is none of p3/plan/options.py: no server follows it
OF_KEYS = ("compression", "value_compression")  # of which a key may have others than its store

Options = Mapping[str, Optional[Mapping[str, Any]]]  # of a store, by name; None or {} where it is not set


def axes(
    shape: Sequence[int], dtype: str, options: Options, sparse: bool = False, staleness: int = 0,
    gathered: bool = False, norm: bool = False,
) -> Axes:  # fmt: skip
    """`options`: OPTIONS of the key's store, or its own. `norm`: a key of norms."""
    if norm:
        return Axes(staleness, {}, "norm")
    reduction = (options.get("reduction") or {"type": "sum"})["type"]
    if gathered:
        return Axes(staleness, {}, reduction, "workers")
    codec = {} if sparse else _applying(options.get("compression"), dtype, len(shape))
    if codec and codecs.of(codec).makes_steps:
        return Axes(staleness, codec, reduction, "steps")
    comes_back_whole = sparse or staleness > 0 or len(shape) < 2
    value_codec = {} if comes_back_whole else _applying(options.get("value_compression"), dtype, len(shape))
    quorum = options.get("quorum") or {"least": 0, "grace_s": 0.0}
    return Axes(staleness, codec, reduction, "servers", value_codec, quorum["least"], float(quorum["grace_s"]))


def rank(
    shape: Sequence[int], dtype: str, options: Options, sparse: bool = False, gathered: bool = False, norm: bool = False
) -> int:
    """Of a key in whose place two thin matrices have rounds, which are keys of their own (p3/worker/lowrank/); 0: it
    has rounds itself. The arguments are those of axes()."""
    if sparse or gathered or norm or dtype != "float32":
        return 0
    return codecs.rank_of(options.get("compression"), shape)


def _applying(compression: Optional[Mapping[str, Any]], dtype: str, dimensions: int) -> Mapping[str, Any]:
    """To the slices of a dense key; else {}."""
    if not compression or codecs.is_of_matrices(compression):
        return {}
    from p3._core import codec_applies  # here: without compression the scheduler needs no core

    return compression if codec_applies(compression, dtype, dimensions) else {}
