"""What each worker of a chaos job runs: rounds whose results are known exactly, and the blow at its moment.

Gradients are whole numbers and the servers run SGD with momentum 1/2, so float32 holds every weight exactly, and each
worker compares every element with what it must be: in a job that goes on without a worker, with its gradient in the
round in which it was lost, or without. The worker that strikes looks at its own counters without pause:
the moment is when so many slices of the round have left, or have landed.

Each worker keeps a journal, JSON lines in a file: the rounds that were right or wrong, the blow, the error, the end.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Callable, List, Optional, Sequence

import numpy as np

from p3.measure.chaos import returns
from p3.measure.chaos.matrix import CUT, NUMPY, SERVERS, WORKERS, Cell, Victim
from p3.measure.chaos.strike import MARK, find, strike
from p3.measure.lab import network
from p3.measure.workers.lines import digest
from p3.settings import Settings
from p3.snapshots import files
from p3.worker import session as sessions
from p3.worker.key import Key
from p3.worker.session import Session

KEYS, ELEMENTS = 4, 1_000_000  # 80 slices
SGD = {"name": "sgd", "momentum": 0.5, "clip_gradient": -1.0, "multi_precision": False}
WAIT_S = 60.0
STRUCK_TIMEOUT_S = 30.0

History = Sequence[Sequence[int]]  # of each round, the ranks whose gradients its sums have


class Journal:
    def __init__(self, path: Path) -> None:
        self._file = open(path, "a", encoding="utf-8")

    def __call__(self, kind: str, **fields) -> None:
        self._file.write(json.dumps(dict(fields, kind=kind, at=time.monotonic())) + "\n")
        self._file.flush()


class Blow:
    """Waits for its moment, and strikes."""

    def __init__(self, cell: Cell, options: argparse.Namespace, journal: Journal) -> None:
        self.cell = cell
        self._options, self._journal = options, journal
        self._random = random.Random(options.seed)
        self._fraction = self._random.uniform(0.1, 0.8)
        self._pid: Optional[int] = None

    def find_victim(self) -> None:
        is_self = self.cell.victim.role == "worker"
        self._pid = os.getpid() if is_self else find(self.cell.victim, os.environ[MARK])

    def linger(self) -> None:
        """Somewhere in the time that a process takes to start."""
        time.sleep(self._random.uniform(0, 0.5))

    def now(self, **moment) -> None:
        struck = Path(self._options.folder, "struck")
        self._journal("strike", **moment)
        if self._pid == os.getpid() and not self.cell.is_cut:
            struck.touch()
        strike(self.cell, self._pid, self._options.lab, self._options.host)
        struck.touch()

    def in_round(self, session: Session, number: int, slices: int, pushed: int) -> bool:
        """True if it struck in this round of so many slices, of which the caller has pushed some and holds back the
        rest: so the moment comes while the round is under way, however late this process looks."""
        if self.cell.hit_in != number:
            return False
        if self.cell.victim.role == "server":
            slices, pushed = slices // session.num_servers, pushed // session.num_servers
        before, deadline = self._before, time.monotonic() + STRUCK_TIMEOUT_S
        while True:
            sent, landed = (now - then for now, then in zip(self._progress(session), before))
            if (landed if self.cell.moment == "mid-broadcast" else sent) >= max(1, int(self._fraction * pushed)):
                break
            if time.monotonic() > deadline:
                return False
            session.check()
        self.now(round=number, sent=int(sent), landed=int(landed), slices=slices)
        sent, landed = (now - then for now, then in zip(self._progress(session), before))
        self._journal("after", sent=int(sent), landed=int(landed))
        return True

    def in_snapshot(self, number: int) -> bool:
        """The same while the snapshot after that round is being written."""
        if self.cell.moment != "snapshot" or number != self.cell.course.hit_snapshot:
            return False
        directory = Path(os.environ["P3_SNAPSHOT_DIR"])
        deadline = time.monotonic() + WAIT_S
        while not list(directory.glob(f"round-{number:012d}*")) and time.monotonic() < deadline:
            time.sleep(0.0005)
        time.sleep(self._random.uniform(0, 0.03))
        self.now(round=number, complete=(directory / f"round-{number:012d}").exists())
        return True

    def choose(self, count: int) -> int:
        """One of 0 to count - 1."""
        return self._random.randrange(count)

    def before_round(self, session: Session) -> None:
        self._before = self._progress(session)

    def _progress(self, session: Session):
        """Slices that have left for the victim, or for all, and that have come from there."""
        if self.cell.victim.role == "server":
            traffic = session.traffic_with(self.cell.victim.rank)
            return traffic["slices_sent"], traffic["slices_received"]
        counters = session.counters()
        # A machine's leader also passes slices on to its others; they have nothing but what it passes on.
        local = counters["local"] if session.local_rank > 0 else {"slices_sent": 0, "slices_received": 0}
        return tuple(counters[name] + local[name] for name in ("slices_sent", "slices_received"))


def gradient(rank: int, number: int, key: int) -> float:
    return float((rank + 2 * number + 3 * key) % 5 - 1)


def weights(history: History, key: int) -> float:
    """After these rounds, each with these ranks, with the sums of all their gradients and MXNet's SGD."""
    weight, momentum = float(key), 0.0
    for passed, ranks in enumerate(history, 1):
        momentum = SGD["momentum"] * momentum - sum(gradient(rank, passed, key) for rank in ranks)
        weight += momentum
    return weight


