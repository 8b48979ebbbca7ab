"""A worker that has joined its job: declares keys, pushes gradients, receives new values. NumPy is enough to use it.

    with Session.open() as session:                       # embedded without DMLC_*, else joins as worker
        key = session.declare("w", (3, 4), "float32")
        session.init(key, first_value if session.rank == 0 else None, landing).wait(60)
        session.pushpull(key, gradient, landing, priority=0, lr=0.1).wait(60)   # landing holds the new value

What blocks: open(), set_option(), barrier(), server_counters() and close(), each with a deadline. Everything else
returns at once.
Threads: every method may be called from any thread. The control connection lives in a daemon thread of its own; the
core's threads do the sending, so heartbeats go on while Python's lock is held elsewhere.
Errors: wrong use is ValueError. A failed job is P3Error, the same first failure in every later call; its text starts
with the node that reported it. Before the job runs: ConfigError, RendezvousError, AuthenticationError (p3.errors).
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import operator
import os
import sys
import threading
import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple, Union

import numpy as np

from p3._core import DTYPES, P3Error, state_parts
from p3.cluster.messages import sendable
from p3.key_plan import KeyPlan
from p3.server.options import SETTLED_BY_FIRST_KEY, validate
from p3.settings import Settings, in_job
from p3.snapshots import tree
from p3.worker.session_snapshots import Resumed, Snapshots
from p3.worker.steps import Steps

log = logging.getLogger("p3")

Name = Union[str, int]  # 1 and "1" are different keys

_MOVE_POLL_S = 1.0  # how soon the end of the session is noticed; that of the move, at once


class Key(NamedTuple):
    """One tensor of the job as this worker declared it."""

    store: int
    name: Name
    shape: Tuple[int, ...]
    dtype: str
    handle: int  # what the core calls it, here only
    sparse: bool = False  # a key of rows: its gradients touch few of them


class _Agreed:
    """What the job has agreed on for a key, which this worker may not have declared yet."""

    def __init__(self, message: dict) -> None:
        self.plan = KeyPlan.of(message)
        self.shape = tuple(message["shape"])
        self.catch_up: Optional[int] = message["catch_up"]
        self.successor: Optional[dict] = None  # a `repartitioned` message that came before the declaration
        self.is_applied = False  # the core has the plan

    def fits(self, key: Key) -> bool:
        return (self.shape, self.plan.dtype, self.plan.row_elements > 0) == (key.shape, key.dtype, key.sparse)


class Session:
    """See the module. Make one with Session.open() or, shared by all stores of a process, with current()."""

    def __init__(self, link) -> None:
        """`link` joins us to the rest of the job: embedded_link.EmbeddedLink or cluster_link.ClusterLink."""
        self.core = link.core  # _core.P3Worker
        self.rank: int = link.rank
        self.num_workers: int = link.num_workers
        self.num_servers: int = link.num_servers
        self.local_rank: int = link.local_rank  # among the workers of this machine, by rank
        self.local_size: int = link.local_size
        self.label: str = link.label  # "worker 2 (10.0.0.5)", as messages name this node
        self.slice_elements: int = link.slice_elements
        self.wait_timeout_s: float = link.wait_timeout_s
        past = link.rejoined or {"barriers": 0, "lost": 0, "in_join": False}
        # If this process has taken the place of one that was lost: the steps that are behind the job, those before the
        # snapshot that it was resumed from included. The first init of each key brings the value after them.
        self.rejoined_at: Optional[int] = past["step"] if link.rejoined else None
        self.past: Optional[dict] = link.rejoined  # then: "rejoined" of messages.py
        self.trainers: List[Callable] = []  # references to those that the script has told of
        self.describe_optimizers: Callable[[], Optional[dict]] = lambda: None  # as JSON can carry it, for a successor
        self._steps: Optional[Steps] = None
        if link.replaces_workers:
            self._steps = Steps(lambda: self.describe_optimizers(), self._completed_pushes, self._is_agreed)
            if link.rejoined:
                self._steps.begin_behind(past["step"], past["joins"], past["marked"], past["numbers"])
        self._link = link
        self._changed = threading.Condition()  # guards all below; notified when any of it, or the core's state, changes
        self._keys: Dict[Tuple[int, Name], Key] = {}
        self._agreed: Dict[Tuple[int, Name], _Agreed] = {}
        self._options: Dict[Tuple[int, str], dict] = {}  # store and name -> what this worker asked for
        self._pushed: Set[int] = set()  # stores to which this worker has pushed
        self._options_agreed: Dict[Tuple[int, str], dict] = {}
        self._orders: Dict[int, List[Name]] = {}
        self._order_version = 0
        self._partitions: Dict[Tuple[int, Name], int] = {}  # of sparse keys
        # Of each store that was made, what the script calls a key -> the Key that stands for it; whoever makes the store
        # notes them. They stay when the script drops the store: see joining.py.
        self.keys_of_stores: List[Dict[Name, Key]] = []
        self._moving: Set[Tuple[int, Name]] = set()  # those that are on their way to other partitions
        self._barriers = self._barriers_done = past["barriers"]
        self._barriers_behind = past["barriers"]  # that the predecessor has entered, and this script may come to again
        self._join_behind: bool = past["in_join"]  # the same of a join()
        self._caught_up = link.rejoined is None  # all of the past has been told
        self._counts = past["lost"] << 32  # other numbers than those of a predecessor
        self._counters: Dict[int, Optional[List[dict]]] = {}  # of each count under way: what the servers said
        self._unusable: Optional[str] = None  # why no call is possible any more: closed, or a forked child
        self._failure_is_known = False  # to the script: it caused the job's failure, or has been told
        self._forked = False
        self.snapshots = Snapshots(self, link)
        link.start(self._on_message, self._wake)
        self._wait_until(lambda: self._caught_up, self.wait_timeout_s, "to be told what has been agreed")

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
            from p3.worker.embedded_link import EmbeddedLink as Link
        else:
            from p3.worker.cluster_link import ClusterLink as Link
        session = cls(Link(settings))
        _register(session)
        return session

    def __enter__(self) -> Session:
        return self

    def __exit__(self, exception_type, exception, _traceback) -> None:
        if exception is not None:
            self.fail(_describe(exception_type, exception))
        self.close()

    # Stores and keys

    def new_store(self) -> int:
        """The number of one more store in this process: 0, 1, 2 ... Workers must create their stores in one order."""
        with self._changed:
            self.keys_of_stores.append({})
            return len(self.keys_of_stores) - 1

    def declare(self, name: Name, shape: Sequence[int], dtype: Any, store: int = 0, sparse: bool = False) -> Key:
        """Makes a key known and starts its agreement; returns at once. The same key again returns the same Key.

        A `sparse` key is one of rows, which its first dimension counts: use init_rows(), pushpull_rows() and their like.
        `dtype` is a name of _core.DTYPES, or a NumPy type. ValueError if this worker declared the key with another
        shape or type. Another worker's contradiction fails the job, with an error that names both workers.
        """
        self.check()
        name = name if isinstance(name, str) else operator.index(name)
        shape = tuple(operator.index(length) for length in shape)
        type_name = _dtype_name(dtype)
        elements = 1
        for length in shape:
            if length < 0:
                raise ValueError("%s: key %r: shape %s has a negative length" % (self.label, name, shape))
            elements *= length
        if sparse and (not shape or 0 in shape[1:]):
            raise ValueError("%s: key %r: shape %s has no rows to be sparse in" % (self.label, name, shape))
        with self._changed:
            key = self._keys.get((store, name))
            if key is not None:
                if (key.shape, key.dtype, key.sparse) == (shape, type_name, sparse):
                    return key
                if key.sparse != sparse:
                    raise ValueError(
                        "%s: key %r was declared %s; it cannot become %s"
                        % (self.label, name, *(("sparse", "dense") if key.sparse else ("dense", "sparse")))
                    )
                raise ValueError(
                    "%s: key %r was declared with shape %s and type %s; it cannot become %s and %s"
                    % (self.label, name, key.shape, key.dtype, shape, type_name)
                )
            reduction = self._options.get((store, "reduction"))
            if reduction == {"type": "average"} and not type_name.startswith("float"):
                raise ValueError(
                    "%s: key %r is of type %s, but the gradients of store %d are averaged, which only floating point "
                    "types can be; put it into another store" % (self.label, name, type_name, store)
                )
            compression = self._options.get((store, "compression"))
            if sparse:
                row_elements = math.prod(shape[1:])
                handle = self.core.declare_rows(str(name), shape[0], row_elements, DTYPES[type_name])
                self.core.choose_route(handle, self._link.pushes)
            else:
                handle = self.core.declare(str(name), elements, DTYPES[type_name], compression)
            key = self._keys[store, name] = Key(store, name, shape, type_name, handle, sparse)
            agreed = self._agreed.get((store, name))
            defaults = [option for option in SETTLED_BY_FIRST_KEY if (store, option) not in self._options]
        # Announced even if rank 0's plan is known already: the scheduler then compares, and names both workers.
        self._link.send(
            {
                "kind": "announce",
                "store": store,
                "name": name,
                "shape": list(shape),
                "dtype": type_name,
                "sparse": sparse,
                "defaults": defaults,
            }
        )
        if agreed is not None:
            self._agree(key, agreed)
        return key

    def init(self, key: Key, value: Optional[Any], landing: Any, priority: int = 0):
        """The key's first value: `value` on rank 0, None elsewhere. The Operation is done when `landing` holds it.

        Arrays are C-ordered buffers of the key's shape and type; they belong to the core until the operation is done.
        Called again, by every worker at the same point, it gives the key a new value; an optimizer keeps its state.
        """
        self.check()
        return self.core.init(key.handle, value, landing, priority)

    def pushpull(
        self,
        key: Key,
        gradient: Any,
        landing: Any,
        priority: int = 0,
        lr: float = 0.0,
        wd: float = 0.0,
        rescale: float = 1.0,
        updates: float = 0.0,
        schedule: float = 1.0,
    ):
        """One round: the gradient goes out, the new value (without an optimizer: the sum) comes into `landing`.

        Higher priorities leave sooner. The numbers must be the same on every worker; they are used by the store's
        optimizer. Returns an Operation; arrays as in init(). Reading `landing` afterwards is the pull.
        """
        self.check()
        self.begin_push(key)
        return self.core.push(key.handle, gradient, landing, priority, (lr, wd, rescale, updates, schedule))

    def skip(self, key: Key, landing: Any, priority: int = 0):
        """One round without a gradient of this worker, which has taken its last step while others go on.

        Their new value comes into `landing`. Once every worker skips, it stays as it is, and the Operation, when done, is
        not `updated`: so a worker that has finished skips each key again and again until then.
        """
        self.check()
        self.begin_skip(key)
        return self.core.skip(key.handle, landing, priority)

    def fetch_state(self, key: Key, part: int, landing: Any):
        """Copies one array of the optimizer's state on the servers to `landing`: 1, 2 ... or _core.MASTER.

        As after this worker's last round of the key. The array has the key's shape, and its type (float32 for float16).
        """
        self.check()
        return self.core.fetch(key.handle, part, landing)

    def store_state(self, key: Key, part: int, content: Any):
        """Gives that array another content, on rank 0, before its next round of the key."""
        self.check()
        return self.core.store(key.handle, part, content)

    # Keys of rows, declared as sparse

    def init_rows(self, key: Key, value: Optional[Any], landing: Optional[Any], priority: int = 0):
        """As init(). `landing` None: this worker keeps no copy of the value, and fetches the rows that it wants."""
        self.check()
        return self.core.init_rows(key.handle, value, landing, priority)

    def pushpull_rows(
        self,
        key: Key,
        ids: Any,
        values: Any,
        landing: Optional[Any],
        priority: int = 0,
        lr: float = 0.0,
        wd: float = 0.0,
        rescale: float = 1.0,
        updates: float = 0.0,
        schedule: float = 1.0,
    ):
        """One round, as pushpull(), of a gradient that is zero but for some rows: `ids` (int64) and `values`, row by row.

        Ids may come in any order; what comes for one id more than once is added up. No rows at all are fine. The
        optimizer updates the rows that any worker touched, and no others: those are written to `landing`, an array of the
        whole key, and listed by the Operation's `changed` when it is done. Without an optimizer they become the sums, and
        the rows that held sums of the round before become zero. `landing` None: the rows stay on the servers.
        An id that the key does not have fails the job.
        """
        self.check()
        self.begin_push(key)
        scalars = (lr, wd, rescale, updates, schedule)
        return self.core.push_rows(key.handle, ids, values, landing, priority, scalars)

    def skip_rows(self, key: Key, landing: Optional[Any], priority: int = 0):
        """As skip()."""
        self.check()
        self.begin_skip(key)
        return self.core.skip_rows(key.handle, landing, priority)

    def fetch_rows(self, key: Key, ids: Any, landing: Any, part: int = 0, priority: int = 0):
        """Copies rows of the value, or of a part of the optimizer's state, to `landing`, in the order of `ids` (int64).

        As after this worker's last round of the key; parts as in fetch_state(). Ids may repeat.
        """
        self.check()
        return self.core.fetch_rows(key.handle, part, ids, landing, priority)

    def store_rows(self, key: Key, ids: Any, content: Any, part: int = 0):
        """Gives those rows another content, between rounds. `ids` (int64) ascend, each once."""
        self.check()
        return self.core.store_rows(key.handle, part, ids, content)

    def wait(self, operations: Sequence[Any]) -> None:
        """Until all are done; TimeoutError after P3_WAIT_TIMEOUT_S."""
        deadline = time.monotonic() + self._link.wait_timeout_s
        for operation in operations:
            operation.wait(max(0.0, deadline - time.monotonic()))

    @property
    def searches_partitions(self) -> bool:
        """P3_PARTITIONS=auto; and this is rank 0, which searches."""
        return self._link.searches_partitions and self.rank == 0

    def partitions(self, key: Key) -> int:
        """Into how many the rows of a sparse key are cut now; 0 before it is agreed."""
        with self._changed:
            return self._partitions.get((key.store, key.name), 0)

    def repartition(self, key: Key, partitions: int) -> None:
        """Cuts the rows of a sparse key anew, while the job trains; rank 0 only. Returns at once.

        The next round that rank 0 pushes after all servers have agreed is the last one of the old partitions; then each
        worker takes a share of the rows, with the optimizer's state, from their old servers to their new ones, and the
        rounds go on. Values and sums stay the same to the bit. One change of a key at a time: see is_moving().
        """
        self.check()
        if self.rank != 0 or not key.sparse or not 1 <= partitions <= key.shape[0]:
            raise ValueError(
                "%s: key %r cannot get %r partitions: only rank 0 cuts sparse keys anew, into at most their rows"
                % (self.label, key.name, partitions)
            )
        if self._link.replaces_workers:
            raise ValueError(
                "%s: rows do not move where a lost worker is replaced (P3_ON_WORKER_LOSS=wait); set P3_PARTITIONS"
                % self.label
            )
        if self.is_moving(key):
            raise ValueError("%s: key %r is on its way to other partitions already" % (self.label, key.name))
        if self.partitions(key) == 0:
            raise ValueError("%s: key %r is not agreed yet; wait for its first value" % (self.label, key.name))
        with self._changed:
            self._moving.add((key.store, key.name))
        self._link.send({"kind": "repartition", "store": key.store, "name": key.name, "partitions": partitions})

    def is_moving(self, key: Key) -> bool:
        """Whether other partitions were requested, and not all workers have gone over to them yet."""
        with self._changed:
            return (key.store, key.name) in self._moving

    # Where this worker stands in its program: see steps.py. A store that goes past pushpull() and skip() calls these.

    def begin_push(self, key: Key, order: Optional[int] = None) -> None:
        """Before a push is queued, and counted anywhere; for who pushes past this class as well. `order`: of the key among
        those of its store, if the script says so (see Steps.push)."""
        self._barriers_behind, self._join_behind = 0, False  # this process trains on from where its predecessor stood
        if key.store not in self._pushed:
            self._settle_optimizer(key.store)
        self._note(Steps.push, (key.store, key.name), None if order is None else (key.store, order))

    def _settle_optimizer(self, store: int) -> None:
        """Before the store's first push."""
        with self._changed:
            self._pushed.add(store)
            goes_without = (store, "optimizer") not in self._options
        if goes_without:  # compared with what others have set: their rounds would be updated, and ours summed
            self._link.send({"kind": "option", "store": store, "name": "optimizer", "value": {}})

    def begin_skip(self, key: Key) -> None:
        self._note(Steps.skip, (key.store, key.name))

    def mark_step(self, step: int) -> None:
        """The script says that so many steps have ended."""
        self._note(Steps.mark, step)

    def join_began(self) -> bool:
        """This worker has taken its last step until all have. False: so has everyone, and its predecessor counted."""
        if self._join_behind:
            self._join_behind = False
            return False
        self.snapshots.finish()  # or its thread would tell of a snapshot behind the word that we take no part
        joined = {"kind": "joined", "worker": self.rank, "step": 0}
        if self._steps is None:
            if self.snapshots.are_taken:
                self._link.send(joined)
            return True
        with self._changed:
            before = self.snapshots.times_joined(self.rank)
            self._steps.join()
            self._link.send(dict(joined, step=self._steps.step))
            self._tell_place()  # behind that word
        # Before the first skip: if this worker is lost then, all know why it had skipped a round.
        self._wait_until(
            lambda: self.snapshots.times_joined(self.rank) > before, self.wait_timeout_s, "for the scheduler"
        )
        return True

    def join_ended(self) -> None:
        """All have."""
        if self._steps is not None:
            self._wait_until(self.snapshots.all_joined, self.wait_timeout_s, "to hear who has joined")
            self._note(Steps.joined, self.snapshots.joined_at())
        self.snapshots.join_ended()

    def _note(self, call, *arguments) -> None:
        if self._steps is None:
            return
        with self._changed:
            call(self._steps, *arguments)
            self._tell_place()

    def _tell_place(self) -> None:
        """With the lock held."""
        for news in self._steps.news():
            rounds = news.pop("rounds")
            keys = [self._agreed[identity].plan.wire_key for identity in rounds]
            marked = self._steps.is_marked
            self._link.send({"kind": "place", "keys": keys, "rounds": list(rounds.values()), "marked": marked, **news})

    def _completed_pushes(self, identity) -> int:
        return self.core.key_counters(self._keys[identity].handle)["rounds"]

    def _is_agreed(self, identity) -> bool:
        return identity in self._agreed

    # What all workers agree on

    def set_option(self, store: int, name: str, value: dict) -> None:
        """Sets an option of p3.server.options. Blocks until all servers have it, at most P3_WAIT_TIMEOUT_S.

        Set compression and reduction before the store's first key is declared, and an optimizer before its first push.
        The same value again is fine. ValueError if the value makes no sense, if this worker has set another one
        before, or if a key has settled the option. Workers that differ fail the job.
        """
        self.check()
        validate(name, value)
        value = dict(value)
        with self._changed:
            before = self._options.get((store, name))
            if before is None:
                if name in SETTLED_BY_FIRST_KEY and any(key.store == store for key in self._keys.values()):
                    raise ValueError(
                        "%s: store %d has keys already; its %s %s must be set before the first init"
                        % (self.label, store, name, value)
                    )
                if name == "optimizer" and store in self._pushed:
                    raise ValueError(
                        "%s: gradients were pushed to store %d already; set its optimizer %s before the first push"
                        % (self.label, store, value)
                    )
                moving = next((key for number, key in self._moving if number == store), None)
                if name == "optimizer" and moving is not None:  # its state could not go with the rows
                    raise ValueError(
                        "%s: the rows of key %r of store %d are on their way to other partitions; set the optimizer before "
                        "the first push" % (self.label, moving, store)
                    )
                self._options[store, name] = value
        if before is None:
            if name == "compression" and self._link.aggregates and self.local_rank == 0:
                log.info("%s: store %d is compressed, so each worker of this machine pushes on its own", self.label, store)
            self._link.send({"kind": "option", "store": store, "name": name, "value": value})
        elif before != value:
            raise ValueError(
                "%s: store %d has the %s %s already; it cannot become %s: make a new store"
                % (self.label, store, name, before, value)
            )
        self._wait_until(
            lambda: self._options_agreed.get((store, name)) == value,
            self._link.wait_timeout_s,
            "for the %s of store %d: worker 0 has not set it, or a server does not answer" % (name, store),
        )

    def set_optimizer(self, store: int, description: dict) -> None:
        """set_option() of a description as p3.server.optimizers has them."""
        self.set_option(store, "optimizer", description)

    def option(self, store: int, name: str) -> Optional[dict]:
        """What this worker has set, or None."""
        with self._changed:
            value = self._options.get((store, name))
            return None if value is None else dict(value)

    def announce_order(self, store: int, names: Sequence[Name]) -> None:
        """Rank 0 tells all workers in which order the forward pass uses the keys. Elsewhere it does nothing."""
        self.check()
        if self.rank == 0:
            self._link.send({"kind": "order", "store": store, "names": list(names)})

    @property
    def order_version(self) -> int:
        """Grows with every order that arrives, of any store."""
        return self._order_version

    def order(self, store: int) -> List[Name]:
        """The order last announced for the store; empty if there is none yet."""
        with self._changed:
            return list(self._orders.get(store, ()))

    def barrier(self, timeout_s: Optional[float] = None) -> None:
        """Returns when every worker has called it as often as this one. TimeoutError after P3_WAIT_TIMEOUT_S.

        In a process that takes a lost one's place, and before its first push, barriers that the lost one had entered
        return at once.
        """
        self.check()
        with self._changed:
            if self._barriers_behind > 0:
                self._barriers_behind -= 1
                return
            self._barriers += 1
            number = self._barriers
        self._note(Steps.end)
        self._link.send({"kind": "barrier", "number": number})
        timeout_s = self._link.wait_timeout_s if timeout_s is None else timeout_s
        self._wait_until(lambda: self._barriers_done >= number, timeout_s, "in barrier %d for other workers" % number)

    # Snapshots

    def snapshot(self, round: int, keys: Sequence[Key], state: Any = None) -> None:
        """Between two steps, by every worker at the same ones: takes a snapshot if one is due (P3_SNAPSHOT_EVERY).

        `round`: how many steps this job has taken. `keys`: all of the job. `state`: what this worker wants to have back: a
        tree (p3.snapshots.tree), which is copied. Returns at once, but waits while the snapshot before is being written.
        """
        self.check()
        is_due = self.snapshots.due(round)
        self.mark_step(round)
        if not is_due:
            return
        own = {"state": tree.checked(state, "state"), "residuals": []}
        self.snapshots.wait_for_last(round)
        operations = []
        for key in keys:
            residual = np.zeros(key.shape, "float32") if self.core.keeps_residual(key.handle) else None
            operations.append(self.core.capture(key.handle, round, residual))
            own["residuals"].append([key.store, key.name, residual])
        describe = lambda: [self.describe_key(key, key.name) for key in keys]  # noqa: E731
        self.snapshots.write(round, describe, lambda: self.wait(operations), own)

    def resume(self) -> Resumed:
        """By every worker, before its first key: finds the newest valid snapshot in P3_SNAPSHOT_DIR.

        Its round, and this worker's state; (0, {}) where there is none, (rejoined_at, {}) in a process that has taken the
        place of a lost one. Then give each init() resumed_value(), and call
        restore() before the key's first round. Blocks until worker 0 has chosen, at most P3_WAIT_TIMEOUT_S. ValueError if
        the snapshot is of a job with another number of workers.
        """
        self.check()
        if self._keys and not self.snapshots.chosen:
            raise ValueError("%s: resume() comes before the first key" % self.label)
        resumed = self.snapshots.resume()
        if self.rejoined_at is None and resumed.round > 0:
            self._note(Steps.begin_behind, resumed.round)
        return resumed

    def resumed_value(self, key: Key, id: Optional[Name] = None) -> Optional[Any]:
        """What the snapshot has as the key's value; on rank 0, the others need none. None if it does not know the key."""
        return self.snapshots.value(key, key.name if id is None else id)

    def restore(self, key: Key) -> None:
        """The rest of what the snapshot has of a key: the optimizer's state on rank 0, residuals. Waits for servers."""
        store_part = self.store_state
        if key.sparse:
            rows = np.arange(key.shape[0], dtype=np.int64)
            store_part = lambda key, part, content: self.store_rows(key, rows, content, part)  # noqa: E731
        states = self.snapshots.states(key, key.name, self.option(key.store, "optimizer"))
        self.wait([store_part(key, part, content) for part, content in states.items()])
        for store, name, residual in (self.snapshots.own or {}).get("residuals", ()):
            if (store, name) == (key.store, key.name) and residual is not None:
                self.core.restore_residual(key.handle, residual)

    def agreed_shape(self, store: int, name: Name) -> Optional[Tuple[int, ...]]:
        """Of a key that the job has; None if it has none by now."""
        with self._changed:
            agreed = self._agreed.get((store, name))
            return None if agreed is None else agreed.shape

    def updates_behind(self, key: Key) -> int:
        """In a process that has taken a lost one's place: how often the key has been updated, if all workers had it from the
        beginning. Rounds that all skipped are none."""
        with self._changed:
            agreed = self._agreed.get((key.store, key.name))
            rounds = agreed.catch_up or 0 if agreed is not None else 0
        updates = rounds - self.past["joins"]
        return updates + self.past["resumed"] if updates > 0 else 0

    def describe_key(self, key: Key, id: Name) -> dict:
        """A captured key as a snapshot describes it (p3.snapshots.files.Snapshot); `id`: what the script calls it."""
        with self._changed:
            optimizer = self._options_agreed.get((key.store, "optimizer"))
        return {
            "store": key.store,
            "id": id,
            "shape": list(key.shape),
            "dtype": key.dtype,
            "optimizer": optimizer,
            "plan": self.core.captured_plan(key.handle).kept(),
        }

    # Counters

    def counters(self) -> dict:
        """What the core has sent and received so far: bytes_sent, bytes_received, slices_sent, ..., rounds."""
        self._require_core()
        return self.core.counters()

    def traffic_with(self, server: int) -> dict:
        """The same of one server, without `rounds`."""
        self._require_core()
        return self.core.traffic_with(server)

    def key_counters(self, key: Key) -> dict:
        """rounds, waited_s (from push to the landed value, added up), longest_wait_s, and the key's compression."""
        self._require_core()
        compression = self._options.get((key.store, "compression")) if key.dtype == "float32" else None
        counters = dict(self.core.key_counters(key.handle), compression=compression and compression["type"])
        return dict(counters, partitions=self.partitions(key)) if key.sparse else counters

    def mark_stall(self, key: Key, begin_ns: int, end_ns: int) -> None:
        """For the trace (P3_TRACE): the training thread waited for the key's value, in times of time.monotonic_ns()."""
        self._require_core()
        self.core.mark_stall(key.handle, begin_ns, end_ns)

    def _require_core(self) -> None:
        if self._forked:
            self.check()

    def server_counters(self, timeout_s: Optional[float] = None) -> List[dict]:
        """The same of each server, by rank, with its `label` and the processor time of its process, `cpu_s`.

        Asks over the control connections, so training goes on undisturbed. TimeoutError after P3_WAIT_TIMEOUT_S.
        """
        self.check()
        with self._changed:
            self._counts += 1
            number = self._counts
            self._counters[number] = None
        try:
            self._link.send({"kind": "count", "number": number})
            timeout_s = self._link.wait_timeout_s if timeout_s is None else timeout_s
            self._wait_until(lambda: self._counters[number] is not None, timeout_s, "for the counters of the servers")
            return self._counters[number]
        finally:
            with self._changed:
                del self._counters[number]

    # Failure and end

    def fail(self, text: str) -> None:
        """Fails the whole job: every node gets the text, with this worker's name before it. The first failure wins."""
        if self._unusable is None:
            text = sendable("%s: %s" % (self.label, text))
            self._failure_is_known = True
            self.core.fail(text)
            # The first failure, which the scheduler may not have heard of yet, and of which the script has died.
            first = self.core.error
            self._link.report(text if first is None else str(first))
            self._wake()

    def check(self) -> None:
        """Raises P3Error if the job has failed, or this session was closed or forked away. Cheap."""
        if self._unusable is not None:
            raise P3Error(self._unusable)
        error = self.core.error
        if error is not None:
            self._failure_is_known = True
            raise error

    def close(self) -> None:
        """Leaves the job: waits for what is pending (at most P3_WAIT_TIMEOUT_S), says goodbye, stops the threads.

        Idempotent.
        """
        with contextlib.suppress(P3Error):
            self.snapshots.finish()
        if self._unusable is None:
            self._note(Steps.leave)
        with self._changed:
            if self._unusable is not None:
                return
            self._unusable = "%s: the session was closed" % self.label
        # What is pending may wait for a worker that is only slow; a dead one is noticed by its silence.
        self.core.close(self._link.wait_timeout_s if self.core.error is None else 0)
        error = self.core.error  # also of what was still pending after that time
        self._link.close(None if error is None else str(error))
        _unregister(self)
        if error is not None and not self._failure_is_known:  # a script that was done could not see it any more
            print("p3: the job failed: %s" % error, file=sys.stderr)

    def abandon_after_fork(self) -> None:
        """In a forked child: the job goes on in the parent alone. Takes no lock, for the parent's threads held them."""
        self._changed = threading.Condition()
        self._forked = True
        self._unusable = (
            "%s: this process was forked from a worker and is no part of the job; use P3 in the parent only"
            % self.label
        )
        self.core.abandon_after_fork()
        self._link.abandon_after_fork()

    # Called by the link, in its thread

    def _on_message(self, message: dict) -> None:
        kind = message["kind"]
        with self._changed:
            if kind == "agreed":
                identity = message["store"], message["name"]
                agreed = self._agreed[identity] = _Agreed(message)
                key = self._keys.get(identity)
                if self._steps is not None:
                    if agreed.catch_up is not None:
                        self._steps.know(identity, agreed.catch_up)
                    self._tell_place()
            elif kind == "repartitioned":
                agreed = self._agreed[message["store"], message["name"]]
                may_move = agreed.is_applied
                if not may_move:  # this worker has not declared the key yet
                    agreed.successor = message
            elif kind == "settled":
                self._moving.discard((message["store"], message["name"]))
            elif kind == "option_agreed":
                self._options_agreed[message["store"], message["name"]] = message["value"]
            elif kind == "order":
                self._orders[message["store"]] = message["names"]
                self._order_version += 1
            elif kind == "barrier_done":
                self._barriers_done = max(self._barriers_done, message["number"])
            elif kind == "missing":
                rounds = dict(zip(message["keys"], message["rounds"]))
                pushed = {
                    identity: rounds[agreed.plan.wire_key]
                    for identity, agreed in self._agreed.items()
                    if agreed.plan.wire_key in rounds
                }
                self._steps.ask(message["rank"], message["attempt"], message["joins"], pushed)
                self._tell_place()
            elif kind == "found":
                self._steps.settle(message["rank"])
            elif kind == "caught_up":
                self._caught_up = True
            elif kind == "counters" and message["number"] in self._counters:  # else nobody waits any more
                self._counters[message["number"]] = message["servers"]
            else:
                self.snapshots.on_message(message)
            self._changed.notify_all()
        if kind == "agreed" and key is not None:
            self._agree(key, agreed)
        elif kind == "repartitioned" and may_move:
            self._move(message)
        elif kind == "abort":
            self.core.fail(sendable(message["text"]))
            self._wake()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _agree(self, key: Key, agreed: _Agreed) -> None:
        """Gives the core the job's plan, once; never a plan that contradicts what was declared here."""
        with self._changed:
            if agreed.is_applied or not agreed.fits(key):
                return
            agreed.is_applied = True
            plan = agreed.plan  # a move changes it
            self._partitions[key.store, key.name] = plan.partitions
        self.core.agree(key.handle, plan, agreed.catch_up is not None)
        self._note_key(key, plan)
        if agreed.successor is not None:
            self._move(agreed.successor)

    def _note_key(self, key: Key, plan: KeyPlan) -> None:
        if self._link.recording is not None:
            self._link.recording.note_key(plan.wire_key, key.store, key.name, key.shape, key.dtype, plan.slices)

    def _move(self, message: dict) -> None:
        """This worker's share of a sparse key's rows is to go to other partitions, once rank 0's next round has told all."""
        identity = message["store"], message["name"]
        with self._changed:
            # As agreed by now, not as this worker has asked: the servers expect the same parts.
            key, optimizer = self._keys[identity], self._options_agreed.get((message["store"], "optimizer"))
            former = self._agreed[identity].plan
        plan = former.successor(message)
        first, end = (plan.rows * rank // self.num_workers for rank in (self.rank, self.rank + 1))
        parts = state_parts(optimizer, DTYPES[key.dtype])
        operation = self.core.move_rows(key.handle, plan, parts, first, end - first)
        with self._changed:
            self._agreed[identity].plan = plan
            self._moving.add(identity)
            self._changed.notify_all()
        arguments = (operation, key, former, plan)
        threading.Thread(target=self._report_move, args=arguments, name="p3-move", daemon=True).start()
        self._note_key(key, plan)

    def _report_move(self, operation, key: Key, former: KeyPlan, plan: KeyPlan) -> None:
        """A thread of its own: the core tells of the end, the control thread is for messages."""
        while not operation.done:
            if self._unusable is not None or self.core.error is not None:
                return
            with contextlib.suppress(TimeoutError):
                operation.wait(_MOVE_POLL_S)
        with self._changed:
            self._partitions[key.store, key.name] = plan.partitions
            self._changed.notify_all()
        self._link.send({"kind": "moved", "wire_key": former.wire_key})

    def _wait_until(self, condition, timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not condition():
                self.check()
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError("%s: waited %g s %s" % (self.label, timeout_s, what))
                self._changed.wait(left)


# One session per process, shared by its stores

_current: Optional[Session] = None
_opened: List[Session] = []  # all that are open, also those that are not current
_ever_opened = False
_lock = threading.Lock()


def current() -> Session:
    """The process's session, opened from the environment by the first call."""
    global _current
    with _lock:
        if _current is None:
            _current = Session.open()
        return _current


def opened() -> Optional[Session]:
    """The process's session, or another one that is open, or None; opens none."""
    return next((session for session in (_current, *_opened) if session is not None), None)


def _register(session: Session) -> None:
    global _ever_opened
    if not _ever_opened:
        _ever_opened = True
        atexit.register(_close_all)
        os.register_at_fork(after_in_child=_abandon_all)
        _report_uncaught_exceptions()
    _opened.append(session)


def _unregister(session: Session) -> None:
    global _current
    if session in _opened:
        _opened.remove(session)
    if _current is session:
        _current = None


def _close_all() -> None:
    for session in list(_opened):
        session.close()


def _abandon_all() -> None:
    global _lock
    _lock = threading.Lock()
    for session in _opened:
        session.abandon_after_fork()
    _opened.clear()  # and _current stays: a store made before the fork must say why it is dead


def _report_uncaught_exceptions() -> None:
    """A script that dies of an exception is the job's failure, not a goodbye; the other nodes get its last line."""
    previous = sys.excepthook

    def report(exception_type, exception, traceback):
        previous(exception_type, exception, traceback)
        if not hasattr(sys, "ps1") and not sys.flags.interactive:  # at a prompt, the process lives on
            for session in list(_opened):
                session.fail(_describe(exception_type, exception))

    sys.excepthook = report


def _describe(exception_type, exception) -> str:
    lines = str(exception).strip().splitlines()
    return "the script ended with %s%s" % (exception_type.__name__, ": " + lines[0] if lines else "")


def _dtype_name(dtype: Any) -> str:
    name = dtype if isinstance(dtype, str) else getattr(dtype, "name", None) or getattr(dtype, "__name__", str(dtype))
    if name not in DTYPES:
        raise ValueError("type %s cannot be synchronised; P3 knows %s" % (name, ", ".join(DTYPES)))
    return name
