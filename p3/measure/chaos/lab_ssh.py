"""Stands for ssh when `p3 run` starts a job on the hosts of a lab: python -m p3.measure.chaos.lab_ssh FOLDER HOST LINE.

FOLDER is the lab's. Every process of the job gets a host of its own, which its role and rank in LINE tell: so one link
belongs to one process. As over ssh, nothing of the launcher's own environment reaches the other host but the mark by
which the run's processes are found.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from p3.measure.chaos.matrix import PROCESSES, Victim
from p3.measure.lab import network

SCHEDULER_HOST = 0


def host_of(process: Victim) -> int:
    """The number of its host in the lab; the scheduler is on the first."""
    return SCHEDULER_HOST if process.role == "scheduler" else 1 + PROCESSES.index(process)


def main() -> None:
    folder, _, line = sys.argv[1:]
    role = re.search(r"\bDMLC_ROLE=(worker|server)\b", line).group(1)
    rank = int(re.search(r"\bP3_RANK=(\d+)\b", line).group(1))
    argv = network.enter(Path(folder) / str(host_of(Victim(role, rank))), ["sh", "-c", line])
    env = {name: value for name, value in os.environ.items() if not name.startswith(("DMLC_", "P3_"))}
    os.execvpe(argv[0], argv, env)


if __name__ == "__main__":
    main()
