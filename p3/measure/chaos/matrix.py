"""What can happen to whom, and when: the cells of the fault matrix."""

from __future__ import annotations

from typing import Iterator, NamedTuple, Sequence

WORKERS, SERVERS = 2, 2

FAULTS = {
    "kill": "SIGKILL",
    "stop": "SIGSTOP",
    "cut": "the link of its host is down; every process has a host of its own",
    "restart": "SIGKILL under `p3 run --restarts 1`: the job comes back from its last snapshot",
    "gone": "the link of a machine with a worker and a server is down for good, under `p3 run --restarts 1 "
    "--min-workers 1`: the job comes back from its last snapshot with the worker that is left",
    "back": "the same; when that worker is alone, the link is up again and it is killed: under `--restarts 2` the job "
    "comes back with both",
    "depart": "a worker of three is struck under `p3 run --on-worker-loss continue`: the others train on without it",
    "return": "a worker of three is stopped or cut off under `--on-worker-loss continue --on-server-loss continue`, "
    "and back about when it is given up: the others train on, with it or without it",
    "rejoin": "SIGKILL of a worker of three under `p3 run --on-worker-loss continue --rejoin`: another process joins "
    "in its place",
    "inherit": "a server is struck under `p3 run --on-server-loss continue`, where workers apply what it would: "
    "another one takes over; one that is stopped or cut off is back about when it is given up",
    "inherit-sums": "the same where servers only sum",
    "regain": "a server is struck under `p3 run --on-server-loss continue --rejoin`, where workers update: "
    "another process comes back in its place, and as that begins or soon after, the other server is killed",
    "regain-sums": "the same where servers only sum",
    "rejoin-heir": "the same as rejoin, with `--on-server-loss continue`, and within 3 s a server is killed, too",
    "grow": "SIGKILL of a worker of three under `p3 run --on-worker-loss continue --max-workers 4`, and within 3 s of "
    "another one, while a further one joins",
    "grow-heir": "the same, with `--on-server-loss continue`, and a server is killed instead of the other worker",
}
MOMENTS = {
    "rendezvous": "before the job is complete",
    "first-round": "the first round of the keys is under way",
    "mid-push": "in a later round, some slices of the gradients have left, and some have not",
    "mid-broadcast": "in a later round, some slices of the new values have landed, and some have not",
    "snapshot": "a snapshot is being written",
    "exit": "the last round is done, and not all have left",
}
# What strikes a victim. Who departs, or has an heir, is struck by one of these; other faults have one each.
KILL, STOP, CUT = "kill", "stop", "cut"
BLOWS = (KILL, STOP, CUT)
_BLOW_OF = {"stop": STOP, "cut": CUT, "gone": CUT, "back": CUT}  # all others: KILL
ROLES = ("worker", "server", "scheduler")

# What a job trains. The first is NumPy on the bare session, whose every weight is known; the others are Gluon, whose
# weights must be alike on all workers after each step, and after a restart those of the first start.
NUMPY = "numpy"
TRAININGS = {
    NUMPY: "four keys of one store, without MXNet",
    "two-stores": "two Trainers, each with a store of its own, which step in turns, as those of a GAN",
    "seldom": "a key that is pushed in every third step, and one that is pushed from the second step on",
    "joins": "one worker has fewer steps in each epoch, and all end it with join(); Adam",
    "adam": "Adam on the servers",
    "nadam": "Nadam, whose schedule runs over all updates",
    "ftml": "FTML, which counts the updates of each key",
    "fp16": "gradients compressed to float16, weights updated by the servers",
    "fp16-sums": "the same with sums that the workers apply, and join() at the end of each epoch",
}


