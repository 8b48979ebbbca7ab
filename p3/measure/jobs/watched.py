"""CPU seconds that all processes of a job have used between two moments: workers, servers and scheduler, on all hosts.

    cpu = JobCpu(job)
    job.wait(timeout_s, cpu.sample)
    cpu.between(begin, end)

Each process is read from /proc every jobs.POLL_S, a few dozen microseconds for all, and interpolated between samples.
Only processes of this machine can be read: of a job on hosts behind ssh nothing is known.
"""

from __future__ import annotations

import time
from typing import List, Optional

import numpy as np

from p3.measure.bench.jobs import Job
from p3.measure.micro import usage


class JobCpu:
    def __init__(self, job: Job) -> None:
        """Of a job that has started."""
        self._used_s = dict.fromkeys(job.sessions() if job.is_local else [], 0.0)  # of each process; kept at its end
        self._times: List[float] = []
        self._totals: List[float] = []

    def sample(self) -> None:
        for pid in self._used_s:
            used_s = usage.process_cpu_s(pid)
            if used_s is not None:
                self._used_s[pid] = used_s
        self._times.append(time.monotonic())
        self._totals.append(sum(self._used_s.values()))

    def between(self, begin: float, end: float) -> Optional[float]:
        """Moments are the monotonic clock's, which all processes of a machine share. None if nothing is known."""
        if not self._used_s or not self._times:
            return None
        at_begin, at_end = np.interp([begin, end], self._times, self._totals)
        return float(at_end - at_begin)
