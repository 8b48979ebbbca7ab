"""What processes and the machine have used, read from /proc. Times are seconds of CPU, sizes bytes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Iterable, Iterator, List, NamedTuple, Optional, Set

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def session_cpu_s(sessions: Iterable[int]) -> float:
    """User and system time of every process of these sessions, with what their ended children used."""
    return sum(map(_cpu_s, _stat_of(set(sessions))))


def process_cpu_s(pid: int) -> Optional[float]:
    """User and system time of one process, with what its ended children used; None once it has been waited for."""
    fields = _stat(str(pid))
    return None if fields is None else _cpu_s(fields)


class Switches(NamedTuple):
    """How often threads have left their core."""

    slept: int  # to wait for something, so they were woken as often
    preempted: int  # for another one to run

    def since(self, before: "Switches") -> "Switches":
        return Switches(self.slept - before.slept, self.preempted - before.preempted)


def session_switches(sessions: Iterable[int]) -> Switches:
    """Of all threads of these sessions that are alive."""
    total = [0, 0]
    for fields in _stat_of(set(sessions)):
        for task in _tasks(fields[-1]):
            for i, name in enumerate(("voluntary_ctxt_switches:", "nonvoluntary_ctxt_switches:")):
                total[i] += _status(task, name)
    return Switches(*total)


def session_peak_rss(session: int) -> int:
    """The largest resident size that any one process of the session ever had; 0 if none is left."""
    return max((_status_bytes(fields[-1], "VmHWM:") for fields in _stat_of({session})), default=0)


def process_peak_rss(pid: int) -> int:
    """The most that the process ever had; 0 once it has ended."""
    return _status_bytes(str(pid), "VmHWM:")


def process_rss(pid: int) -> int:
    """0 once it has ended."""
    return _status_bytes(str(pid), "VmRSS:")


def process_shared(pid: int) -> int:
    """What of that is shared memory."""
    return _status_bytes(str(pid), "RssShmem:")


def process_threads(pid: int) -> int:
    return len(_tasks(str(pid)))


def own_rss() -> int:
    return _status_bytes("self", "VmRSS:")


def own_peak_rss() -> int:
    """The most since reset_own_peak_rss()."""
    return _status_bytes("self", "VmHWM:")


def reset_own_peak_rss() -> None:
    Path("/proc/self/clear_refs").write_text("5")  # proc_pid_clear_refs(5): resets the peak resident size


def machine_busy_s() -> float:
    """All cores' time that was neither idle nor waiting for a disk nor taken by another virtual machine.

    Unlike the processes' own time it includes what the kernel does for them in interrupts, such as delivering packets.
    """
    user, nice, system, _idle, _iowait, irq, softirq = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + irq + softirq) / TICKS_PER_S


def _stat_of(sessions: Set[int]) -> Iterator[List[str]]:
    """_stat() of each of their processes."""
    for entry in os.listdir("/proc"):
        fields = _stat(entry) if entry.isdigit() else None
        if fields is not None and int(fields[3]) in sessions:
            yield fields


def _stat(pid: str) -> Optional[List[str]]:
    """Fields of /proc/PID/stat after the name (so that index 0 is the state), then the process id once more; None for
    a process that has ended."""
    try:
        text = Path("/proc", pid, "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return [*text.rpartition(")")[2].split(), pid]


def _cpu_s(stat: List[str]) -> float:
    return sum(map(int, stat[11:15])) / TICKS_PER_S  # utime, stime, cutime, cstime


def _tasks(pid: str) -> List[str]:
    """Its threads, as paths below /proc; none of a process that has ended."""
    try:
        return [f"{pid}/task/{task}" for task in os.listdir(f"/proc/{pid}/task")]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _status_bytes(pid: str, field: str) -> int:
    return _status(pid, field) * 1024


def _status(task: str, field: str) -> int:
    """0 for one that has ended."""
    try:
        lines = Path("/proc", task, "status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(field))