COMES_BACK = ("restart", "gone", "back")
REJOINS = ("rejoin", "rejoin-heir")
GROWS = ("grow", "grow-heir")
DEPARTS = ("depart", "return", *REJOINS, *GROWS)
REGAINS = ("regain", "regain-sums")
INHERITS = ("inherit", "inherit-sums")
LOSES_SERVER = (*INHERITS, *REGAINS)
STRUCK_BY = {
    **dict.fromkeys(("depart", *INHERITS), BLOWS), "return": (STOP, CUT), **dict.fromkeys(REGAINS, (KILL, STOP)),
}  # fmt: skip
GOES_ON = (*COMES_BACK, *DEPARTS, *LOSES_SERVER)  # and so ends as it would have


class Course(NamedTuple):
    """How many rounds or steps a job has, in which the blow falls, and when snapshots are taken."""

    rounds: int
    hit_in: int
    snapshot_every: int
    hit_snapshot: int  # of that round


COURSES = {name: Course(12, 6, 3, 6) for name in TRAININGS}
COURSES[NUMPY] = Course(6, 3, 2, 4)
COURSE_OF_MACHINES = Course(8, 5, 2, 4)  # so that there is a snapshot to come back from


class Victim(NamedTuple):
    role: str
    rank: int

    def __str__(self) -> str:
        return self.role if self.role == "scheduler" else f"{self.role} {self.rank}"


class Cell(NamedTuple):
    victim: Victim
    fault: str
    moment: str
    training: str = NUMPY
    by: str = ""  # one of STRUCK_BY[fault], if there are any

    @property
    def departs(self) -> bool:
        """The others go on without it."""
        return self.fault in DEPARTS

    @property
    def rejoins(self) -> bool:
        """In its place, another process."""
        return self.fault in REJOINS

    @property
    def grows(self) -> bool:
        """By one more worker, which has the next rank."""
        return self.fault in GROWS

    @property
    def joins(self) -> bool:
        return self.rejoins or self.grows

    @property
    def regains(self) -> bool:
        """Servers come back at marks, each as another process."""
        return self.fault in REGAINS

    @property
    def goes_on_without(self) -> bool:
        """The others, while the victim is lost."""
        return self.departs or self.fault in LOSES_SERVER

    @property
    def outlives_servers(self) -> bool:
        return self.loses_server_too or self.fault in ("return", *LOSES_SERVER)

    # A second blow, some time behind the first, which falls before the job's last round.

    @property
    def loses_server_too(self) -> bool:
        """While another process joins, or before that, or behind it."""
        return self.fault in ("rejoin-heir", "grow-heir")

    @property
    def loses_worker_too(self) -> bool:
        return self.fault == "grow"

    @property
    def returns(self) -> bool:
        """The victim, about when it is given up."""
        return self.fault in ("return", *INHERITS) and self.blow != KILL

    @property
    def has_second_blow(self) -> bool:
        return self.loses_server_too or self.loses_worker_too or self.returns or self.regains

    @property
    def second(self) -> int:
        """The rank of the worker that deals the second blow, perhaps to itself."""
        return max(self.others)

    @property
    def others(self) -> Sequence[int]:
        """The ranks of workers that are there from the beginning, and are not the victim."""
        return [rank for rank in range(self.workers) if self.victim != Victim("worker", rank)]

    @property
    def servers_only_sum(self) -> bool:
        return self.loses_server_too or self.fault in ("inherit-sums", "regain-sums")

    @property
    def blow(self) -> str:
        return self.by or _BLOW_OF.get(self.fault, KILL)

    @property
    def is_cut(self) -> bool:
        """Which needs hosts of a lab."""
        return self.blow == CUT

    @property
    def workers(self) -> int:
        """One more where one departs, so that several go on and can be compared."""
        return WORKERS + self.departs

    @property
    def processes(self) -> Sequence[Victim]:
        return processes(self.workers)

    @property
    def course(self) -> Course:
        return COURSE_OF_MACHINES if self.loses_machine else COURSES[self.training]

    @property
    def hit_in(self) -> int:
        """The round that is under way then; 0 if it is none."""
        in_one = {"first-round": 1, "mid-push": self.course.hit_in, "mid-broadcast": self.course.hit_in}
        return in_one.get(self.moment, 0)

    @property
    def striker(self) -> int:
        """The rank of the worker that sees the moment and deals the blow: the victim itself, or the leader of the
        machine, whose slices go to every server."""
        return self.victim.rank if self.victim.role == "worker" else 0

    @property
    def has_snapshots(self) -> bool:
        return self.comes_back or self.moment == "snapshot"

    @property
    def comes_back(self) -> bool:
        """As a job that starts again."""
        return self.fault in COMES_BACK

    @property
    def is_outlived(self) -> bool:
        return is_outlived(self.victim.role, self.fault, self.moment)

    @property
    def loses_machine(self) -> bool:
        return self.fault in ("gone", "back")

    @property
    def hit(self) -> Sequence[Victim]:
        """All whom the fault hits."""
        return (self.victim, Victim("server", self.victim.rank)) if self.loses_machine else (self.victim,)

    @property
    def workers_at_end(self) -> Sequence[int]:
        """How many there may be. Who is cut off behind the last round may have waited for long enough, and ends in
        order, before anybody has given it up."""
        fewer = self.workers - (self.fault in ("gone", "depart", "return", "grow"))
        may_end = self.fault == "return" or (self.fault == "depart" and self.moment == "exit" and self.is_cut)
        return (fewer, self.workers) if may_end else (fewer,)


