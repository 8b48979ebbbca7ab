"""Where this worker stands in its program, and what it tells the scheduler of that while a lost worker is waited for.

Steps (steps.py) keeps the log of the script's calls; here they are noted, in their order, and its answers are sent.
Where lost workers end the job, nothing is noted.
"""

from __future__ import annotations

from collections import Counter
from typing import Dict, Optional

from p3.cluster.messages import columns
from p3.worker.key import Identity, Key
from p3.worker.keys import Keys
from p3.worker.links.link import Link
from p3.worker.replacement.steps import Steps


class Progress:
    """Of one session, whose lock guards it. Threads: any."""

    def __init__(self, session, link: Link, keys: Keys) -> None:
        self._session, self._send, self._agreed = session, link.send, keys.agreed
        past = link.rejoined or {"barriers": 0, "in_join": False}
        # What the predecessor has entered, and this script may come to again.
        self._barriers_behind: int = past["barriers"]
        self._join_behind: bool = past["in_join"]
        self._joined: Counter[int] = Counter()  # how often each worker has called join()
        self._joined_at: Dict[int, int] = {}  # and how many steps were behind it, the last time
        self._snapshot_by: Dict[int, int] = {}  # and up to which round it took part in snapshots
        self._joins = 0  # how often join() has returned, which it does for all workers
        session.handle("joined", self._on_joined)
        self._steps: Optional[Steps] = None
        self.is_noted: bool = link.replaces_workers  # else pushes and skips need not be told
        if link.replaces_workers:
            numbers = lambda: session.describe_optimizers()  # noqa: E731  it may be set at any time
            self._steps = Steps(numbers, keys.completed_pushes, keys.agreed.__contains__)
            if link.rejoined:
                self._steps.begin_behind(past["step"], past["joins"], past["marked"], past["numbers"])
            session.handle("missing", self._on_missing)
            session.handle("found", self._on_found)

    # The script's calls

    def push(self, key: Key, order: Optional[int]) -> None:
        self._barriers_behind, self._join_behind = 0, False  # this process trains on from where its predecessor stood
        self._note(Steps.push, key.identity, None if order is None else (key.store, order))

    def skip(self, key: Key) -> None:
        self._note(Steps.skip, key.identity)

    def mark(self, step: int) -> None:
        """The script says that this many steps have ended."""
        self._note(Steps.mark, step)

    def barrier(self) -> bool:
        """False: the predecessor has entered it."""
        with self._session.changed:
            if self._barriers_behind > 0:
                self._barriers_behind -= 1
                return False
        self._note(Steps.end)
        return True

    def begin_behind(self, step: int) -> None:
        self._note(Steps.begin_behind, step)

    def leave(self) -> None:
        self._note(Steps.leave)

    def join(self) -> bool:
        """This worker has taken its last step until all have. False: so has everyone, and its predecessor counted."""
        session, rank = self._session, self._session.rank
        session.entrance.require_no_push("join()")
        if self._join_behind:
            self._join_behind = False
            return False
        session.snapshots.finish()  # or its thread would tell of a snapshot behind the word that we take no part
        if self._steps is None:
            if session.snapshots.directory is not None:
                self._send_joined(0)
            return True
        with session.changed:
            before = self._joined[rank]
            self._steps.join()
            self._send_joined(self._steps.step)
            self._tell()  # behind that word
        # Before the first skip: if this worker is lost then, all know why it had skipped a round.
        session.wait_until(lambda: self._joined[rank] > before, "for the scheduler")
        return True

    def joined(self) -> None:
        """All have called join()."""
        if self._steps is not None:
            workers = range(self._session.num_workers)
            all_joined = lambda: all(self._joined[rank] > self._joins for rank in workers)  # noqa: E731
            self._session.wait_until(all_joined, "to hear who has joined")
            self._note(Steps.joined, max(self._joined_at.values()))
        self._joins += 1

    def _send_joined(self, step: int) -> None:
        session = self._session
        self._send({"kind": "joined", "worker": session.rank, "step": step, "round": session.snapshots.last_round})

    def all_take_part(self, round: int) -> bool:
        """Whether nobody has called join() before this round, and waits there still. Who has departed there counts
        until the others come out of it: they hear of that behind different rounds, and must answer alike."""
        with self._session.changed:
            return all(count <= self._joins or self._snapshot_by[rank] >= round for rank, count in self._joined.items())

    # The scheduler's messages, with the session's lock held

    def note_entered(self, rank: int) -> None:
        """Another process is that worker, which has called join() as often as all, as far as it matters."""
        self._joined[rank] = self._joins

    def on_agreed(self, identity: Identity, catch_up: Optional[int]) -> None:
        if self._steps is not None:
            if catch_up is not None:
                self._steps.know(identity, catch_up)
            self._tell()

    def _on_joined(self, message: dict) -> None:
        self._joined[message["worker"]] += 1
        self._joined_at[message["worker"]] = message["step"]
        self._snapshot_by[message["worker"]] = message["round"]

    def _on_missing(self, message: dict) -> None:
        rounds = dict(zip(message["keys"], message["rounds"]))
        known = {identity: agreed.plan.wire_key for identity, agreed in self._agreed.items()}
        pushed = {identity: rounds[wire_key] for identity, wire_key in known.items() if wire_key in rounds}
        self._steps.ask(message["rank"], message["attempt"], message["joins"], pushed)
        self._tell()

    def _on_found(self, message: dict) -> None:
        self._steps.settle(message["rank"])

    def _note(self, call, *arguments) -> None:
        if self._steps is None:
            return
        with self._session.changed:
            call(self._steps, *arguments)
            self._tell()

    def _tell(self) -> None:
        """With the lock held."""
        for news in self._steps.news():
            rounds = {self._agreed[identity].plan.wire_key: round for identity, round in news.pop("rounds").items()}
            self._send({"kind": "place", "marked": self._steps.is_marked, **columns(rounds), **news})
