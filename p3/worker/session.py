"""A worker that has joined its job: declares keys, pushes gradients, receives new values. NumPy is enough to use it.

    with Session.open() as session:                       # embedded without DMLC_*, else joins as worker
        key = session.declare("w", (3, 4), "float32")
        session.init(key, first_value if session.is_first else None, landing).wait(60)
        session.pushpull(key, gradient, landing, priority=0, lr=0.1).wait(60)   # landing holds the new value

What blocks: open(), set_option(), set_strategy(), change_strategy(), release(), barrier(), server_counters() and
close(), each with a deadline. All else returns at once.
Threads: every method may be called from any thread. The control connection lives in a daemon thread of its own; the
core's threads do the sending, so heartbeats go on while Python's lock is held elsewhere.
Errors: wrong use is ValueError. A failed job is P3Error, the same first failure in every later call; its text starts
with the node that reported it. Before the job runs: ConfigError, RendezvousError, AuthenticationError (p3.errors).
"""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Set, Tuple, Union

import numpy as np

from p3._core import Completions, P3Error
from p3.launch.launchers.adapters import ADAPTERS
from p3.launch.launchers.place import warning_if_alone
from p3.plan import key_plan
from p3.plan.factor_shape import FactorShape
from p3.plan.key_plan import Axes
from p3.plan.strategy import Strategy
from p3.settings import Settings, in_job
from p3.snapshots import tree
from p3.worker import open_sessions
from p3.worker.control import Control
from p3.worker.entrance import Entrance
from p3.worker.key import NORM, Key, Name, checked, require_array
from p3.worker.joins import Joins
from p3.worker.keys import Keys
from p3.worker.links.link import Link
from p3.worker.lowrank.matrices import Matrices
from p3.worker.members import Members
from p3.worker.orders import Orders
from p3.worker.questions import Barriers, ServerCounters
from p3.worker.recut import Recut
from p3.worker.repartition import Repartition
from p3.worker.servers import Servers
from p3.worker.snapshots.demand import Ended
from p3.worker.snapshots.resumed import Resumed
from p3.worker.snapshots.saved import ON_SERVERS, Saved
from p3.worker.snapshots.snapshots import Snapshots
from p3.worker.stats import Stats
from p3.worker.store_options import StoreOptions
from p3.worker.stores import Stores
from p3.worker.waits import Waits

log = logging.getLogger("p3")


