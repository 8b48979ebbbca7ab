"""Bytes in and out of a host's network card, and packets out, every few milliseconds.

    totals(host)                             the bytes by now, of a host of a lab
    python -m p3.measure.jobs.nic PEER 0.01  prints, at SIGTERM, {"times": [...], "bytes_in": [...], "bytes_out":
    [...], "packets_out": [...]}

The card is the one by which the host reaches PEER. Times are those of the monotonic clock, which all processes of a
machine share; counters are the kernel's, and only what changed between two samples means something.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Dict, List, Tuple

_TIMEOUT_S = 60.0  # of a machine that is busy with the job
COUNTERS = {"bytes_in": "rx_bytes", "bytes_out": "tx_bytes", "packets_out": "tx_packets"}  # as the kernel calls them


def totals(host) -> Tuple[int, int]:
    """Bytes out of and into its only card, eth0."""
    files = ["/sys/class/net/eth0/statistics/" + COUNTERS[name] for name in ("bytes_out", "bytes_in")]
    sent, received = subprocess.check_output(host.command("cat", *files), timeout=_TIMEOUT_S).split()
    return int(sent), int(received)


def sample(peer: str, interval_s: float) -> None:
    folder = Path("/sys/class/net", _interface(peer), "statistics")
    samples: List[Tuple[float, ...]] = []
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open(folder / name, "rb", 0)) for name in COUNTERS.values()]

        def count() -> None:
            for file in files:
                file.seek(0)
            samples.append((time.monotonic(), *(int(file.read()) for file in files)))

        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        due = time.monotonic()
        while True:
            count()
            due = max(due + interval_s, time.monotonic())
            if signal.sigtimedwait({signal.SIGTERM}, max(0.0, due - time.monotonic())) is not None:
                break
    print(json.dumps(dict(zip(("times", *COUNTERS), zip(*samples)))), flush=True)


def per_interval(samples: Dict[str, list], begin: float, end: float, interval_s: float) -> Dict[str, List[int]]:
    """Bytes in each whole interval between two moments, interpolated between the samples next to its edges."""
    import numpy as np  # not by who samples: of a thread that it starts, a SIGTERM would end the process

    edges = begin + interval_s * np.arange(int((end - begin) / interval_s) + 1)
    return {
        name: np.diff(np.interp(edges, samples["times"], samples[name])).round().astype(int).tolist()
        for name in COUNTERS
    }


def _interface(peer: str) -> str:
    words = subprocess.check_output(["ip", "-o", "route", "get", peer], universal_newlines=True, timeout=10).split()
    return words[words.index("dev") + 1]


if __name__ == "__main__":
    sample(sys.argv[1], float(sys.argv[2]))
