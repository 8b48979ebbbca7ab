"""What can happen to whom, and when: the cells of the fault matrix."""

from __future__ import annotations

from typing import Iterator, NamedTuple, Sequence

WORKERS, SERVERS = 2, 2

FAULTS = {
    "kill": "SIGKILL",
    "stop": "SIGSTOP",
    "cut": "the link of its host is down; every process has a host of its own",
    "restart": "SIGKILL under `p3 run --restarts 1`: the job comes back from its last snapshot",
}
MOMENTS = {
    "rendezvous": "before the job is complete",
    "first-round": "the first round of the keys is under way",
    "mid-push": "in a later round, some slices of the gradients have left, and some have not",
    "mid-broadcast": "in a later round, some slices of the new values have landed, and some have not",
    "snapshot": "a snapshot is being written",
    "exit": "the last round is done, and not all have left",
}
ROLES = ("worker", "server", "scheduler")


class Victim(NamedTuple):
    role: str
    rank: int

    def __str__(self) -> str:
        return self.role if self.role == "scheduler" else f"{self.role} {self.rank}"


class Cell(NamedTuple):
    victim: Victim
    fault: str
    moment: str

    @property
    def striker(self) -> int:
        """The rank of the worker that sees the moment and deals the blow: the victim itself, or the leader of the
        machine, whose slices go to every server."""
        return self.victim.rank if self.victim.role == "worker" else 0

    @property
    def has_snapshots(self) -> bool:
        return self.fault == "restart" or self.moment == "snapshot"


VICTIMS = (
    *(Victim("worker", rank) for rank in range(WORKERS)),
    *(Victim("server", rank) for rank in range(SERVERS)),
    Victim("scheduler", 0),
)
PROCESSES = VICTIMS


def cells(roles: Sequence[str], faults: Sequence[str], moments: Sequence[str]) -> Iterator[Cell]:
    for fault in faults:
        for moment in moments:
            if (fault, moment) == ("restart", "rendezvous"):  # a job that has not begun is not started again
                continue
            for victim in VICTIMS:
                if victim.role in roles:
                    yield Cell(victim, fault, moment)
