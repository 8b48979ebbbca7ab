"""The greatest resident size that a worker and a server of a job have had.

    memory = JobMemory(job)
    job.wait(timeout_s, memory.sample)
    memory.peak_bytes("worker")

Only processes of this machine can be read: of a job on hosts behind ssh nothing is known.
"""

from __future__ import annotations

from typing import Dict, Optional

from p3.measure.bench.jobs import Job
from p3.measure.micro import usage


class JobMemory:
    def __init__(self, job: Job) -> None:
        """Of a job that has started."""
        self._pids = {name: job.session(name) for name in (job.names() if job.is_local else [])}
        self._peaks: Dict[str, int] = {}

    def sample(self) -> None:
        for name, pid in self._pids.items():
            peak = usage.process_peak_rss(pid)
            if peak:  # until it has ended
                self._peaks[name] = peak

    def peak_bytes(self, role: str) -> Optional[int]:
        """Of the process of that role which had most; None if nothing is known."""
        return max((peak for name, peak in self._peaks.items() if name.startswith(role)), default=None)
