"""Deep gradient compression as a worker's session sees it: which keys it is for, what it excludes, and its bytes.

Lin et al., ICLR 2018; the arithmetic is the core's (src/numeric/dgc.h). In a store with {"type": "dgc", ...} it is for
the float32 keys of at least two dimensions; the others stay as they are, and the servers' SGD updates them.
"""

from __future__ import annotations

import math
from typing import Any, Dict, List, Mapping, Optional, Sequence

DEFAULTS = {"ratio": 0.001, "warmup_steps": 0, "clip_norm": 0.0, "masking": True}

ROUND_FLOATS = 2  # behind a key's residual, as a snapshot keeps it: how far the warm-up is (src/numeric/dgc.h)

_HEADER_BYTES = 80
_HEAD_BYTES = 4  # of a payload: how many elements it has
_WARMUP_STAGES = 4


def with_defaults(compression: Mapping[str, Any]) -> Dict[str, Any]:
    """The value of the option, from what a script has given."""
    return {**(DEFAULTS if compression.get("type") == "dgc" else {}), **compression}


def is_chosen(compression: Optional[Mapping[str, Any]]) -> bool:
    return compression is not None and compression.get("type") == "dgc"


def local_clip_norm(compression: Mapping[str, Any], num_workers: int) -> float:
    """The largest norm of what one worker adds to a gradient: that of the sum of as many as there are, if they are
    independent, is clip_norm then."""
    return compression["clip_norm"] / math.sqrt(num_workers)


def require_together(options: Mapping[str, Optional[Mapping[str, Any]]]) -> None:
    """ValueError unless a store can have these options at once. `options`: by name, None where it is not set."""
    if not is_chosen(options["compression"]):
        return
    if options["reduction"] not in (None, {"type": "sum"}):
        raise ValueError(
            "dgc sums the workers' gradients: divide by the number of workers in rescale_grad, or by the joined batch "
            "size in Trainer.step, instead of set_reduction('average')"
        )
    optimizer = options["optimizer"]
    if optimizer is not None:
        require_sgd(optimizer)


def require_sgd(optimizer: Mapping[str, Any]) -> None:
    """ValueError unless the workers can apply the momentum of this optimizer (p3.server.optimizers) themselves."""
    if optimizer["name"] not in ("sgd", "torch_sgd"):
        raise ValueError(
            "dgc is for SGD with momentum alone, not for %s: use SGD, or another compression" % optimizer["name"]
        )
    for field, wanted in (("nesterov", False), ("dampening", 0), ("maximize", False)):
        if optimizer.get(field, wanted) != wanted:
            raise ValueError("dgc is for plain SGD with momentum: leave out %s=%r" % (field, optimizer[field]))
    if optimizer.get("clip_gradient", -1) >= 0:
        raise ValueError("dgc cannot clip each element: leave out clip_gradient, and give the compression a clip_norm")


def require_optimizer(label: str, store: int) -> None:
    """For a store that is pushed to without an optimizer."""
    raise ValueError(
        "%s: store %d is compressed with dgc, and what its workers send are steps of SGD, which the servers must take: "
        "set an SGD optimizer before the first push (Trainer: update_on_kvstore=True), or use another compression"
        % (label, store)
    )


# Bytes


def ratio_at(compression: Mapping[str, Any], round: int) -> float:
    """The share of a slice's elements that leave in that round of a key, counted from 1."""
    warmup, ratio = compression["warmup_steps"], compression["ratio"]
    if not 1 <= round <= warmup:
        return ratio
    return max(ratio, 0.25 ** (1 + (round - 1) * _WARMUP_STAGES // warmup))


def push_bytes(slices: Sequence[int], ratio: float) -> int:
    """What a worker sends in one round of a key, headers included. `slices`: the elements of each (KeyPlan.sizes())."""
    return sum(_HEADER_BYTES + payload_bytes(count_of(elements, ratio), elements) for elements in slices)


def value_bytes(slices: Sequence[int], touched: Sequence[int]) -> int:
    """What comes back to each worker. `touched`: of each slice, how many elements have a sum over the workers that is
    not 0; at most as many as all of them have sent."""
    return sum(_HEADER_BYTES + payload_bytes(count, elements) for count, elements in zip(touched, slices))


def elements_sent(slices: Sequence[int], ratio: float) -> List[int]:
    """Of each slice. All of it where their offsets would make them no smaller."""
    counts = [count_of(elements, ratio) for elements in slices]
    return [count if _is_smaller(count, elements) else elements for count, elements in zip(counts, slices)]


def count_of(elements: int, ratio: float) -> int:
    """How many of a slice's elements are the largest ones."""
    return max(1, math.ceil(ratio * elements))


def payload_bytes(count: int, elements: int) -> int:
    """Of so many elements of a slice, without the frame's header."""
    return _sparse_bytes(count, elements) if _is_smaller(count, elements) else 4 * elements


def _is_smaller(count: int, elements: int) -> bool:
    return _sparse_bytes(count, elements) < 4 * elements


def _sparse_bytes(count: int, elements: int) -> int:
    return _HEAD_BYTES + count * (4 + (2 if elements <= 65536 else 4))
