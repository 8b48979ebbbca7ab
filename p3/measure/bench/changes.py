"""Links whose rate changes while a job runs, and how long its iterations are before, just after and well after that.

    change = LinkChange(job, site_hosts, to_mbit=400)  # or a rate for each host
    job.wait(timeout_s, change.look)
    change.told(workers)       # fields of the record
    change.settled(workers)    # the same lines, without the iterations up to then

A job goes by what it has learned of its links (docs/decisions.md), and has to learn that anew.
"""

from __future__ import annotations

from typing import Dict, Sequence, Union

from p3.measure.bench import measured
from p3.measure.jobs.job import Job
from p3.measure.lab import hosts as lab

BEFORE = 5  # iterations that count and have ended when the rate changes
SETTLING = 11  # the next one, in which it does, and ten more
LEAST = BEFORE + SETTLING + 1  # that a job must have


class LinkChange:
    def __init__(self, job: Job, hosts: Sequence, to_mbit: Union[float, Sequence[float]]) -> None:
        """Of a job that has not started; `hosts` are all of a lab."""
        self._job, self._hosts, self._to_mbit = job, hosts, to_mbit
        self.is_done = False

    def look(self) -> None:
        """Changes the rate once it is time. To be called often."""
        if not self.is_done and len(measured.counted([self._job.lines("worker 0")])[0]) >= BEFORE:
            lab.change(self._hosts, self._to_mbit)
            self.is_done = True

    def told(self, workers: measured.Workers) -> Dict:
        """Seconds of the iterations before it, and of those in which the job finds to its new pace."""
        seconds = [round(one, 6) for one in measured.iteration_s(workers)]
        return {"before_s": seconds[:BEFORE], "settling_s": seconds[BEFORE : BEFORE + SETTLING]}

    def settled(self, workers: measured.Workers) -> measured.Workers:
        passed = BEFORE + SETTLING
        return [[line for line in lines if line not in counted[:passed]]
                for lines, counted in zip(workers, measured.counted(workers))]  # fmt: skip
