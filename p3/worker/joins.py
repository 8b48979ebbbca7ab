"""Who has called join(), and takes no steps, and so no part in snapshots, until all have."""

from __future__ import annotations

from collections import Counter
from typing import Dict

from p3.worker.links.link import Link


class Joins:
    """Of one session, whose lock guards it."""

    def __init__(self, session, link: Link) -> None:
        self._session, self._send = session, link.send
        self._joined: Counter[int] = Counter()  # how often each worker has called join()
        self._snapshot_by: Dict[int, int] = {}  # and up to which round it took part in snapshots
        self._over = 0  # how often join() has returned, which it does for all workers
        session.handle("joined", self._on_joined)

    def begin(self) -> None:
        """This worker has taken its last step until all have."""
        session = self._session
        session.entrance.require_no_push("join()")
        session.snapshots.finish()  # or its thread would tell of a snapshot behind the word that we take no part
        if session.snapshots.directory is not None:
            self._send({"kind": "joined", "worker": session.rank, "round": session.snapshots.last_round})

    def end(self) -> None:
        """All have called join()."""
        self._over += 1

    def all_take_part(self, round: int) -> bool:
        """Whether nobody has called join() before this round, and waits there still. Who has departed there counts
        until the others come out of it: they hear of that behind different rounds, and must answer alike."""
        with self._session.changed:
            return all(count <= self._over or self._snapshot_by[rank] >= round for rank, count in self._joined.items())

    def note_entered(self, rank: int) -> None:
        """Another process is that worker, which has called join() as often as all, as far as it matters. With the lock
        held, as what follows."""
        self._joined[rank] = self._over

    def _on_joined(self, message: dict) -> None:
        self._joined[message["worker"]] += 1
        self._snapshot_by[message["worker"]] = message["round"]
