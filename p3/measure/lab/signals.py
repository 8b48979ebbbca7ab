"""Holding Ctrl-C and SIGTERM back while what must not be cut in two is done."""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import Iterator, List


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Ctrl-C and SIGTERM act at the end of the block: for setting up, cleaning up and starting a process, all short.

    By handlers and not by a signal mask, because another thread, of a library perhaps, would take a masked signal, and
    a process that is started would inherit the mask.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python runs handlers in the main thread alone, so no signal interrupts this one
        return
    held: List[int] = []
    before = {
        number: signal.signal(number, lambda number, _frame: held.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in held:
            signal.raise_signal(number)
