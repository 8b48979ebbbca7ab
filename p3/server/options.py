"""The options of a store, on which all its workers agree and which its servers follow: a name, and a flat value.

    optimizer    {"name": "sgd", "momentum": 0.9, ...}      updates the weights; see p3.server.optimizers
    compression  {"type": "2bit", "threshold": 0.5}         how gradients travel; or {"type": "1bit"}, {"type": "fp16"},
                 {"type": "dgc", "ratio": 0.001, "warmup_steps": 0, "clip_norm": 0.0, "masking": True}
    reduction    {"type": "average"}                        what becomes of the workers' gradients: over those that took
                                                            part; or {"type": "mean"}, over all; or {"type": "sum"}

Without them: the sum of the gradients, sent as it is, is the new value. Needs neither a framework nor NumPy.
"""

from __future__ import annotations

from typing import Any

from p3.server.optimizers import FIELDS, validate_fields

# These change what a push carries or means, so a store's first key settles them.
SETTLED_BY_FIRST_KEY = ("compression", "reduction")

# As float32 neither 0 nor infinite, nor with less than full precision.
_THRESHOLD = (
    "a plain number from 2**-126 to 2**127",
    lambda value: type(value) in (int, float) and 2.0**-126 <= value <= 2.0**127,
)
_DGC = {
    "ratio": ("a number above 0 and at most 1", lambda value: type(value) in (int, float) and 0 < value <= 1),
    "warmup_steps": ("a whole number of at least 0", lambda value: type(value) is int and 0 <= value <= 10**12),
    "clip_norm": (
        "a finite number of at least 0 (0: no clipping)",
        lambda value: type(value) in (int, float) and 0 <= value <= 1e300,
    ),
    "masking": ("True or False", lambda value: type(value) is bool),
}
_OPTIONS = {  # the field that selects a kind, and the further fields of each kind
    "compression": ("type", {"1bit": {}, "2bit": {"threshold": _THRESHOLD}, "dgc": _DGC, "fp16": {}}),
    "optimizer": ("name", FIELDS),
    "reduction": ("type", {"average": {}, "mean": {}, "sum": {}}),
}


def validate(name: Any, value: Any) -> None:
    """Raises ValueError, naming option, field, value and what is allowed, unless this is an option and makes sense."""
    if not isinstance(name, str) or name not in _OPTIONS:
        raise ValueError(f"option {name!r} is unknown; a store has {', '.join(_OPTIONS)}")
    validate_fields(name, *_OPTIONS[name], value)
