"""The snapshot that a job resumes from: which one worker 0 chooses, and what comes back of it.

A job may come back with another number of workers: resumed.py has the rule for what was a worker's own.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import threading
from typing import Any, Callable, Dict, Iterator, List, Optional, Set

import numpy as np

from p3 import codecs
from p3._core import LEFT_OUT, MASTER, ROUND_FLOATS, state_names
from p3.cluster.messages import sendable
from p3.plan.key_plan import Axes
from p3.snapshots import files, reading, tree
from p3.snapshots.pace import Pace
from p3.worker.key import Identity
from p3.worker.links.link import Link
from p3.worker.snapshots.resumed import Resumed, part_rank, takes_over_from, what_changes

log = logging.getLogger("p3.snapshots")

ON_SERVERS = object()  # in the place of a first value that rank 0 need not bring


class Saved:
    """Of one session, whose lock guards what messages change. Threads: the script's, one at a time; files are checked
    in another."""

    def __init__(self, session, link: Link) -> None:
        self._session, self._send, self._settings = session, link.send, link.settings
        self._directory: Optional[str] = link.settings.snapshot_dir
        self.round: Optional[int] = None  # worker 0's choice; 0: there is none
        self.source: Optional[reading.Snapshot] = None  # what this job was resumed from
        self.refused: Set[int] = set()  # rounds of what lay there instead, if this job has found nothing to resume from
        self.own: Any = None  # what this worker gave write() for it; a new rank: what worker 0 gave
        self._left_out: Dict[int, Any] = {}  # what compression had left out, by ranks whose part this worker takes
        self._verdict: Optional[str] = None  # on worker 0: of all nodes on the snapshot that they check
        self._checked: Set[str] = set()  # parts of that one which this worker has read
        self._left_to_servers: Set[Identity] = set()  # keys of them whose value worker 0 did not bring
        self._unread: Set[Identity] = set()  # keys of the snapshot that have not taken all back yet
        self._loaded: Set[int] = set()  # on worker 0: wire keys that the servers have loaded from it
        # By store: its number in the job of that snapshot, None if it is new since; others have the same in both.
        self._store_then: Dict[int, Optional[int]] = {}
        session.handle("check_snapshot", self._on_check)
        session.handle("snapshot_checked", self._on_checked)
        session.handle("resume", self._on_resume)
        session.handle("loaded", self._on_loaded)

    def new_pace(self) -> Pace:
        settings = self._settings
        return Pace(settings.wait_timeout_s, lambda: self._send({"kind": "progress"}), settings.snapshot_rate)

    def resume(self, servers_load: bool) -> Resumed:
        """Finds the newest valid snapshot; on every worker, before its first key. Blocks while nodes read."""
        entrance = self._session.entrance
        if entrance.barrier:
            entrance.note_resumed()
            return Resumed(entrance.round, entrance.given)
        if self._directory is None:
            return Resumed(0, {})
        if self.round is None:
            self._choose(servers_load)
            self.refused = set() if self.round else set(files.rounds(self._directory))
        if self.own is None and self.round:
            self._load(self.round)
        if self.own is None:
            return Resumed(0, {})
        before = self.source.workers
        from_rank = part_rank(self._session.rank, before)
        return Resumed(self.round, self.own["state"], before, from_rank, lambda rank: self._part(rank)["state"])

    def _choose(self, servers_load: bool) -> None:
        session, first = self._session, self._session.first
        if session.rank == first:
            self.source = self._newest()
            if servers_load and self.source is not None:
                self._send({"kind": "load_snapshot", "round": self.source.round})
            self._send({"kind": "resume", "round": 0 if self.source is None else self.source.round})
        what = "for worker %d to choose a snapshot: every worker must resume" % first
        session.wait_until(lambda: self.round is not None or session.first != first, what)
        if self.round is None:
            self._choose(servers_load)  # the first worker had not, and has departed

    def _newest(self) -> Optional[reading.Snapshot]:
        try:
            os.makedirs(self._directory, exist_ok=True)  # now, rather than after the first hundred steps
            files.recover(self._directory)
            newest = reading.newest_valid(self._directory, self._have_checked)
            there = files.rounds(self._directory)
        except OSError as error:
            raise ValueError(
                "%s: P3_SNAPSHOT_DIR=%s cannot be used: %s. It must be a directory, or a path where one can be made, "
                "that all nodes share" % (self._session.label, self._directory, error.strerror)
            ) from None
        if newest is None and there:
            log.error(
                "%s: P3_SNAPSHOT_DIR=%s has %d snapshots, and each is refused: the job begins at step 0. Its own will "
                "take their places; if they can be mended, end the job now, and copy them",
                self._session.label, self._directory, len(there),
            )  # fmt: skip
        return newest

    def _have_checked(self, snapshot: reading.Snapshot) -> None:
        """By all nodes, each its share. Refused, if one finds something wrong."""
        self._verdict = None
        self._send({"kind": "check_snapshot", "round": snapshot.round})
        what = "for all nodes to check the snapshot of round %d" % snapshot.round
        self._session.wait_until(lambda: self._verdict is not None, what)
        if self._verdict:
            raise reading.Refused(self._verdict)

    def _on_check(self, message: dict) -> Callable[[], None]:
        thread = threading.Thread(target=self._check, args=(message["round"],), name="p3-snapshot", daemon=True)
        return thread.start

    def _check(self, round: int) -> None:
        session = self._session
        problem, read = reading.problem_with_share(
            self._directory, round, "worker", session.rank, session.num_workers, self.new_pace()
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
                self.source = reading.Snapshot(self._directory, round)
        before, now = self.source.workers, session.num_workers
        self.own = self._part(part_rank(session.rank, before))
        # Now, as the snapshot may have been removed for later ones when a key has its first push.
        encodes_for = {session.rank, *session.placement.pushed_by(session.rank, Axes())}
        self._left_out = {
            rank: _what_is_left_out(self.own if rank == session.rank else self._part(rank))
            for each in encodes_for
            for rank in takes_over_from(each, before, now)
        }
        self._unread = {(key["store"], key["id"]) for key in self.source.keys}
        log.info("%s: resumes from the snapshot of round %d", session.label, round)
        if session.is_first and before != now:
            log.warning(
                "%s: the snapshot of round %d is of a job with %d workers; this one has %d. Weights and the "
                "optimizer's state are exact; %s", session.label, round, before, now, what_changes(before, now),
            )  # fmt: skip

    def _part(self, rank: int) -> Any:
        """What the worker of that rank gave write(); ranks are those of the workers that were left."""
        with self._refusals_of(self.source.round), contextlib.closing(self.source):
            name = self.source.worker_names[rank]
            if "%d/%s" % (self.source.round, name) not in self._checked:
                self.source.verify_part(name, self.new_pace())
            return tree.decode(self.source.worker(rank))

    @contextlib.contextmanager
    def _refusals_of(self, round: int) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise ValueError(
                "%s: cannot resume from the snapshot of round %d in %s, which worker 0 has chosen: %s"
                % (self._session.label, round, self._directory, error)
            ) from None

    def _on_loaded(self, message: dict) -> None:
        self._loaded.add(message["wire_key"])

    def _on_resume(self, message: dict) -> None:
        self.round = message["round"]

    @property
    def is_chosen(self) -> bool:
        """Whether resume() has been called."""
        return self.round is not None or self._directory is None or self._session.entrance.barrier > 0

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
        return None if described is None or not self._session.is_first else self._exact_value(key, id)

    def first_value(self, key) -> Optional[Any]:
        """See Session.first_value."""
        if self._described(key, key.name) is None or not self._session.is_first:
            return None
        is_loaded = self._is_loaded(key) and not self._session.updates_here(key)
        return ON_SERVERS if is_loaded else self._exact_value(key, key.name)

    def _exact_value(self, key, id) -> Any:
        """That with which the job goes on: where only encoded changes went out, and none do any more, the exact one."""
        has_exact = MASTER in self.source.parts(*self._identity_then(key, id))
        goes_on_exactly = has_exact and key.dtype == "float32" and not self._sends_changes(key)
        return self._array(key, id, MASTER if goes_on_exactly else 0)

    def _sends_changes(self, key) -> bool:
        """Whether the servers have its exact value, and send what changes of it, encoded."""
        return bool(key.axes.value_codec) and not self._session.updates_here(key)

    def _is_loaded(self, key) -> bool:
        if self._identity_then(key, key.name) != key.identity:
            return False  # servers go by the numbers that stores have now
        agreed = self._session.keys.wait_for(key)  # which is told after that
        return agreed.plan.wire_key in self._loaded

    def leave_to_servers(self, key) -> None:
        """Its first value is not sent, and so neither are its states."""
        self._left_to_servers.add(key.identity)

    def states(self, key, id, optimizer: Optional[dict]) -> Dict[int, Any]:
        """The optimizer's arrays of a key by their part, on rank 0, or where this worker updates: the last that is read
        of the key. ValueError unless the optimizer is the same, but for numbers that may change from step to step."""
        is_known = self._described(key, id) is not None
        gives = is_known and (self._session.is_first or self._session.updates_here(key))
        states = self.states_to_come(key, id, optimizer) if gives else {}
        self._unread.discard(self._identity_then(key, id))
        if self.source is not None and not self._unread:
            self.source.close()
        return states

    def states_to_come(self, key, id, optimizer: Optional[dict]) -> Dict[int, Any]:
        """The same, on any worker, before states() is called."""
        described = self._described(key, id)
        if described is None:
            return {}
        if not _has_states_of(optimizer, described["optimizer"]) or (
            key.axes.takes_steps and optimizer != described["optimizer"]  # the workers go by its momentum
        ):
            raise ValueError(
                "%s: key %r was updated by %s in the snapshot of round %d, and is by %s now: resume with the optimizer "
                "and the compression of that job"
                % (self._session.label, id, _updater(described["optimizer"]), self.source.round, _updater(optimizer))
            )
        sends_changes = self._sends_changes(key)
        there = self.source.parts(*self._identity_then(key, id))
        parts = [part for part in there if _is_state(key, part, sends_changes)]
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
        return self.source.array(*self._identity_then(key, id), part, self.new_pace())

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
        """What compression has left out of a key here, on the workers for whom this one encodes, and on ranks that are
        gone. `of_key` finds it in what a worker gave write(). `takes_mean`: sums are divided by the number of workers,
        and not only by what the script says."""
        if self.own is None:
            return
        session, before, now = self._session, self.source.workers, self._session.num_workers
        encodes_for = (session.rank,) if key.rank else session.placement.pushed_by(session.rank, key.axes)
        ranks = [rank for each in encodes_for for rank in takes_over_from(each, before, now)]
        parts = [part for part in (of_key(self._left_out[rank]) for rank in ranks) if part is not None and len(part)]
        self._require_same_rest(key, parts)
        is_mean = takes_mean or key.axes.reduction in ("average", "mean")
        factor = np.float32(now / before if is_mean else 1)  # so the weights get what they are owed
        if key.rank:
            return session.low_rank.restore(key, parts, factor, of_key(self.own))
        if key.axes.takes_steps:
            own = of_key(self.own)
            if own is None:
                return
            none = np.zeros(len(own) - ROUND_FLOATS, own.dtype)
            residual = np.concatenate([_sum([part[:-ROUND_FLOATS] for part in parts] or [none]), own[-ROUND_FLOATS:]])
        elif parts:
            residual = _sum([part[: math.prod(key.shape)] for part in parts])  # of lowrank its basis is behind it
            if factor != 1:
                residual = residual * factor
        else:
            return
        session.core.restore_residual(key.handle, residual)

    def _require_same_rest(self, key, parts: List[np.ndarray]) -> None:
        """ValueError unless the key's compression can go on with what that of the snapshot's job had left out."""
        now = _kind_of_rest(key, self._session.core.keeps_residual(key.handle))
        then = next((kind for kind in (_made_by(part, key) for part in parts) if not _goes_on(kind, now)), None)
        if then is None:
            return
        applying = "it is compressed by %s" % key.compression if key.compression else "it travels as it is"
        raise ValueError(
            "%s: key %r was compressed by %s in the snapshot of round %d, and what that had left out is still owed to "
            "the weights; now %s, which %s. Resume with the compression of that job%s"
            % (self._session.label, key.name, then, self.source.round, applying,
               "cannot take it" if now else "keeps nothing",
               "" if _STEPS in (then, now) else ", or with one that keeps what it leaves out, as lowrank and int8 do")
        )  # fmt: skip

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


_STEPS, _LOW_RANK = "dgc", codecs.LOW_RANK.name
_CODEC = "a type that keeps what it leaves out"


def _kind_of_rest(key, keeps_residual: bool) -> str:
    """What a key's compression leaves out, and keeps, here; "": nothing."""
    if key.rank or not keeps_residual:
        return _LOW_RANK if key.rank else ""
    return _STEPS if key.axes.takes_steps else _CODEC


