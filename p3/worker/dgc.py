"""Deep gradient compression as a worker's session sees it: which keys it is for, and what it excludes.

Lin et al., ICLR 2018; the arithmetic is the core's (src/numeric/dgc.h). In a store with {"type": "dgc", ...} it is for
the float32 keys of at least two dimensions; the others stay as they are, and the servers' SGD updates them.
"""

from __future__ import annotations

import math
from typing import Any, Mapping, Optional

from p3 import codecs


def is_chosen(compression: Optional[Mapping[str, Any]]) -> bool:
    codec = codecs.of(compression)
    return codec is not None and codec.makes_steps


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
