"""The snapshots of a job, as one worker takes part in them: which rounds, who writes what, and coming back to one.

A job may come back with another number of workers: resumed.py has the rule for what was a worker's own.

Between two steps the training thread only queues what copies the values, in the order of each key's rounds, and copies
what the script gave. A thread of its own waits for the copies, writes this worker's part, and reports it; on worker 0
it also tells the servers to write theirs, and completes the snapshot when all parts are there.

A snapshot that cannot be written, as the disk is full for example, is given up: the job and the snapshots before it are
worth more. Every node that fails says so in its log, and worker 0 what is lost by it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import threading
import time
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Set

import numpy as np

from p3._core import ROUND_FLOATS, P3Error
from p3.cluster.messages import sendable
from p3.launch.execute import SAME_SIGNAL_S
from p3.snapshots import files, tree
from p3.snapshots.pace import Pace
from p3.worker.key import Identity
from p3.worker.snapshots.resumed import Resumed, part_rank, takes_over_from, what_changes

log = logging.getLogger("p3.snapshots")

_SHORT_WAIT_S = 1.0  # of training, which is not worth a word


ON_SERVERS = object()  # in the place of a first value that rank 0 need not bring


class Ended(SystemExit):
    """The job was asked to end, and every worker ends here, as from SIGTERM."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


