"""The snapshots of a job, as one worker takes part in them: which rounds, and who writes what.

Between two steps the training thread only queues what copies the values, in the order of each key's rounds, and copies
what the script gave. A thread of its own waits for the copies, writes this worker's part, and reports it; on worker 0
it also tells the servers to write theirs, and completes the snapshot when all parts are there.

A snapshot that cannot be written, as the disk is full for example, is given up: the job and the snapshots before it are
worth more. Every node that fails says so in its log, and worker 0 what is lost by it.
"""

from __future__ import annotations

import logging
import threading
from typing import Any, Callable, List, Optional, Sequence

import numpy as np

from p3._core import P3Error
from p3.cluster.messages import sendable
from p3.snapshots import files, tree
from p3.worker.links.link import Link
from p3.worker.snapshots.replicas import Replicas
from p3.worker.snapshots.demand import Demand
from p3.worker.snapshots.saved import Saved

log = logging.getLogger("p3.snapshots")

_SHORT_WAIT_S = 1.0  # of training, which is not worth a word


class Snapshots:
    """Of one session. In this order for each: due(), wait_for_last(), queueing of copies, write(); or due(), take().
    Threads: these, resume() and finish() from one."""

    def __init__(self, session, link: Link, saved: Saved) -> None:
        settings = link.settings
        self._session, self._send, self._saved = session, link.send, saved
        self.counts = {"taken": 0, "failed": 0}  # of this job's snapshots, as far as this worker has heard
        self.directory: Optional[str] = settings.snapshot_dir
        self._every: int = settings.snapshot_every
        self._keep: int = settings.snapshot_keep
        self.last_round = 0  # behind which the script has marked the end of a step
        self._writer: Optional[threading.Thread] = None
        self._writing = 0  # the round of the last snapshot
        self._completes = False  # that one, as the job's first worker
        self._parts: Optional[List[dict]] = None  # of that one, on the first worker, when all are written
        self.taken = 0  # the last round whose snapshot was completed
        self.has_failed = False  # the last one that was not; or it was given up, as somebody took no part
        self.over = 0  # the last round whose snapshot was completed or given up
        self._demand = Demand(session, link, self)
        session.handle("snapshot_complete", self._on_complete)
        session.handle("snapshot_failed", self._on_failed)
        session.handle("snapshot_taken", self._on_taken)
        session.handle("progress", self._on_progress)

    # Taking one

    def due(self, round: int) -> bool:
        """Whether this round's snapshot is to be taken: not while a worker that has taken its last step takes no part.
        ValueError if rounds do not ascend."""
        if type(round) is not int or not self.last_round < round <= files.MAX_ROUND:
            raise ValueError(
                "%s: a snapshot of round %r after that of round %d: a round is the number of steps taken so far"
                % (self._session.label, round, self.last_round)
            )
        if self.directory is None:
            self.last_round = round
            return False
        is_demanded = self._demand.pass_mark(round)
        return (is_demanded or round % self._every == 0) and self._session.joins.all_take_part(round)

    def wait_for_last(self, round: int) -> None:
        """Before the copies are queued: until the snapshot before is written. The servers keep one set of copies."""
        is_from_start = self._session.entrance.barrier == 0
        if self._writer is None and self._session.is_first and self._saved.source is None and is_from_start:
            later = [each for each in files.rounds(self.directory) if each not in self._saved.refused]
            if later and later[0] >= round:
                raise ValueError(
                    "%s: P3_SNAPSHOT_DIR=%s holds a snapshot of round %d, and this job, at round %d, has not resumed "
                    "from it. Call resume() before the first step, or give the job a directory of its own"
                    % (self._session.label, self.directory, later[0], round)
                )
        self._completes = self._session.is_first  # if the worker before has departed since, nobody completes it
        if self._writer is not None:
            self._writer.join(_SHORT_WAIT_S)
            if self._writer.is_alive():
                log.warning(
                    "%s: the snapshot of round %d waits until that of round %d is written; a larger P3_SNAPSHOT_EVERY "
                    "avoids it", self._session.label, round, self._writing,
                )  # fmt: skip
        self.finish()
        self._server_changes = self._session.servers.changes  # the writer of the one before has said its own count

    def take(self, round: int, keys: Sequence[Any], state: Any) -> None:
        """All of these for a session without stores: the copies are queued here."""
        session = self._session
        own = {"state": tree.checked(state, "state"), "residuals": []}
        self.wait_for_last(round)
        operations = []
        for key in keys:
            residual = None
            if session.core.keeps_residual(key.handle):
                residual = np.zeros(session.core.residual_floats(key.handle), "float32")
            operations.append(session.core.capture(key.handle, round, residual))
            kept = session.low_rank.state(key) if key.rank else residual
            own["residuals"].append([key.store, key.name, kept])
        replicas = self.copy_replicas(keys, operations)
        describe = lambda: [session.keys.describe(key, key.name) for key in keys]  # noqa: E731
        self.write(round, describe, lambda: session.wait(operations), own, replicas)

    def copy_replicas(self, keys: Sequence[Any], operations: List[Any]) -> Replicas:
        """Behind the last round of each key: what this worker alone writes of those that workers update. Adds the
        operations that copy it."""
        replicas = Replicas(self._session)
        if self._completes:
            operations += replicas.begin(keys)
        return replicas

    def write(
        self, round: int, describe: Callable[[], List[dict]], copied: Callable[[], None], own: Any, replicas: Replicas
    ) -> None:  # fmt: skip
        """Has all parts written; returns at once.

        `copied` is called in another thread, and returns when the copies are made; then `describe`, which describes
        their keys as reading.Snapshot has them, on the first worker. `own` is a tree of what this worker alone knows.
        `replicas`: of copy_replicas().
        """
        self._writing, self._parts = round, None
        arguments = (round, describe, copied, own, replicas)
        self._writer = threading.Thread(target=self._write, args=arguments, name="p3-snapshot", daemon=True)
        self._writer.start()
        self._demand.end_with(round)

    def finish(self) -> None:
        """Until what is being written is, or is given up; P3Error if the job fails meanwhile."""
        if self._writer is not None:
            self._writer.join()  # it has deadlines, and ends with the job
            self._session.check()

    def _on_complete(self, message: dict) -> None:
        if message["round"] == self._writing:
            self._parts = message["parts"]

    def _on_taken(self, message: dict) -> None:
        self.over = self.taken = message["round"]
        self.has_failed = False
        self.counts["taken"] += 1

    def _on_failed(self, message: dict) -> Optional[Callable[[], None]]:
        self.over, text = message["round"], message["text"]
        self.has_failed = bool(text)
        if not text:  # somebody takes no part any more, as uneven data may have it
            return None
        self.counts["failed"] += 1
        return (lambda: self._mourn(message["round"], text)) if self._session.is_first else None

    def _mourn(self, round: int, text: str) -> None:
        before = self.taken or self._saved.round
        last = "and the snapshot of round %d stays" % before if before else "without any snapshot yet"
        log.error(
            "%s: no snapshot of round %d: %s. The job goes on, %s; %d failed so far",
            self._session.label, round, text, last, self.counts["failed"],
        )  # fmt: skip

    def _on_progress(self, message: dict) -> None:
        self._session.on_progress(message)
        if self._session.is_first:
            self._session.tell_progress()  # as the others wait for this one

    def _write(self, round: int, describe, copied, own: Any, replicas: Replicas) -> None:
        session = self._session
        try:
            copied()
            if self._completes:
                files.remove_leftovers(self.directory, before=round)
                self._send({"kind": "captured", "round": round, "changes": self._server_changes})
            name = "worker-%d" % session.rank
            tensors = [*tree.encode(own), *replicas.tensors()]
            part = files.write_part(self.directory, round, name, tensors, self._saved.new_pace())
            self._send({"kind": "snapshot_written", "round": round, **part})
            if self._completes:
                self._complete(round, describe)
        except P3Error:
            pass  # the job has failed, as every call of the session says
        except files.NotShared as error:  # nor will the next one be
            session.fail("the snapshot of round %d cannot be written: %s: %s" % (round, error.filename, error.strerror))
        except Exception as error:
            text = "%s: %s" % (session.label, files.why(error))
            if not self._completes:  # who logs what comes back from the scheduler
                log.error("%s; there is no snapshot of round %d", text, round)
            self._send({"kind": "snapshot_failed", "round": round, "text": sendable(text)})
        if self._completes and not session.has_ended:
            files.give_up(self.directory, round)  # what is not complete

    def _complete(self, round: int, describe) -> None:
        what = "for the parts of the snapshot of round %d" % round
        self._session.wait_until(lambda: self._parts is not None or self.over >= round, what)
        if self._parts is None:
            return
        parts = {
            "%s-%d" % (each["role"], each["rank"]): {"bytes": each["bytes"], "sha256": each["sha256"]}
            for each in self._parts
        }
        files.complete(self.directory, round, {"parts": parts, "keys": describe()}, self._keep)
        log.info("%s: the snapshot of round %d is complete", self._session.label, round)
        self._send({"kind": "snapshot_taken", "round": round})