def is_outlived(role: str, fault: str, moment: str) -> bool:
    """Another one takes the victim's place, and nobody waits."""
    return (role, fault) == ("scheduler", "kill") and moment != "rendezvous"


def processes(workers: int) -> Sequence[Victim]:
    """Of a job."""
    return (
        *(Victim("worker", rank) for rank in range(workers)),
        *(Victim("server", rank) for rank in range(SERVERS)),
        Victim("scheduler", 0),
    )


def cells(
    roles: Sequence[str], faults: Sequence[str], moments: Sequence[str], trainings: Sequence[str]
) -> Iterator[Cell]:
    for training in trainings:
        for fault in faults:
            for moment in moments:
                for by in STRUCK_BY.get(fault, ("",)):
                    for victim in Cell(Victim("worker", 0), fault, moment).processes:
                        cell = Cell(victim, fault, moment, training, by)
                        if victim.role in roles and _is_possible(cell):
                            yield cell


def _is_possible(cell: Cell) -> bool:
    if cell.loses_machine:  # with another number of workers, only NumPy's job knows the weights; one machine is as good
        is_later = cell.moment in ("mid-push", "mid-broadcast", "snapshot")
        return cell.training == NUMPY and cell.victim == Victim("worker", 1) and is_later
    if cell.fault in LOSES_SERVER:  # a job that has not begun ends
        is_possible = cell.moment != "rendezvous" and not (cell.regains and cell.moment == "exit")
        return cell.training == NUMPY and cell.victim.role == "server" and is_possible
    if cell.joins:  # what the job may have trained is known where it was struck in the midst of a round
        is_numpy = cell.training == NUMPY
        is_later = cell.moment in ("mid-push", "mid-broadcast") or (is_numpy and cell.moment == "first-round")
        return (is_numpy or cell.fault == "rejoin") and cell.victim.role == "worker" and is_later
    if cell.departs:
        # Nobody goes on in a job that has not begun. How a worker was lost makes no difference to what it trained.
        is_later = cell.moment in ("mid-push", "mid-broadcast") and cell.blow == KILL
        return cell.victim.role == "worker" and (cell.moment != "rendezvous" if cell.training == NUMPY else is_later)
    if cell.training == NUMPY:
        # A job that has not begun is not started again, nor is one for its scheduler's death.
        comes_back = cell.moment != "rendezvous" and cell.victim.role != "scheduler"
        return cell.fault != "restart" or comes_back
    # That a worker or a server dies is told apart above; what comes back is what the training is about.
    is_one_of_each = cell.victim in (Victim("worker", 1), Victim("server", 0))
    return cell.fault == "restart" and is_one_of_each and cell.moment in ("mid-push", "snapshot")
