"""Deep gradient compression as a worker's session sees it.

Lin et al., ICLR 2018; the arithmetic is the core's (src/codec/dgc.h). In a store with {"type": "dgc", ...} it is for
the float32 keys of at least two dimensions; the others stay as they are, and the servers' SGD updates them.
"""

from __future__ import annotations

import math
from typing import Any, Mapping


def local_clip_norm(compression: Mapping[str, Any], num_workers: int) -> float:
    """The largest norm of what one worker adds to a gradient: that of the sum of as many as there are, if they are
    independent, is clip_norm then."""
    return compression["clip_norm"] / math.sqrt(num_workers)