class Session(Control):
    """See the module. Make one with Session.open() or, shared by all stores of a process, with current()."""

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self._caught_up = link.entered is None  # all of the past has been told
        self.handle("caught_up", self._on_caught_up)
        self.entrance = Entrance(self, link)
        self._members = Members(self, link)
        self.servers = Servers(self, link)
        self.orders = Orders(self, link)
        self._repartition = Repartition(self, link)
        self._options = StoreOptions(self, link, self._repartition)
        self.keys = Keys(self, link, self._options, self._repartition)
        self._recut = Recut(self, link)
        self.low_rank = Matrices(self)
        # Of whoever keeps back pushes that other workers count on: called at the end, and waits for them to leave.
        self.to_finish: Set[Callable[[], None]] = {self.low_rank.finish}
        self.kept_back: Set[Callable[[], None]] = set()  # of these, what need not wait for other pushes: send_kept()
        self.saved = Saved(self, link)
        self.snapshots = Snapshots(self, link, self.saved)
        parts = (self.low_rank, self.keys, self.orders, self._options, self._repartition, self.saved)
        self.stores = Stores(self, link, self.keys, [part.forget for part in parts])
        self.joins = Joins(self, link)
        self.barriers = Barriers(self, link)
        self._server_counters = ServerCounters(self, link)
        self.waits = Waits()
        self._stats = Stats(self, link)
        self._start()
        self.wait_until(lambda: self._caught_up, "to be told what has been agreed")
        if self.entrance.is_on_trial:
            self._take_what_is_given()

    @classmethod
    def open(cls, settings: Optional[Settings] = None) -> Session:
        """Joins the job that the settings (by default: the environment) describe, and returns when all nodes are there.

        With no DMLC_* variable at all (settings.role is None) the session is embedded: one worker and one server in
        this process, listening nowhere. Raises ConfigError, RendezvousError or AuthenticationError.
        """
        if settings is None:
            settings = Settings.from_env(os.environ)
            if in_job(os.environ):
                settings.require("role")
        if settings.role is None:
            from p3.worker.links.embedded import EmbeddedLink as LinkOfJob

            warning = warning_if_alone(ADAPTERS, os.environ)
            if warning is not None:
                log.warning(warning)
        else:
            from p3.worker.links.cluster import ClusterLink as LinkOfJob
        session = cls(LinkOfJob(settings))
        open_sessions.add(session)
        return session

    def _take_what_is_given(self) -> None:
        try:
            self.entrance.receive()
        except BaseException as error:
            self.fail(open_sessions.describe(type(error), error))
            raise

    def __enter__(self) -> Session:
        return self

    def __exit__(self, exception_type, exception, _traceback) -> None:
        if exception is not None and not isinstance(exception, Ended):
            self.fail(open_sessions.describe(exception_type, exception))
        self.close()

    # Stores and keys

    def new_store(self, strategy: Optional[Strategy] = None, of: str = "") -> int:
        """The number of one more store in this process: 0, 1, 2 ..., the lowest that is free. Workers must create and
        release their stores in one order. `strategy`: as set_strategy() has it. `of`: what it is for, the same on every
        worker; so a process that has joined the job finds the stores that the others have."""
        store = self.stores.new(of)
        self.set_strategy(store, strategy)
        return store

    def release(self, store: int) -> None:
        """All that the job keeps of a store goes: keys with values and optimizer's state, on the servers and here, its
        options, its forward order. Its number is free for another one.

        Every worker calls it at the same point, when its operations are complete. Blocks until all have; TimeoutError
        after P3_WAIT_TIMEOUT_S names who has not. ValueError if an operation is under way. It waits for a snapshot that
        is being written, and no later one has the store.
        """
        self.check()
        self.stores.release(store)

    def declare(
        self, name: Name, shape: Sequence[int], dtype: Any, store: int = 0, sparse: bool = False,
        staleness: Union[int, float] = 0, options: Optional[Mapping[str, Any]] = None,
    ) -> Key:  # fmt: skip
        """Makes a key known and starts its agreement; returns at once. The same key again returns the same Key.

        A `sparse` key is one of rows, which its first dimension counts: see pushpull(). `dtype` is a name of
        _core.DTYPES, or a NumPy type. `staleness`: how many rounds the fastest worker may be ahead of the slowest, or
        math.inf; each push of such a key updates it at once, so its store needs an optimizer. `options`: "compression"
        and "value_compression" as of set_option(), which this key has in place of its store's; {} or None: none.
        ValueError if this worker declared the key with another shape or type, or if its store or the job's settings
        exclude it (p3/plan/combinations.py). Another worker's contradiction fails the job, with an error that names
        both workers.
        """
        self.check()
        declared = checked(self.label, store, name, shape, dtype, sparse, staleness, options)
        self.low_rank.require_free(declared)
        key = self.keys.declare(declared)
        if key.rank:
            self.low_rank.declare(key)
        return key

    def declare_factors(self, name: Name, factors: FactorShape, store: int = 0) -> Key:
        """A key whose rounds gather the workers' factors of a float32 weight, which each worker then updates itself.

        pushpull() takes this worker's factors, rows x (outputs + inputs), and as `landing` the weight, outputs x
        inputs, which must hold what landed last; so does skip(). init() only makes this worker known: its value is
        ignored, and the weight's first one is another key's to bring. The store's optimizer, if it has one, must be set
        before; without one, the sum of the gradients takes the weight's place. ValueError where settings exclude it.
        """
        self.check()
        shape = (factors.rows, factors.width)
        declared = checked(self.label, store, name, shape, "float32", False, 0)
        self.low_rank.require_free(declared)
        return self.keys.declare(declared._replace(factors=factors))

    def declare_norm(self, store: int = 0) -> Key:
        """The key whose rounds tell the norm of the sums of all other keys of the store; before they are declared.

        Of float64, one row for each server: of all that it has summed in the same round of the store's keys, and sends
        to the workers, the sum of the squares, and the largest absolute value. Each worker begins such a round by
        skip() with `goes_on`, when all keys of the store have had theirs; `landing` holds it as soon as the servers
        have summed, which may be long before the sums themselves have come. Rows of keys that nobody pushed are zero. A
        worker that has taken its last step leaves `goes_on` out; once all do, the round is not `updated`. Two runs give
        the same bits, as sums do. Keys of factors have no part in it: the servers have no sums of them. ValueError
        where the store has keys already, the servers have an optimizer, or the settings exclude it
        (p3/plan/combinations.py). Every worker declares it, or none: a difference fails the job at the store's first
        key, with an error that names two workers. It settles none of the store's options.
        """
        self.check()
        if self.keys.of(store) and not self.keys.have_norm(store):
            raise ValueError("%s: store %d has keys already; the one of norms is declared before them"
                             % (self.label, store))  # fmt: skip
        declared = checked(self.label, store, NORM, key_plan.norm_shape(self.num_servers), "float64", False, 0)
        return self.keys.declare(declared._replace(axes=Axes(reduction="norm")))

    # Values: each of these returns an Operation at once

    def init(self, key: Key, value: Optional[Any], landing: Optional[Any], priority: int = 0):
        """The key's first value: `value` on rank 0, None elsewhere. The Operation is done when `landing` holds it.

        Arrays are C-ordered buffers of the key's shape and type; they belong to the core until the operation is done.
        Called again, by every worker at the same point, it gives the key a new value; an optimizer keeps its state.
        A worker that is late may get the value of a later call: where it must not, barrier() or a round comes between.
        `value` may be what first_value() gave. `landing` None, here and below, of a key of rows: this worker keeps no
        copy of the value, and fetches the rows that it wants.
        """
        self.check()
        if self.entrance.is_on_trial:
            self.entrance.note_init(key)
        if value is ON_SERVERS:
            self.saved.leave_to_servers(key)
            value = None
        self._require_arrays(key, key.landing_shape, "value", value, landing)
        init = self.core.init_rows if key.sparse else self.core.init
        return init(key.handle, value, landing, priority)

    def pushpull(
        self, key: Key, gradient: Any, landing: Optional[Any], priority: int = 0,
        lr: float = 0.0, wd: float = 0.0, rescale: float = 1.0, updates: float = 0.0, schedule: float = 1.0,
        fields: Optional[Tuple[float, ...]] = None,
        *, gated: bool = False, more: bool = False, tell: Optional[Tuple[Completions, int]] = None,
    ):  # fmt: skip
        """One round: the gradient goes out, the new value (without an optimizer: the sum) comes into `landing`.

        Higher priorities leave sooner. The numbers must be the same on every worker; they are used by the store's
        optimizer. `fields`: the p3.plan.optimizers.values() that it has in this round, if they are not those that
        were announced; its states stay. Returns an Operation; arrays as in init(). Reading `landing` afterwards is the
        pull. A `gated` round leaves piece by piece, as ready() is called; `landing` may be `gradient` itself. `more`:
        other calls follow soon, and a small gradient may wait for them; call flush() before waiting. `tell`: who
        announces it when it is done, and by which token (p3._core.Completions). Of a key that lands changes `landing`
        must hold what landed last, and is not `gradient`; one that leaves whole cannot be gated (p3/plan/key_plan.py).

        Of a key of rows `gradient` is zero but for some rows: a pair of their ids (int64) and their values. Ids may
        come in any order; what comes for one id more than once is added up. No rows at all are fine. The optimizer
        updates the rows that any worker touched, and no others: those are written to `landing`, an array of the whole
        key, and listed by the Operation's `changed` when it is done. Without an optimizer they become the sums, and the
        rows that held sums of the round before become zero. An id that the key does not have fails the job.

        Of a key with {"type": "lowrank"} that has a `rank` two other keys have rounds, one behind the other, which
        p3/worker/lowrank/ makes: meanwhile `landing` is written to, and no other round of the key may begin. The
        store has no optimizer.
        """
        self.check()
        if key.sparse or key.rank:
            self._require_at_once(key, gated or more and key.sparse, tell)
        if key.sparse:
            ids, values = gradient
            self._require_arrays(key, (len(ids), *key.shape[1:]), "array of rows", values, landing)
        else:
            self._require_arrays(key, key.shape, "gradient", gradient, landing)
        self.begin_push(key)
        if key.rank:
            return self.low_rank.push(key, gradient, landing, priority)
        scalars = (lr, wd, rescale, updates, schedule, fields)
        if key.sparse:
            return self.core.push_rows(key.handle, ids, values, landing, priority, scalars)
        return self.core.push(key.handle, gradient, landing, priority, scalars, gated, more, tell)

    def push_memory(self, key: Key, gradient: Any, landing: Any, priority: int, scalars: tuple, more: bool) -> Any:
        """pushpull() of a dense key without `rank`, for a front end that pushes many small gradients, and has seen to
        it that both arrays are of the key's shape and type: only the number of bytes is looked at here. `scalars`: lr
        and so on, with `fields` or without."""
        self.check()
        self.begin_push(key)
        return self.core.push(key.handle, gradient, landing, priority, scalars, False, more)

    def flush(self) -> None:
        """What was pushed with `more` leaves now, as it does with the next call of another kind."""
        self.core.flush()

    def ready(self, key: Key, elements: int) -> None:
        """So many of the gated round's elements, from the first on, may be read and written now. From any thread."""
        self.core.ready(key.handle, elements)

    def skip(
        self, key: Key, landing: Optional[Any], priority: int = 0, gated: bool = False, goes_on: bool = False,
        tell: Optional[Tuple[Completions, int]] = None,
    ):  # fmt: skip
        """One round without a gradient of this worker, which has taken its last step while others go on.

        Their new value comes into `landing`. Once every worker skips, it stays as it is, and the Operation, when done,
        is not `updated`: so a worker that has finished skips each key again and again until then. `goes_on`: it has no
        gradient for this round alone; see include/p3/worker.h for what that means with staleness, and of norms.
        """
        self.check()
        if key.sparse or key.rank:
            self._require_at_once(key, gated, tell)
        self._require_arrays(key, key.shape, "", None, landing)
        if key.rank:
            return self.low_rank.skip(key, landing, priority, goes_on)
        if key.sparse:
            return self.core.skip_rows(key.handle, landing, priority, goes_on)
        return self.core.skip(key.handle, landing, priority, gated, goes_on, tell)

    def fetch(self, key: Key, landing: Any, part: int = 0, ids: Optional[Any] = None, priority: int = 0):
        """Copies an array of the optimizer's state on the servers to `landing`, by its `part` 1, 2 ... or, of a key of
        half precision or with a value_codec, _core.MASTER; or of a key of rows the value, 0.

        As after this worker's last round of the key. The array has the key's shape, and its type (of a state float32
        for half precision); or of a key of rows those rows alone, in the order of `ids` (int64), which may repeat.
        """
        self.check()
        if key.sparse or ids is not None:
            return self.core.fetch_rows(key.handle, part, _all_rows(key) if ids is None else ids, landing, priority)
        return self.core.fetch(key.handle, part, landing)

    def store(self, key: Key, content: Any, part: int = 0, ids: Optional[Any] = None, updates: int = 0):
        """Gives an array of fetch() another content, on rank 0, or on every worker where it updates_here(), before its
        next round of the key; or of a key of rows any worker those rows, between rounds: `ids` (int64) ascend, each
        once. With staleness: `updates` are in it; 0: as many as the servers have counted."""
        self.check()
        if key.sparse or ids is not None:
            return self.core.store_rows(key.handle, part, _all_rows(key) if ids is None else ids, content, updates)
        return self.core.store(key.handle, part, content, updates)

    def _require_arrays(self, key: Key, shape: Tuple[int, ...], what: str, array: Any, landing: Any) -> None:
        if array is not None:
            require_array(self.label, key, what, array, shape)
        if landing is not None:
            require_array(self.label, key, "landing array", landing, key.landing_shape)

    def _require_at_once(self, key: Key, waits: bool, tell: Any) -> None:
        if waits or tell is not None:
            of = "of rows" if key.sparse else "compressed by lowrank"
            raise ValueError("%s: key %r is %s; its gradient leaves at once, and nobody is told"
                             % (self.label, key.name, of))  # fmt: skip

    def updates_here(self, key: Key) -> bool:
        """Whether each worker has the key's optimizer and its state, and not the servers: a key of factors, or any
        where servers may be lost (P3_ON_SERVER_LOSS=continue). Then fetch() and store() are about this worker's."""
        return key.factors is not None or self.keys.have_replicas(key.store)

    def updates(self, key: Key) -> int:
        """Of a key with staleness: how many updates it had had in what the servers answered this worker last."""
        return self.core.updates(key.handle)

    def landed_round(self, key: Key) -> Tuple[int, int]:
        """Of a key with staleness: this worker's last round whose answer has landed, 0 before the first; and up to
        which round the pushes of all workers are in that."""
        return self.core.landed_round(key.handle)

    @property
    def searches_partitions(self) -> bool:
        """P3_PARTITIONS=auto; and this is rank 0, which searches. Not where a lost worker does not end the job: what
        moves meanwhile would be lost with it."""
        return self._link.settings.partitions == "auto" and self.rank == 0 and self._link.on_worker_loss == "fail"

    def partitions(self, key: Key) -> int:
        """Into how many the rows of a sparse key are cut now; 0 before it is agreed."""
        return self._repartition.partitions(key)

    def is_placed(self, key: Key) -> bool:
        """Whether a strategy has named the servers or the partitions of a sparse key, which is agreed: then no search
        changes them."""
        return self._repartition.is_placed(key)

    def repartition(self, key: Key, partitions: int) -> None:
        """Cuts the rows of a sparse key anew, while the job trains; rank 0 only. Returns at once.

        The next round that rank 0 pushes after all servers have agreed is the last one of the old partitions; then each
        worker takes a share of the rows, with the optimizer's state, from their old servers to their new ones, and the
        rounds go on. Values and sums stay the same to the bit. One change of a key at a time: see is_moving().
        """
        self.check()
        self._repartition.request(key, partitions)

    def is_moving(self, key: Key) -> bool:
        """Whether other partitions were requested, and not all workers have gone over to them yet."""
        return self._repartition.is_moving(key)

    def begin_push(self, key: Key) -> None:
        """Before a push is queued, and counted anywhere; for who pushes past pushpull() as well."""
        if key.handle not in self._options.pushed_keys.get(key.store, ()):
            self.entrance.require_no_push("a gradient or a collective of key %r" % (key.name,))
            self._options.begin_push(key, self.keys.require_to_push)

    # What all workers agree on

    def set_option(self, store: int, name: str, value: dict) -> None:
        """Sets an option of p3.plan.options. Blocks until all servers have it, at most P3_WAIT_TIMEOUT_S.

        Set an optimizer before the store's first push, and all others before its first key is declared, or behind one
        of norms.
        The same value again is fine. ValueError if the value makes no sense, if this worker has set another one
        before, or if a key has settled the option. Workers that differ fail the job.
        """
        self.check()
        self._options.set(store, name, value)

    def set_strategy(self, store: int, strategy: Optional[Strategy]) -> None:
        """Has the store's keys cut as p3.plan.strategy.given() has read it; None: as without. Blocks until all agree.

        Before the store's first key is declared, or behind one of norms. ConfigError if the job lacks a server that it
        names. Workers that differ fail the job, and so does another one in P3_STRATEGY, or an entry that does not fit
        its key. Of entries that no key has nobody says anything: see Strategy.require_keys().
        """
        self.check()
        if strategy is not None:
            self._options.set_strategy(store, strategy)

    def strategy(self, store: Optional[int] = None) -> Strategy:
        """What the script's keys of that store go by, or the job's (P3_STRATEGY), of which this worker may know no
        more than Strategy.choices. Who declares keys that a script may choose a way for asks it, as keys of P3's own
        have none."""
        return self._options.strategy(store)

    def change_strategy(self, stores: Sequence[int], strategy: Optional[Strategy]) -> bool:
        """From the next round on the keys of these stores are cut as `strategy` says, and as nothing says where it is
        Strategy(). Whether any key has changed.

        Every worker calls it at the same point, with nothing of these keys under way; it returns when all have gone
        over, at most P3_WAIT_TIMEOUT_S later. The first worker's strategy counts (is_first): one that knows of none
        gives None, and if the first one gives that, nothing changes. For stores without an optimizer: of their keys the
        servers have the last sum alone, which nobody needs any more, and until the next round they have zeros in its
        place. Keys of rows, of factors and of norms stay as they are. Sums are of the same gradients in the same order
        as before.
        ValueError where that cannot be (p3/plan/combinations.py), ConfigError if the job lacks a server that it names.
        """
        self.check()
        return self._recut.change(stores, strategy)

    def set_optimizer(self, store: int, description: dict) -> None:
        """set_option() of what p3.plan.optimizers.describe() makes of an optimizer."""
        self.set_option(store, "optimizer", description)

    def option(self, store: int, name: str) -> Optional[dict]:
        """What this worker has set, or None."""
        value = self._options.wanted(store, name)
        return None if value is None else dict(value)

    def barrier(self, of: str = "barrier()") -> Tuple[int, ...]:
        """Returns when every worker has called it as often as this one: the ranks of the members then, the same on all.
        TimeoutError after P3_WAIT_TIMEOUT_S, which names `of`, the script's call.

        In a process that has joined a running job, those before its first agree_on_members() return at once.
        """
        self.check()
        if self.entrance.is_on_trial:
            return self.members
        members, _ = self.barriers.enter(of)
        return tuple(members)

    @property
    def members(self) -> Tuple[int, ...]:
        """The ranks of all workers that are part of the job, as this one knows by now: all, without those that have
        departed (P3_ON_WORKER_LOSS=continue). At one moment, workers may know of different ones: agree_on_members()."""
        return self._members.ranks

    @property
    def agreed_members(self) -> Tuple[int, ...]:
        """The same as agree_on_members() returned it last, on every worker between the same calls; before the first one
        all with which the job has begun. With those who have departed since."""
        return self.entrance.members

    @property
    def is_first(self) -> bool:
        """Whether this worker does what one does for all: it gives first values, and completes snapshots. Rank 0, or if
        that has departed, who has been there longest: of those from the beginning the lowest rank."""
        return self.first == self.rank

    @property
    def first(self) -> int:
        """The rank of the worker of which is_first says so, as this one knows by now."""
        return self._members.first

    def agree_on_members(self, round: Optional[int] = None, state: Any = None) -> Tuple[int, ...]:
        """The members, the same on every worker: a barrier, which all call at the same point. Who departs later is one
        of them still. Blocks as barrier() does.

        With a `round`, a number of steps or epochs that is behind all of them and the same on all, a process may join
        the job here (P3_JOIN), in the place of a worker that has departed or, up to P3_MAX_WORKERS, as a further one.
        It is a member of those that are returned, has the round and the first worker's `state` (a tree,
        p3.snapshots.tree) from resume(), and begins with this very call, which returns when it has come so far; until
        then it declares its keys and gives each its init(), which brings the value that the servers have. And here a
        process may take the place of a server that was lost. All operations must be complete: it waits for them.
        """
        self.check()
        own = tree.checked(state, "state")
        return self.entrance.agree(round, lambda: own)

    # Snapshots

    def snapshot(self, round: int, keys: Sequence[Key], state: Any = None) -> None:
        """Between two steps, by every worker at the same ones: takes a snapshot if one is due (P3_SNAPSHOT_EVERY).

        `round`: how many steps this job has taken. `keys`: all of the job. `state`: what this worker wants to have
        back: a tree (p3.snapshots.tree), which is copied. Returns at once, unless the snapshot before is still being
        written, or one was asked for by a signal: then all workers agree on the step behind which they take it. One
        that was asked for by SIGTERM is written, and then SystemExit(143) raised on all of them.
        """
        self.check()
        is_due = self.snapshots.due(round)
        if is_due:
            self.snapshots.take(round, keys, state)

    def resume(self, servers_load: bool = False) -> Resumed:
        """By every worker, before its first key: finds the newest valid snapshot in P3_SNAPSHOT_DIR.

        Its round, and this worker's state; (0, {}) where there is none, and in a process that joins a running job what
        agree_on_members() was given there. The snapshot may be of a job with another number of workers, which the
        result's `workers` tells. Then give each init() resumed_value(), and call restore() before the key's first
        round. Blocks until worker 0 has chosen, at most P3_WAIT_TIMEOUT_S.

        `servers_load`: each server begins with what its own part of the snapshot has, where that suits, and worker 0
        brings only the rest. Then all keys are given first_value() instead, and are declared before the first of them.
        """
        self.check()
        if self.keys and not self.saved.is_chosen:
            raise ValueError("%s: resume() comes before the first key, and so before the first Trainer's step or "
                             "DistributedOptimizer" % self.label)  # fmt: skip
        resumed = self.saved.resume(servers_load)
        if not self.entrance.barrier and resumed.round > 0:
            self.snapshots.last_round = max(self.snapshots.last_round, resumed.round)
        return resumed

    def resumed_value(self, key: Key, id: Optional[Name] = None) -> Optional[Any]:
        """What the snapshot has as the key's value; None if it does not know the key, and on all but rank 0.

        It is what the servers had: without an optimizer the last sum; with lowrank the first value, as its sums are
        made on the workers. What a script updates itself goes into its `state`.
        """
        return self.saved.value(key, key.name if id is None else id)

    def first_value(self, key: Key) -> Optional[Any]:
        """As resumed_value(), for init(); or what stands for it, if all servers have the key from the snapshot already.
        Waits until the key is agreed."""
        return self.saved.first_value(key)

    def restore(self, key: Key, takes_mean: bool = False) -> None:
        """The rest of what the snapshot has of a key: the optimizer's state on rank 0, residuals. Waits for servers.

        `takes_mean`: the caller divides sums by the number of workers. Then residuals change with that number, so that
        the weights get what they were still owed.
        """
        self.saved.restore(key, takes_mean)

    # Counters

    def counters(self) -> dict:
        """What the core has sent and received so far: bytes_sent, bytes_received, slices_sent, ..., rounds."""
        return self.core.counters()

    def traffic_with(self, server: int) -> dict:
        """The same of one server, without `rounds`."""
        return self.core.traffic_with(server)

    def key_counters(self, key: Key) -> dict:
        """rounds, waited_s (from push to the landed value, added up), longest_wait_s, and the key's compression."""
        own = self.low_rank.counters(key) if key.rank else self.core.key_counters(key.handle)
        counters = dict(own, compression=key.compression)
        return dict(counters, partitions=self.partitions(key)) if key.sparse else counters

    def stats(self) -> Dict[str, float]:
        """Of this worker, flat, for TensorBoard and its like: docs/watching.md says what each name means. Cheap. Rates
        are of the last minute, or since the call before if that is longer ago, at first since the session began."""
        return self._stats.flat()

    def mark_stall(self, key: Key, begin_ns: int, end_ns: int) -> None:
        """The training thread waited for the key's value, in times of time.monotonic_ns(): for the trace (P3_TRACE),
        and for those who watch the job."""
        self.core.mark_stall(key.handle, begin_ns, end_ns)
        self.waits.note(key, (end_ns - begin_ns) / 1e9)

    def server_counters(self) -> List[dict]:
        """The same of each server, by rank, with its `label` and the processor time of its process, `cpu_s`.

        Asks over the control connections, so training goes on undisturbed. TimeoutError after P3_WAIT_TIMEOUT_S.
        """
        self.check()
        return self._server_counters.ask()

    def close(self) -> None:
        """See Control.close. What waits for other workers to leave waits here, while all threads still run."""
        if self.entrance.is_on_trial and self._unusable is None and not self.has_ended:  # a goodbye is a member's
            text = "the script ended before its first members(), with which it would have joined the job"
            log.warning("%s: %s", self.label, text)
            self.fail(text)
        is_known = self._failure_is_known
        with contextlib.suppress(P3Error):
            self.snapshots.finish()
            self._finish_all()
        self._failure_is_known = is_known  # what has only come up here, the script has not been told
        super().close()

    def send_kept(self) -> None:
        """What the script has handed over, and is kept back until other workers have told something, leaves now: before
        this one waits for them to call what it calls, as they may wait for that. P3Error, ValueError, TimeoutError."""
        for send in tuple(self.kept_back):
            send()

    def _finish_all(self) -> None:
        if self.has_ended:
            return
        try:
            for finish in (self.send_kept, *self.to_finish):
                finish()
        except (TimeoutError, ValueError) as error:
            self.core.fail(str(error))  # which the end of the session tells all nodes, and the script

    def _on_caught_up(self, _message: dict) -> None:
        self._caught_up = True


def _all_rows(key: Key) -> np.ndarray:
    return np.arange(key.shape[0], dtype=np.int64)


def current() -> Session:
    """The process's session, which its stores share; opened from the environment by the first call."""
    return open_sessions.current(Session.open)