def _made_by(rest: np.ndarray, key) -> str:
    """The same of an array in a snapshot, which does not say so: the three have different lengths."""
    elements = math.prod(key.shape)
    if len(rest) == elements:
        return _CODEC
    return _LOW_RANK if len(rest) < 2 * elements else _STEPS


def _goes_on(then: str, now: str) -> bool:
    return then == now or _STEPS not in (then, now) and now != ""


def _updater(optimizer: Optional[dict]) -> str:
    return "the workers" if optimizer is None else "the servers with %s" % optimizer


def _is_state(key, part: int, sends_changes: bool) -> bool:
    """Whether a part of a snapshot is one of this key's state: what comes back may be encoded otherwise now."""
    if part == LEFT_OUT:
        codec = codecs.of(key.axes.value_codec)
        return codec is not None and codec.residuals > 0
    return part != 0 and (part != MASTER or key.dtype != "float32" or sends_changes)


def _what_is_left_out(own: Any) -> Any:
    """Of what a worker gave write(), the little that restore_residual() looks at."""
    stores = {store: {"residuals": its["residuals"]} for store, its in own.get("stores", {}).items()}
    return {"residuals": own.get("residuals", []), "stores": stores}


def _sum(arrays: List[np.ndarray]) -> np.ndarray:
    """In their order; a single one to the bit."""
    return functools.reduce(np.add, arrays)


def _has_states_of(now: Optional[dict], then: Optional[dict]) -> bool:
    """Of two descriptions of optimizers, or None where the servers only sum."""
    if now is None or then is None or now["name"] != then["name"]:
        return now == then
    return state_names(now) == state_names(then) and now["multi_precision"] == then["multi_precision"]
