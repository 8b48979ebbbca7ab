"""Where this worker stands in its program, and what it tells the scheduler of that while a lost worker is waited for.

Steps (steps.py) keeps the log of the script's calls; here they are noted, in their order, and its answers are sent.
Where lost workers end the job, nothing is noted.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional

from p3.worker.key import Agreed, Identity, Key
from p3.worker.link import Link
from p3.worker.steps import Steps


class Progress:
    """Of one session; `session` guards it by its lock. Threads: any."""

    def __init__(self, session, link: Link, agreed: Dict[Identity, Agreed], numbers: Callable[[], Any]) -> None:
        """`agreed`: the session's, of all keys. `numbers` describes the optimizers, as JSON can carry it,
        for a successor."""
        self._session = session
        self._send = link.send
        self._agreed = agreed
        past = link.rejoined or {"barriers": 0, "in_join": False}
        # What the predecessor has entered, and this script may come to again.
        self._barriers_behind: int = past["barriers"]
        self._join_behind: bool = past["in_join"]
        self._steps: Optional[Steps] = None
        if link.replaces_workers:
            self._steps = Steps(numbers, session.completed_pushes, agreed.__contains__)
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
        """See Session.join_began."""
        session, snapshots = self._session, self._session.snapshots
        if self._join_behind:
            self._join_behind = False
            return False
        snapshots.finish()  # or its thread would tell of a snapshot behind the word that we take no part
        joined = {"kind": "joined", "worker": session.rank, "step": 0}
        if self._steps is None:
            if snapshots.are_taken:
                self._send(joined)
            return True
        with session.changed:
            before = snapshots.times_joined(session.rank)
            self._steps.join()
            self._send(dict(joined, step=self._steps.step))
            self._tell()  # behind that word
        # Before the first skip: if this worker is lost then, all know why it had skipped a round.
        is_counted = lambda: snapshots.times_joined(session.rank) > before  # noqa: E731
        session.wait_until(is_counted, session.wait_timeout_s, "for the scheduler")
        return True

    def joined(self) -> None:
        """All have called join()."""
        session, snapshots = self._session, self._session.snapshots
        if self._steps is not None:
            session.wait_until(snapshots.all_joined, session.wait_timeout_s, "to hear who has joined")
            self._note(Steps.joined, snapshots.joined_at())
        snapshots.join_ended()

    # The scheduler's messages, with the session's lock held

    def on_agreed(self, identity: Identity, catch_up: Optional[int]) -> None:
        if self._steps is not None:
            if catch_up is not None:
                self._steps.know(identity, catch_up)
            self._tell()

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
            rounds = news.pop("rounds")
            keys = [self._agreed[identity].plan.wire_key for identity in rounds]
            marked = self._steps.is_marked
            self._send({"kind": "place", "keys": keys, "rounds": list(rounds.values()), "marked": marked, **news})
