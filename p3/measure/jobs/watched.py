"""What a job's processes use while it runs: CPU seconds between two moments, and the most memory of a worker or server.

    watched = Watched(job)
    job.wait(timeout_s, watched.sample)
    watched.cpu_s(begin, end)
    watched.peak_bytes("worker")

Each process is read from /proc every POLL_S of the job, a few dozen microseconds for all, and its CPU time interpolated
between samples. Only processes of this machine can be read: of a job on hosts behind ssh nothing is known.
"""

from __future__ import annotations

import time
from typing import Dict, List, Optional

import numpy as np

from p3.measure.jobs import usage
from p3.measure.jobs.job import Job


class Watched:
    def __init__(self, job: Job, memory: bool = False) -> None:
        """Of a job that has started: workers, servers and scheduler, on all hosts. `memory`: watches that, too."""
        self._watches_memory = memory
        self._pids = {name: job.session(name) for name in (job.names() if job.is_local else [])}
        self._used_s = dict.fromkeys(self._pids, 0.0)  # kept at a process's end, as the peaks are
        self._peaks: Dict[str, int] = {}
        self._times: List[float] = []
        self._totals: List[float] = []

    def sample(self) -> None:
        for name, pid in self._pids.items():
            used_s = usage.process_cpu_s(pid)
            if used_s is not None:
                self._used_s[name] = used_s
            peak = usage.process_peak_rss(pid) if self._watches_memory else 0
            if peak:
                self._peaks[name] = peak
        self._times.append(time.monotonic())
        self._totals.append(sum(self._used_s.values()))

    def cpu_s(self, begin: float, end: float) -> Optional[float]:
        """Moments are the monotonic clock's, which all processes of a machine share. None if nothing is known."""
        if not self._used_s or not self._times:
            return None
        at_begin, at_end = np.interp([begin, end], self._times, self._totals)
        return float(at_end - at_begin)

    def peak_bytes(self, role: str) -> Optional[int]:
        """The greatest resident size of the process of that role which had most; None if nothing is known."""
        return max((peak for name, peak in self._peaks.items() if name.startswith(role)), default=None)
