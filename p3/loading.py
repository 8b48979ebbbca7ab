"""How `p3` loads what a process needs until it ends."""

from __future__ import annotations

import contextlib
import gc
import sys
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


@contextlib.contextmanager
def without(module: str) -> Iterator[None]:
    """Around imports of what does without this module where Python lacks it. They do without it from then on, unless it
    was loaded before; who imports it later has it."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # to import it is an ImportError
    try:
        yield
    finally:
        del sys.modules[module]
