"""The options of a store, on which all its workers agree and which its servers follow: a name, and a flat value.

    optimizer    {"name": "sgd", "momentum": 0.9, ...}      updates the weights; see p3.server.optimizers
    compression  {"type": "2bit", "threshold": 0.5}         how gradients travel; or {"type": "fp16"}
    reduction    {"type": "average"}                        what becomes of the workers' gradients; or {"type": "sum"}

Without them: the sum of the gradients, sent as it is, is the new value. Needs neither a framework nor NumPy.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Tuple

from p3.server import optimizers

# These change what a push carries or means, so a store's first key settles them.
SETTLED_BY_FIRST_KEY = ("compression", "reduction")

_Check = Tuple[str, Callable[[Any], bool]]

# As float32 neither 0 nor infinite, nor with less than full precision.
_THRESHOLD: _Check = (
    "a plain number from 2**-126 to 2**127",
    lambda value: type(value) in (int, float) and 2.0**-126 <= value <= 2.0**127,
)
_TYPES: Dict[str, Dict[str, Dict[str, _Check]]] = {  # option -> its types -> their further fields
    "compression": {"2bit": {"threshold": _THRESHOLD}, "fp16": {}},
    "reduction": {"average": {}, "sum": {}},
}


def validate(name: Any, value: Any) -> None:
    """Raises ValueError, naming option, field, value and what is allowed, unless this is an option and makes sense."""
    if name == "optimizer":
        optimizers.validate(value)
        return
    if not isinstance(name, str) or name not in _TYPES:
        raise ValueError(f"option {name!r} is unknown; a store has {', '.join(sorted([*_TYPES, 'optimizer']))}")
    if not isinstance(value, dict):
        raise ValueError(f"{name}: the value must be a dict, not {type(value).__name__}")
    types, chosen = _TYPES[name], value.get("type")
    if not isinstance(chosen, str) or chosen not in types:
        raise ValueError(f"{name}: type is {chosen!r}; it must be one of {', '.join(types)}")
    fields = types[chosen]
    for field in value.keys() - fields.keys() - {"type"}:
        allowed = ", ".join(["type", *fields])
        raise ValueError(f"{name} {chosen}: {field!r} (which is {value[field]!r}) is no field of it; it has {allowed}")
    for field, (wanted, fits) in fields.items():
        if field not in value:
            raise ValueError(f"{name} {chosen}: {field} is missing; it must be {wanted}")
        if not fits(value[field]):
            raise ValueError(f"{name} {chosen}: {field} is {value[field]!r}; it must be {wanted}")
