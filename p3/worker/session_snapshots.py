"""The snapshots of a job, as one worker takes part in them: which rounds, who writes what, and coming back to one.

A job may come back with another number of workers: resumed.py has the rule for what was a worker's own.

Between two steps the training thread only queues what copies the values, in the order of each key's rounds, and copies
what the script gave. A thread of its own waits for the copies, writes this worker's part, and reports it; on worker 0
it also tells the servers to write theirs, and completes the snapshot when all parts are there.

A failure to write fails the job: whoever asked for snapshots would not want to learn later that there are none.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence

import numpy as np

from p3._core import P3Error
from p3.snapshots import files, tree
from p3.worker import dgc
from p3.worker.resumed import Resumed, part_rank, takes_over_from, what_changes

log = logging.getLogger("p3.snapshots")

_SHORT_WAIT_S = 1.0  # of training, which is not worth a word


class Snapshots:
    """Of one session. In this order for each: due(), wait_for_last(), queueing of copies, write(); or due(), take().
    Threads: these, resume() and finish() from one."""

    def __init__(self, session, link) -> None:
        settings = link.settings
        self._session, self._send = session, link.send
        self.directory: Optional[str] = settings.snapshot_dir
        self._every: int = settings.snapshot_every
        self._keep: int = settings.snapshot_keep
        self._last_round = 0
        self._writer: Optional[threading.Thread] = None
        self._writing = 0  # the round of the last snapshot
        self._parts: Optional[List[dict]] = None  # of that one, on worker 0, when all are written
        self._chosen: Optional[int] = None  # worker 0's choice of what to resume
        self.source: Optional[files.Snapshot] = None  # what this job was resumed from
        self.own: Any = None  # what this worker gave write() for it; a new rank: what worker 0 gave
        self._gone: Dict[int, Any] = {}  # the same of ranks whose residuals this worker takes over
        session.handle("snapshot_complete", self._on_complete)
        session.handle("resume", self._on_resume)

    # Taking one

    def due(self, round: int) -> bool:
        """Whether this round's snapshot is to be taken: not while a worker that has taken its last step takes no part.
        ValueError if rounds do not ascend."""
        if type(round) is not int or not self._last_round < round <= files.MAX_ROUND:
            raise ValueError(
                "%s: a snapshot of round %r after that of round %d: a round is the number of steps taken so far"
                % (self._session.label, round, self._last_round)
            )
        self._last_round = round
        is_due = self.directory is not None and round % self._every == 0
        return is_due and not self._session.progress.anyone_has_joined()

    def wait_for_last(self, round: int) -> None:
        """Before the copies are queued: until the snapshot before is written. The servers keep one set of copies."""
        if self._writer is None and self._session.rank == 0 and self.source is None:
            later = files.rounds(self.directory)
            if later and later[0] >= round:
                raise ValueError(
                    "%s: P3_SNAPSHOT_DIR=%s holds a snapshot of round %d, and this job, at round %d, has not resumed "
                    "from it. Call resume() before the first step, or give the job a directory of its own"
                    % (self._session.label, self.directory, later[0], round)
                )
        if self._writer is not None:
            self._writer.join(_SHORT_WAIT_S)
            if self._writer.is_alive():
                log.warning(
                    "%s: the snapshot of round %d waits until that of round %d is written; a larger P3_SNAPSHOT_EVERY "
                    "avoids it", self._session.label, round, self._writing,
                )  # fmt: skip
        self.finish()

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
            own["residuals"].append([key.store, key.name, residual])
        describe = lambda: [session.describe_key(key, key.name) for key in keys]  # noqa: E731
        self.write(round, describe, lambda: session.wait(operations), own)

    def write(self, round: int, describe: Callable[[], List[dict]], copied: Callable[[], None], own: Any) -> None:
        """Has all parts written; returns at once.

        `copied` is called in another thread, and returns when the copies are made; then `describe`, which describes
        their keys as files.Snapshot has them, on worker 0. `own` is a tree of what this worker alone knows.
        """
        self._writing, self._parts = round, None
        arguments = (round, describe, copied, own)
        self._writer = threading.Thread(target=self._write, args=arguments, name="p3-snapshot", daemon=True)
        self._writer.start()

    def finish(self) -> None:
        """Until what is being written is; P3Error if the job fails meanwhile."""
        if self._writer is not None:
            self._writer.join()  # it has deadlines, and ends with the job
            self._session.check()

    def _on_complete(self, message: dict) -> None:
        if message["round"] == self._writing:
            self._parts = message["parts"]

    def _on_resume(self, message: dict) -> None:
        self._chosen = message["round"]

    def _write(self, round: int, describe, copied, own: Any) -> None:
        session, name = self._session, "worker-%d" % self._session.rank
        try:
            copied()
            if session.rank == 0:
                self._send({"kind": "captured", "round": round})
            part = files.write_part(self.directory, round, name, *tree.encode(own))
            self._send({"kind": "snapshot_written", "round": round, **part})
            if session.rank == 0 and self._all_written(round):
                parts = {
                    "%s-%d" % (each["role"], each["rank"]): {"bytes": each["bytes"], "sha256": each["sha256"]}
                    for each in self._parts
                }
                files.complete(self.directory, round, {"parts": parts, "keys": describe()}, self._keep)
                log.info("%s: the snapshot of round %d is complete", session.label, round)
        except P3Error:
            pass  # the job has failed, as every call of the session says
        except Exception as error:  # nobody else could hear of it
            reason = "%s: %s" % (error.filename, error.strerror) if isinstance(error, OSError) else str(error)
            session.fail("the snapshot of round %d cannot be written: %s" % (round, reason))

    def _all_written(self, round: int) -> bool:
        try:
            what = "for the parts of the snapshot of round %d; it is given up" % round
            self._session.wait_until(lambda: self._parts is not None, what)
        except TimeoutError as error:
            log.warning("%s", error)
        return bool(self._parts)  # there are none if a worker takes no part any more

    # Coming back

    def resume(self) -> Resumed:
        """Finds the newest valid snapshot; on every worker, before its first key. Blocks, at most P3_WAIT_TIMEOUT_S."""
        if self._session.rejoined_at is not None:
            return Resumed(self._session.rejoined_at, {})
        if self.directory is None:
            return Resumed(0, {})
        if self._chosen is None:
            self._choose()
        if self.own is None and self._chosen:
            self._load(self._chosen)
        if self.own is None:
            return Resumed(0, {})
        before = self.source.workers
        from_rank = part_rank(self._session.rank, before)
        return Resumed(self._chosen, self.own["state"], before, from_rank, lambda rank: self._part(rank)["state"])

    def _choose(self) -> None:
        session = self._session
        if session.rank == 0:
            self.source = self._newest()
            self._send({"kind": "resume", "round": 0 if self.source is None else self.source.round})
        what = "for worker 0 to choose a snapshot: every worker must resume"
        session.wait_until(lambda: self._chosen is not None, what)

    def _newest(self) -> Optional[files.Snapshot]:
        try:
            os.makedirs(self.directory, exist_ok=True)  # now, rather than after the first hundred steps
            files.remove_leftovers(self.directory)
            return files.newest_valid(self.directory)
        except OSError as error:
            raise ValueError(
                "%s: P3_SNAPSHOT_DIR=%s cannot be used: %s. It must be a directory, or a path where one can be made, "
                "that all nodes share" % (self._session.label, self.directory, error.strerror)
            ) from None

    def _load(self, round: int) -> None:
        session = self._session
        if self.source is None:
            with self._refusals_of(round):
                self.source = files.Snapshot(self.directory, round)
        before, now = self.source.workers, session.num_workers
        self.own = self._part(part_rank(session.rank, before))
        # Now, as the snapshot may have been removed for later ones when a key has its first push.
        self._gone = {rank: self._part(rank) for rank in takes_over_from(session.rank, before, now)[1:]}
        self._last_round = round
        log.info("%s: resumes from the snapshot of round %d", session.label, round)
        if session.rank == 0 and before != now:
            log.warning(
                "%s: the snapshot of round %d is of a job with %d workers; this one has %d. Weights and the "
                "optimizer's state are exact; %s", session.label, round, before, now, what_changes(before, now),
            )  # fmt: skip

    def _part(self, rank: int) -> Any:
        """What the worker of that rank gave write()."""
        with self._refusals_of(self.source.round):
            self.source.verify_part("worker-%d" % rank)
            return tree.decode(*self.source.worker(rank))

    @contextlib.contextmanager
    def _refusals_of(self, round: int) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise ValueError(
                "%s: cannot resume from the snapshot of round %d in %s, which worker 0 has chosen: %s"
                % (self._session.label, round, self.directory, error)
            ) from None

    @property
    def chosen(self) -> bool:
        """Whether resume() has been called."""
        return self._chosen is not None or self.directory is None or self._session.rejoined_at is not None

    def value(self, key, id) -> Optional[Any]:
        described = self._described(key, id)
        return None if described is None or self._session.rank != 0 else self.source.array(key.store, id)

    def states(self, key, id, optimizer: Optional[dict]) -> Dict[int, Any]:
        """The optimizer's arrays of a key by their part, on rank 0. ValueError unless the optimizer is the same."""
        described = self._described(key, id)
        if described is None or self._session.rank != 0:
            return {}
        if described["optimizer"] != optimizer:
            raise ValueError(
                "%s: key %r was updated with %s in the snapshot of round %d, and is with %s now"
                % (self._session.label, id, described["optimizer"], self.source.round, optimizer)
            )
        parts = [part for part in self.source.parts(key.store, id) if part != 0]
        if parts and self._session.takes_steps(key):
            raise ValueError(
                "%s: key %r had its momentum on the servers in the snapshot of round %d, and has dgc now, with a "
                "momentum on each worker: resume with the compression of that job"
                % (self._session.label, id, self.source.round)
            )
        return {part: self.source.array(key.store, id, part) for part in parts}

    def restore(self, key, takes_mean: bool = False) -> None:
        """See Session.restore."""
        session, store_part = self._session, self._session.store_state
        if key.sparse:
            rows = np.arange(key.shape[0], dtype=np.int64)
            store_part = lambda key, part, content: session.store_rows(key, rows, content, part)  # noqa: E731
        states = self.states(key, key.name, session.option(key.store, "optimizer"))
        session.wait([store_part(key, part, content) for part, content in states.items()])

        def of_key(own: Any) -> Optional[Any]:
            return next((left for store, name, left in own["residuals"] if (store, name) == key.identity), None)

        self.restore_residual(key, of_key, takes_mean)

    def restore_residual(self, key, of_key: Callable[[Any], Optional[Any]], takes_mean: bool = False) -> None:
        """What compression has left out of a key here, and on ranks that are gone. `of_key` finds it in what a worker
        gave write(). `takes_mean`: sums are divided by the number of workers, and not only by what the script says."""
        residual = None if self.own is None else of_key(self.own)
        if residual is None:
            return
        session, before = self._session, self.source.workers
        takes_steps = session.takes_steps(key)
        if before != session.num_workers:
            left_out = residual[: -dgc.ROUND_FLOATS] if takes_steps else residual
            own = [self.own] if session.rank < before else []
            added = np.zeros_like(left_out)
            for part in (*own, *self._gone.values()):
                added += of_key(part)[: len(left_out)]
            if (takes_mean or session.averages(key.store)) and not takes_steps:  # so the weights get what they are owed
                added *= np.float32(session.num_workers / before)
            residual = np.concatenate([added, residual[len(left_out) :]])
        session.core.restore_residual(key.handle, residual)

    def _described(self, key, id) -> Optional[dict]:
        described = self.source and self.source.key(key.store, id)
        if not described:
            return None
        there, here = (tuple(described["shape"]), described["dtype"]), (key.shape, key.dtype)
        if there != here:
            raise ValueError(
                "%s: key %r has shape %s and type %s, but in the snapshot of round %d shape %s and type %s: it is of "
                "another model" % (self._session.label, id, *here, self.source.round, *there)
            )
        return described