def train(
    session: Session, journal: Journal, cell: Cell, blow: Optional[Blow], folder: Path, alone: Callable[[int], None]
) -> None:
    """`folder`: of the run. `alone(round)` is called behind each round of a job that has lost a machine."""
    rounds = cell.course.rounds
    has_snapshots = "P3_SNAPSHOT_DIR" in os.environ
    begun, state = session.resume() if has_snapshots or cell.joins else (0, None)
    history = list(state["history"]) if begun else []
    own = Sums(state) if cell.servers_only_sum else None
    store = session.new_store()
    if own is None:
        session.set_optimizer(store, SGD)
    keys = [session.declare(f"w{index}", (ELEMENTS,), "float32", store) for index in range(KEYS)]
    landings = [np.zeros(ELEMENTS, np.float32) for _ in keys]
    firsts = [np.full(ELEMENTS, weights([], index), np.float32) for index in range(KEYS)]
    for key, first, landing in zip(keys, firsts, landings):
        if begun and has_snapshots:
            first = session.resumed_value(key)
        session.init(key, first if session.is_first else None, landing).wait(WAIT_S)
        if begun and has_snapshots:
            session.restore(key)
    values = landings if own is None else own.values
    journal("begun", round=begun, **judged(cell, history, values))
    members = range(session.num_workers)
    marks = returns.key_of_marks(session) if cell.regains else None
    for number in range(begun + 1, rounds + 1):
        if number == rounds:
            await_second_blow(cell, folder)
        if marks is not None:
            until_servers_are_back(session, marks, number - 1, folder)
        if cell.joins:
            given = {} if own is None else own.state()
            given["history"] = list(history)
            members = all_members(cell, number - 1, functools.partial(session.agree_on_members, number - 1, given))
        gradients = [np.full(ELEMENTS, gradient(session.rank, number, index), np.float32) for index in range(KEYS)]
        if blow is not None:
            blow.before_round(session)
        operations = []
        for index, (key, pushed, landing) in enumerate(zip(keys, gradients, landings)):
            if blow is not None and index == KEYS - 1:
                slices = -(-ELEMENTS // session.slice_size.of(ELEMENTS))
                if blow.in_round(session, number, KEYS * slices, index * slices):
                    blow = None
            operations.append(session.pushpull(key, pushed, landing, priority=-index, lr=1.0))
        for operation in operations:
            operation.wait(WAIT_S)
        if own is not None:
            own.apply(landings)
        history.append(list(members))
        journal("round", round=number, **judged(cell, history, values))
        if has_snapshots:
            session.snapshot(number, keys, {"round": number, "history": history})
            if blow is not None and blow.in_snapshot(number):
                blow = None
        if session.num_workers < WORKERS:
            alone(number)


class Sums:
    """What a worker makes of sums that servers do not apply."""

    def __init__(self, state: Optional[dict]) -> None:
        """`state`: of a process that has joined."""
        given = state or {}
        begin = ([np.full(ELEMENTS, weights([], index), np.float32) for index in range(KEYS)],
                 [np.zeros(ELEMENTS, np.float32) for _ in range(KEYS)])  # fmt: skip
        self.values, self._momenta = ([one.copy() for one in given.get(name, first)]
                                      for name, first in zip(("values", "momenta"), begin))  # fmt: skip

    def apply(self, sums: list) -> None:
        for value, momentum, gradients in zip(self.values, self._momenta, sums):
            momentum *= np.float32(SGD["momentum"])
            momentum -= gradients
            value += momentum

    def state(self) -> dict:
        return {"values": list(self.values), "momenta": list(self._momenta)}


def strike_again(cell: Cell, options: argparse.Namespace, session: Session) -> None:
    """In a thread: a server or this process is killed within 3 s of the first blow, wherever the process that is to
    join is by then; or who was stopped or cut off comes back about when it is given up; or the other server is killed
    as this worker hears that the first one is back, or up to half a second later."""
    drawn, folder = random.Random(options.seed), Path(options.folder)
    victim, delay_s = Victim("server", drawn.randrange(SERVERS)), drawn.uniform(0, 3)
    if cell.regains:
        victim, delay_s = Victim("server", 1 - cell.victim.rank), max(0.0, drawn.uniform(-0.25, 0.5))
    if cell.returns:
        victim, delay_s = cell.victim, drawn.uniform(0.6, 1.3) * Settings.from_env(os.environ).timeout_s
    pid = os.getpid() if cell.loses_worker_too else find(victim, os.environ[MARK])

    def follow() -> None:
        while not (folder / "struck").exists() or (cell.regains and session.servers.changes < 2):
            time.sleep(0.001)
        time.sleep(delay_s)
        (folder / "struck again").touch()
        if cell.returns and cell.blow == CUT:
            network.mend(Path(options.lab), int(options.host))
        else:
            with contextlib.suppress(ProcessLookupError):  # `p3 run` has ended what was given up
                os.kill(pid, signal.SIGCONT if cell.returns else signal.SIGKILL)

    threading.Thread(target=follow, daemon=True).start()


def await_second_blow(cell: Cell, folder: Path) -> None:
    """If there is one behind a first that has fallen."""
    deadline = time.monotonic() + WAIT_S
    while cell.has_second_blow and (folder / "struck").exists() and time.monotonic() < deadline:
        if (folder / "struck again").exists():
            return
        time.sleep(0.001)


def until_servers_are_back(session: Session, key: Key, number: int, folder: Path) -> None:
    def lacks_one() -> bool:
        blows = sum((folder / name).exists() for name in ("struck", "struck again"))
        return session.servers.changes < 2 * blows

    returns.until_all_are_back(session, key, lambda: session.agree_on_members(number), lacks_one, WAIT_S)


def bring_another(cell: Cell, options: argparse.Namespace, arguments: Sequence[str]) -> None:
    """In a thread: starts a process that joins the job, about when the blow falls, again and again until one has."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("DMLC_NUM_")}
    env["P3_RANK"] = str(cell.workers)
    job = [sys.executable, "-m", "p3.measure.chaos.job", *arguments]

    def bring() -> None:
        time.sleep(random.Random(-options.seed).uniform(0, 2))
        while subprocess.call([sys.executable, "-m", "p3", "join", *job], env=env) != 0:
            pass

    threading.Thread(target=bring, daemon=True).start()


def all_members(cell: Cell, number: int, agree: Callable[[], Sequence[int]]) -> List[int]:
    """At this mark, when another process has joined in the place of one that is lost; or, from the blow on, a further
    one. `agree()`: members(number) of whatever is trained."""
    wanted = set(range(cell.workers)) if cell.rejoins else {cell.workers} if number >= cell.hit_in else set()
    deadline = time.monotonic() + WAIT_S
    while True:
        members = agree()
        if wanted <= set(members) or time.monotonic() > deadline:
            return list(members)
        time.sleep(0.05)


def judged(cell: Cell, history: History, landings: list) -> dict:
    """Whether all elements are right; where an element may have one of two values, also a digest, which all workers
    must have alike."""
    possible = _without(cell, history) if cell.departs else [history]
    wanted = ([weights(one, index) for one in possible] for index in range(KEYS))
    right = all(bool(np.isin(landing, values).all()) for landing, values in zip(landings, wanted))
    return {"right": right, "digest": digest(landings)} if cell.departs else {"right": right}


def _without(cell: Cell, history: History) -> List[History]:
    """What the history may be, if the victim departs: of the round in which it was struck, each slice has its gradient
    or lacks it. Between rounds it has none under way. If another one joins, it does before the next round. If a second
    one departs, some time, it is struck in the last round in which it was a member, if in any. One that is back may be
    given up in any later round, or never."""
    course, rounds = cell.course, list(enumerate(history, 1))
    whole = {"first-round": 0, "snapshot": course.hit_snapshot, "exit": course.rounds}  # the last it took part in
    last = whole.get(cell.moment, course.hit_in - 1)
    lasts = (last,) if cell.moment in ("snapshot", "exit") else (last, last + 1)
    is_back = lambda number: cell.rejoins and number > last + 1  # noqa: E731
    is_there = lambda rank, number, one: rank != cell.victim.rank or number <= one or is_back(number)  # noqa: E731
    if cell.returns:
        lasts = range(last, course.rounds + 1)
    of_first = [[[rank for rank in ranks if is_there(rank, number, one)] for number, ranks in rounds] for one in lasts]
    if not cell.loses_worker_too:
        return of_first
    last = max((number for number, ranks in rounds if cell.second in ranks), default=0)
    return of_first + [[[rank for rank in ranks if (rank, number) != (cell.second, last)]
                        for number, ranks in enumerate(one, 1)] for one in of_first]  # fmt: skip


def call_machine_back(cell: Cell, options: argparse.Namespace, number: int) -> None:
    """Once this job, which has gone on without it, has a snapshot of its own: then it has to come back with both."""
    if cell.fault != "back" or number % cell.course.snapshot_every:
        return
    deadline = time.monotonic() + WAIT_S
    while max(files.rounds(os.environ["P3_SNAPSHOT_DIR"])) < number and time.monotonic() < deadline:
        time.sleep(0.005)
    network.mend(Path(options.lab), int(options.host))
    os.kill(os.getpid(), signal.SIGKILL)


def leave(session: Session, blow: Optional[Blow], options: argparse.Namespace) -> None:
    """Not all at once, if the blow is to fall while the job ends."""
    session.barrier()
    if options.moment != "exit":
        session.close()
    elif blow is None:
        deadline = time.monotonic() + STRUCK_TIMEOUT_S
        while not Path(options.folder, "struck").exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        session.close()
    else:
        if blow.cell.victim.role != "worker":
            session.close()  # the others stay for the blow
        blow.now(round=blow.cell.course.rounds)
        session.close()


def main(arguments: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="p3.measure.chaos.job")
    parser.add_argument("--folder", required=True)
    parser.add_argument("--role", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--fault", required=True)
    parser.add_argument("--moment", required=True)
    parser.add_argument("--training", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--striker", type=int, required=True)
    parser.add_argument("--by", default="")
    parser.add_argument("--lab")
    parser.add_argument("--host")
    options = parser.parse_args(arguments)
    rank = int(os.environ["P3_RANK"])
    journal = Journal(Path(options.folder, f"worker-{rank}.jsonl"))
    strikes = rank == options.striker and not Path(options.folder, "struck").exists()
    cell = Cell(Victim(options.role, options.rank), options.fault, options.moment, options.training, options.by)
    blow = Blow(cell, options, journal) if strikes else None
    if cell.grows and rank == min(cell.others):
        bring_another(cell, options, sys.argv[1:] if arguments is None else arguments)
    if blow is not None:
        blow.find_victim()
        if options.moment == "rendezvous":
            blow.linger()
            blow.now()
            blow = None
    try:
        if options.training == NUMPY:
            session = Session.open()
            if cell.has_second_blow and rank == cell.second:
                strike_again(cell, options, session)
            alone = functools.partial(call_machine_back, cell, options)
            train(session, journal, cell, blow, Path(options.folder), alone)
        else:
            from p3.measure.chaos import trainings

            session = sessions.current()
            at_mark = functools.partial(all_members, cell) if cell.joins else None
            trainings.train(options.training, session, journal, blow, at_mark)
        leave(session, blow, options)
    except Exception as error:
        journal("error", text=str(error))
        raise
    journal("end")
    return 0


if __name__ == "__main__":
    sys.exit(main())
