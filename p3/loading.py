"""How `p3` loads what a process needs until it ends."""

from __future__ import annotations

import contextlib
import gc
from typing import Iterator


@contextlib.contextmanager
def for_good() -> Iterator[None]:
    """Around imports. Python's garbage collector does not look at what they make, neither meanwhile nor ever after:
    else that is a tenth of the processor time that it takes to start and to end a server."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