class Snapshots:
    """Of one session. In this order for each: due(), wait_for_last(), queueing of copies, write(); or due(), take().
    Threads: these, resume() and finish() from one."""

    def __init__(self, session, link) -> None:
        settings = self._settings = link.settings
        self._session, self._send = session, link.send
        self._told_to_end_at = math.inf
        self._question = self._decision = 0  # the last one of the scheduler's, and the last that it has decided
        self._demanded, self._ends = 0, False  # so: from which round on one is due, and whether the job ends with it
        self.counts = {"taken": 0, "failed": 0}  # of this job's snapshots, as far as this worker has heard
        self.directory: Optional[str] = settings.snapshot_dir
        self._every: int = settings.snapshot_every
        self._keep: int = settings.snapshot_keep
        self.last_round = 0  # behind which the script has marked the end of a step
        self._writer: Optional[threading.Thread] = None
        self._writing = 0  # the round of the last snapshot
        self._parts: Optional[List[dict]] = None  # of that one, on worker 0, when all are written
        self._taken = 0  # the last round whose snapshot was completed
        self._has_failed = False  # the last one that was not; or it was given up, as somebody took no part
        self._over = 0  # the last round whose snapshot was completed or given up
        self._verdict: Optional[str] = None  # on worker 0: of all nodes on the snapshot that they check
        self._checked: Set[str] = set()  # parts of that one which this worker has read
        self._chosen: Optional[int] = None  # worker 0's choice of what to resume
        self._left_to_servers: Set[Any] = set()  # keys of them whose value worker 0 did not bring
        self._loaded: Set[int] = set()  # on worker 0: wire keys that the servers have loaded from it
        self.source: Optional[files.Snapshot] = None  # what this job was resumed from
        self.own: Any = None  # what this worker gave write() for it; a new rank: what worker 0 gave
        self._gone: Dict[int, Any] = {}  # the same of ranks whose residuals this worker takes over
        # By store: its number in the job of that snapshot, None if it is new since; others have the same in both.
        self._store_then: Dict[int, Optional[int]] = {}
        session.handle("snapshot_complete", self._on_complete)
        session.handle("snapshot_failed", self._on_failed)
        session.handle("snapshot_taken", self._on_taken)
        session.handle("check_snapshot", self._on_check)
        session.handle("snapshot_checked", self._on_checked)
        session.handle("progress", self._on_progress)
        session.handle("snapshot_wanted", self._on_wanted)
        session.handle("snapshot_at", self._on_decided)
        session.handle("resume", self._on_resume)
        session.handle("loaded", self._on_loaded)
        if self.directory is not None and os.environ.get("P3_SIGNALS") != "0":
            self._listen_to_signals()

    def _new_pace(self) -> Pace:
        settings = self._settings
        return Pace(settings.wait_timeout_s, lambda: self._send({"kind": "progress"}), settings.snapshot_rate)

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
        is_demanded = self._pass_mark(round)
        return (is_demanded or round % self._every == 0) and self._session.progress.all_take_part(round)

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
        describe = lambda: [session.keys.describe(key, key.name) for key in keys]  # noqa: E731
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
        self._end_with(round)

    def finish(self) -> None:
        """Until what is being written is, or is given up; P3Error if the job fails meanwhile."""
        if self._writer is not None:
            self._writer.join()  # it has deadlines, and ends with the job
            self._session.check()

    def _on_complete(self, message: dict) -> None:
        if message["round"] == self._writing:
            self._parts = message["parts"]

    def _on_taken(self, message: dict) -> None:
        self._over = self._taken = message["round"]
        self.counts["taken"] += 1

    def _on_failed(self, message: dict) -> Optional[Callable[[], None]]:
        self._over, text = message["round"], message["text"]
        self._has_failed = bool(text)
        if not text:  # somebody takes no part any more, as uneven data may have it
            return None
        self.counts["failed"] += 1
        return (lambda: self._mourn(message["round"], text)) if self._session.rank == 0 else None

    def _mourn(self, round: int, text: str) -> None:
        before = self._taken or self._chosen
        last = "and the snapshot of round %d stays" % before if before else "without any snapshot yet"
        log.error(
            "%s: no snapshot of round %d: %s. The job goes on, %s; %d failed so far",
            self._session.label, round, text, last, self.counts["failed"],
        )  # fmt: skip

    def _on_progress(self, message: dict) -> None:
        self._session.on_progress(message)
        if self._session.rank == 0:
            self._session.tell_progress()  # as the others wait for this one

    def _on_loaded(self, message: dict) -> None:
        self._loaded.add(message["wire_key"])

    def _on_resume(self, message: dict) -> None:
        self._chosen = message["round"]

    def _write(self, round: int, describe, copied, own: Any) -> None:
        session = self._session
        try:
            copied()
            if session.rank == 0:
                files.remove_leftovers(self.directory, before=round)
                self._send({"kind": "captured", "round": round})
            name = "worker-%d" % session.rank
            part = files.write_part(self.directory, round, name, *tree.encode(own), self._new_pace())
            self._send({"kind": "snapshot_written", "round": round, **part})
            if session.rank == 0:
                self._complete(round, describe)
        except P3Error:
            pass  # the job has failed, as every call of the session says
        except files.NotShared as error:  # nor will the next one be
            session.fail("the snapshot of round %d cannot be written: %s: %s" % (round, error.filename, error.strerror))
        except Exception as error:
            text = "%s: %s" % (session.label, files.why(error))
            if session.rank != 0:  # who logs what comes back from the scheduler
                log.error("%s; there is no snapshot of round %d", text, round)
            self._send({"kind": "snapshot_failed", "round": round, "text": sendable(text)})
        if session.rank == 0 and not session.has_ended:
            files.give_up(self.directory, round)  # what is not complete

    def _complete(self, round: int, describe) -> None:
        what = "for the parts of the snapshot of round %d" % round
        self._session.wait_until(lambda: self._parts is not None or self._over >= round, what)
        if self._parts is None:
            return
        parts = {
            "%s-%d" % (each["role"], each["rank"]): {"bytes": each["bytes"], "sha256": each["sha256"]}
            for each in self._parts
        }
        files.complete(self.directory, round, {"parts": parts, "keys": describe()}, self._keep)
        log.info("%s: the snapshot of round %d is complete", self._session.label, round)
        self._send({"kind": "snapshot_taken", "round": round})

    # On demand

    def _listen_to_signals(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # Python allows it there alone
        for number, ends in ((signal.SIGUSR1, False), (signal.SIGTERM, True)):
            # A supervisor has SIGUSR1 ignored, so that it does no harm before this point.
            if signal.getsignal(number) is signal.SIG_DFL or (not ends and signal.getsignal(number) is signal.SIG_IGN):
                signal.signal(number, self._on_sigterm if ends else self._on_sigusr1)

    def _on_sigusr1(self, *_ignored) -> None:
        self._demand(ends=False)

    def _on_sigterm(self, *_ignored) -> None:
        takes_steps = self.last_round > 0 and not self._session.has_ended
        if not takes_steps or time.monotonic() > self._told_to_end_at + SAME_SIGNAL_S:  # asked twice: no more grace
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        self._told_to_end_at = min(self._told_to_end_at, time.monotonic())
        self._demand(ends=True)

    def _demand(self, ends: bool) -> None:
        """In another thread: a signal's handler may have come between anything and its lock."""
        message = {"kind": "demand_snapshot", "ends": ends}
        threading.Thread(target=self._send, args=(message,), name="p3-snapshot", daemon=True).start()

    def _pass_mark(self, round: int) -> bool:
        """The end of a step. Whether a snapshot that was asked for is to be taken here, on which all workers agree."""
        session = self._session
        with session.changed:
            is_asked = self._question > self._decision
            if not is_asked:
                self.last_round = round
        if is_asked:  # and has answered with the step before
            session.flush()
            what = "to hear behind which step a snapshot is taken"
            try:
                session.wait_until(lambda: self._question <= self._decision, what)
            except TimeoutError as error:
                log.warning("%s; there is none", error)
            self.last_round = round
        return 0 < self._demanded <= round

    def _on_wanted(self, message: dict) -> None:
        self._question = message["number"]
        self._send({"kind": "mark", "number": message["number"], "round": self.last_round})

    def _on_decided(self, message: dict) -> None:
        self._decision, self._demanded, self._ends = message["number"], message["round"], message["ends"]

    def _end_with(self, round: int) -> None:
        """Behind a snapshot: if it is the one that was asked for, and the job is to end with it, Ended, once it is
        written."""
        session = self._session
        with session.changed:
            demanded, ends = self._demanded, self._ends
            if not 0 < demanded <= round:
                return
            if not ends:
                self._demanded = 0
                return
        self.finish()
        what = "to hear what became of the snapshot of round %d" % round
        session.wait_until(lambda: self._over >= round or self._demanded != demanded, what)
        self._demanded = 0
        if self._taken < round and not self._has_failed:
            return  # given up, as somebody takes no steps now: it will be asked for again
        saved = "its snapshot of round %d is complete" % round
        lost = "without a snapshot of round %d, which could not be written" % round
        log.warning("%s: the job ends, as SIGTERM asked; %s", session.label, saved if self._taken == round else lost)
        raise Ended()

    # Coming back

    def resume(self, servers_load: bool) -> Resumed:
        """Finds the newest valid snapshot; on every worker, before its first key. Blocks while nodes read."""
        if self._session.rejoined_at is not None:
            return Resumed(self._session.rejoined_at, {})
        if self.directory is None:
            return Resumed(0, {})
        if self._chosen is None:
            self._choose(servers_load)
        if self.own is None and self._chosen:
            self._load(self._chosen)
        if self.own is None:
            return Resumed(0, {})
        before = self.source.workers
        from_rank = part_rank(self._session.rank, before)
        return Resumed(self._chosen, self.own["state"], before, from_rank, lambda rank: self._part(rank)["state"])

    def _choose(self, servers_load: bool) -> None:
        session = self._session
        if session.rank == 0:
            self.source = self._newest()
            if servers_load and self.source is not None:
                self._send({"kind": "load_snapshot", "round": self.source.round})
            self._send({"kind": "resume", "round": 0 if self.source is None else self.source.round})
        what = "for worker 0 to choose a snapshot: every worker must resume"
        session.wait_until(lambda: self._chosen is not None, what)

    def _newest(self) -> Optional[files.Snapshot]:
        try:
            os.makedirs(self.directory, exist_ok=True)  # now, rather than after the first hundred steps
            files.recover(self.directory)
            return files.newest_valid(self.directory, self._have_checked)
        except OSError as error:
            raise ValueError(
                "%s: P3_SNAPSHOT_DIR=%s cannot be used: %s. It must be a directory, or a path where one can be made, "
                "that all nodes share" % (self._session.label, self.directory, error.strerror)
            ) from None

    def _have_checked(self, snapshot: files.Snapshot) -> None:
        """By all nodes, each its share. Refused, if one finds something wrong."""
        self._verdict = None
        self._send({"kind": "check_snapshot", "round": snapshot.round})
        what = "for all nodes to check the snapshot of round %d" % snapshot.round
        self._session.wait_until(lambda: self._verdict is not None, what)
        if self._verdict:
            raise files.Refused(self._verdict)

    def _on_check(self, message: dict) -> Callable[[], None]:
        thread = threading.Thread(target=self._check, args=(message["round"],), name="p3-snapshot", daemon=True)
        return thread.start

    def _check(self, round: int) -> None:
        session = self._session
        problem, read = files.problem_with_share(
            self.directory, round, "worker", session.rank, session.num_workers, self._new_pace()
        )
        self._checked = {"%d/%s" % (round, name) for name in read}
        text = sendable("%s: %s" % (session.label, problem)) if problem else ""
        self._send({"kind": "snapshot_checked", "round": round, "problem": text})

    def _on_checked(self, message: dict) -> None:
        self._verdict = message["problem"]

    def _load(self, round: int) -> None:
        session = self._session
        if self.source is None:
            with self._refusals_of(round):
                self.source = files.Snapshot(self.directory, round)
        before, now = self.source.workers, session.num_workers
        self.own = self._part(part_rank(session.rank, before))
        # Now, as the snapshot may have been removed for later ones when a key has its first push.
        self._gone = {rank: self._part(rank) for rank in takes_over_from(session.rank, before, now)[1:]}
        self.last_round = round
        log.info("%s: resumes from the snapshot of round %d", session.label, round)
        if session.rank == 0 and before != now:
            log.warning(
                "%s: the snapshot of round %d is of a job with %d workers; this one has %d. Weights and the "
                "optimizer's state are exact; %s", session.label, round, before, now, what_changes(before, now),
            )  # fmt: skip

    def _part(self, rank: int) -> Any:
        """What the worker of that rank gave write()."""
        with self._refusals_of(self.source.round):
            if "%d/worker-%d" % (self.source.round, rank) not in self._checked:
                self.source.verify_part("worker-%d" % rank, self._new_pace())
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

    def forget(self, store: int) -> None:
        """It was released: what has its number next is none of the snapshot's."""
        self._store_then[store] = None

    def continue_store(self, store: int, then: int) -> None:
        """What the snapshot has of store `then` is this one's."""
        self._store_then[store] = then

    def _identity_then(self, key, id) -> Identity:
        return self._store_then.get(key.store, key.store), id

    def value(self, key, id) -> Optional[Any]:
        described = self._described(key, id)
        return None if described is None or self._session.rank != 0 else self._array(key, id)

    def first_value(self, key) -> Optional[Any]:
        """See Session.first_value."""
        if self._described(key, key.name) is None or self._session.rank != 0:
            return None
        return ON_SERVERS if self._is_loaded(key) else self._array(key, key.name)

    def _is_loaded(self, key) -> bool:
        if self._identity_then(key, key.name) != key.identity:
            return False  # servers go by the numbers that stores have now
        agreed = self._session.keys.wait_for(key)  # which is told after that
        return agreed.plan.wire_key in self._loaded

    def leave_to_servers(self, key) -> None:
        """Its first value is not sent, and so neither are its states."""
        self._left_to_servers.add(key.identity)

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
        parts = [part for part in self.source.parts(*self._identity_then(key, id)) if part != 0]
        if parts and key.axes.takes_steps:
            raise ValueError(
                "%s: key %r had its momentum on the servers in the snapshot of round %d, and has dgc now, with a "
                "momentum on each worker: resume with the compression of that job"
                % (self._session.label, id, self.source.round)
            )
        if key.identity in self._left_to_servers:
            return {}
        return {part: self._array(key, id, part) for part in parts}

    def _array(self, key, id, part: int = 0) -> Any:
        return self.source.array(*self._identity_then(key, id), part, self._new_pace())

    def restore(self, key, takes_mean: bool = False) -> None:
        """See Session.restore."""
        session = self._session
        states = self.states(key, key.name, session.option(key.store, "optimizer"))
        session.wait([session.store(key, content, part) for part, content in states.items()])

        def of_key(own: Any) -> Optional[Any]:
            identity = self._identity_then(key, key.name)
            return next((left for store, name, left in own["residuals"] if (store, name) == identity), None)

        self.restore_residual(key, of_key, takes_mean)

    def restore_residual(self, key, of_key: Callable[[Any], Optional[Any]], takes_mean: bool = False) -> None:
        """What compression has left out of a key here, and on ranks that are gone. `of_key` finds it in what a worker
        gave write(). `takes_mean`: sums are divided by the number of workers, and not only by what the script says."""
        residual = None if self.own is None else of_key(self.own)
        if residual is None:
            return
        session, before = self._session, self.source.workers
        takes_steps = key.axes.takes_steps
        if before != session.num_workers:
            left_out = residual[:-ROUND_FLOATS] if takes_steps else residual
            own = [self.own] if session.rank < before else []
            added = np.zeros_like(left_out)
            for part in (*own, *self._gone.values()):
                added += of_key(part)[: len(left_out)]
            is_mean = takes_mean or key.axes.reduction == "average"
            if is_mean and not takes_steps:  # so the weights get what they are owed
                added *= np.float32(session.num_workers / before)
            residual = np.concatenate([added, residual[len(left_out) :]])
        session.core.restore_residual(key.handle, residual)

    def _described(self, key, id) -> Optional[dict]:
        described = self.source and self.source.key(*self._identity_then(key, id))
        if not described:
            return None
        there, here = (tuple(described["shape"]), described["dtype"]), (key.shape, key.dtype)
        if there != here:
            raise ValueError(
                "%s: key %r has shape %s and type %s, but in the snapshot of round %d shape %s and type %s: it is of "
                "another model" % (self._session.label, id, *here, self.source.round, *there)
            )
        return described
