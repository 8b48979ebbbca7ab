"""The blow itself, and whom it hits. Everything runs on one machine, on a lab's hosts or not, so process ids are known.

A process of the job is found by its environment. Of one that was started as if over ssh, the supervisor has the same
role and rank, but not the secret, which it reads from its input; it is what ssh would leave on the other host, and does
not count.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Dict, Optional

from p3.launch.placement import module_path
from p3.measure.chaos.matrix import CUT, STOP, Cell, Victim
from p3.measure.lab import network

FIND_TIMEOUT_S = 20.0
MARK = "CHAOS_RUN"  # in the environment of every process of a run; its value is the run's alone
_POLL_S = 0.002


def strike(cell: Cell, pid: Optional[int], lab: Optional[str], host: Optional[str]) -> None:
    """`pid`: of the victim. `lab`: the folder of the lab and `host`, the victim's number there, of one that
    is cut off."""
    if cell.blow == CUT:
        network.cut(Path(lab), int(host))
    else:
        os.kill(pid, signal.SIGSTOP if cell.blow == STOP else signal.SIGKILL)


def find(victim: Victim, mark: str) -> int:
    """The victim's process id, as soon as it has one. LookupError if it has not started in time."""
    deadline = time.monotonic() + FIND_TIMEOUT_S
    while time.monotonic() < deadline:
        pid = alive(victim.role, mark).get(victim.rank)
        if pid is not None:
            return pid
        time.sleep(_POLL_S)
    raise LookupError(f"{victim} has not started in {FIND_TIMEOUT_S:g} s")


def alive(role: str, mark: str) -> Dict[int, int]:
    """Process ids of those of P3 that run now, by rank. A scheduler has rank 0. Of several of a rank it is the first:
    others wait to take its place."""
    found: Dict[int, int] = {}
    for pid, variables in sorted(marked(mark).items()):
        if variables.get("DMLC_ROLE") == role and variables.get("P3_SECRET"):
            found.setdefault(int(variables.get("P3_RANK", 0)), pid)
    return found


def environment(mark: str) -> Dict[str, str]:
    """Of a `p3 run` whose processes marked() finds: this process's own, but for what is of another job."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("DMLC_", "P3_"))}
    return {**env, **module_path(env), MARK: mark}


def marked(mark: str) -> Dict[int, Dict[str, str]]:
    """The living processes of a run, and the environment that each was started with."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            entries = (folder / "environ").read_bytes().split(b"\0")
            if f"{MARK}={mark}".encode() not in entries or _is_dead(folder):
                continue
        except OSError:
            continue
        variables = (os.fsdecode(entry).partition("=") for entry in entries)
        found[int(folder.name)] = {name: value for name, _, value in variables}
    return found


def _is_dead(folder: Path) -> bool:
    return (folder / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
