"""Bytes in and out of a host's network card, every few milliseconds.

    python -m p3.measure.jobs.nic PEER 0.01  prints, at SIGTERM, {"times": [...], "bytes_in": [...], "bytes_out":
    [...]}

The card is the one by which the host reaches PEER. Times are those of the monotonic clock, which all processes of a
machine share; counters are the kernel's, and only what changed between two samples means something.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Dict, List, Tuple


def sample(peer: str, interval_s: float) -> None:
    folder = Path("/sys/class/net", _interface(peer), "statistics")
    samples: List[Tuple[float, int, int]] = []
    with open(folder / "rx_bytes", "rb", 0) as rx, open(folder / "tx_bytes", "rb", 0) as tx:

        def count() -> None:
            rx.seek(0), tx.seek(0)
            samples.append((time.monotonic(), int(rx.read()), int(tx.read())))

        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        due = time.monotonic()
        while True:
            count()
            due = max(due + interval_s, time.monotonic())
            if signal.sigtimedwait({signal.SIGTERM}, max(0.0, due - time.monotonic())) is not None:
                break
    times, bytes_in, bytes_out = zip(*samples)
    print(json.dumps({"times": times, "bytes_in": bytes_in, "bytes_out": bytes_out}), flush=True)


def per_interval(samples: Dict[str, list], begin: float, end: float, interval_s: float) -> Dict[str, List[int]]:
    """Bytes in each whole interval between two moments, interpolated between the samples next to its edges."""
    import numpy as np  # not by who samples: of a thread that it starts, a SIGTERM would end the process

    edges = begin + interval_s * np.arange(int((end - begin) / interval_s) + 1)
    return {
        name: np.diff(np.interp(edges, samples["times"], samples[name])).round().astype(int).tolist()
        for name in ("bytes_in", "bytes_out")
    }


def _interface(peer: str) -> str:
    words = subprocess.check_output(["ip", "-o", "route", "get", peer], universal_newlines=True, timeout=10).split()
    return words[words.index("dev") + 1]


if __name__ == "__main__":
    sample(sys.argv[1], float(sys.argv[2]))
