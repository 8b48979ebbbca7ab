"""What is behind every call of a Session: its lock, its link to the job, the scheduler's messages, failure and end."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any, Callable, Dict, Optional, Sequence, Tuple, Union

from p3._core import P3Error
from p3.cluster.messages import sendable
from p3.plan.key_plan import SliceSize
from p3.snapshots.pace import Pace
from p3.worker import open_sessions
from p3.worker.links.link import Link

_QUIET_BYTES = 4096  # on each connection: heartbeats are far less

Handler = Callable[[dict], Optional[Callable[[], None]]]


class Control:
    """Session's base. Its parts share the lock, and say with handle() which messages they want."""

    def __init__(self, link: Link) -> None:
        self.core = link.core
        self.rank: int = link.node.rank
        self.num_workers, self.num_servers = link.num_workers, link.num_servers
        self.goes_on_without = link.on_worker_loss == "continue"  # lost workers; then `members` changes
        self.outlives_servers = link.on_server_loss == "continue"
        self.local_rank, self.local_size = link.local_rank, link.local_size
        self.placement = link.placement  # of all workers and servers on machines
        self.label = str(link.node)  # "worker 2 (10.0.0.5)", as messages name this node
        self.slice_size = SliceSize(link.settings.slice_elements, link.num_servers)
        self.wait_timeout_s = link.settings.wait_timeout_s
        # Guards what messages change; notified after each, and of the core's failure.
        self.changed = threading.Condition()
        self._link = link
        self._handlers: Dict[str, Handler] = {"abort": self._on_abort}
        self._unusable: Optional[str] = None  # why no call is possible any more: closed, or a forked child
        self._pace = Pace(self.wait_timeout_s, lambda: link.send({"kind": "progress"}))
        self._progress = 0  # counts what other nodes say of bytes that they read or write
        self._failure_is_known = False  # to the script: it caused the job's failure, or has been told

    def handle(self, kind: str, handler: Handler) -> None:
        """Messages of that kind are passed to `handler`, with the lock held; what it returns is called without."""
        self._handlers[kind] = handler

    def wait(
        self, operations: Sequence[Any], what: str = "for an operation to complete",
        unless: Callable[[], bool] = lambda: False,
    ) -> bool:  # fmt: skip
        """Until all are done; TimeoutError that says `what` was waited for, if nothing moves for P3_WAIT_TIMEOUT_S.
        False once `unless`, which is looked at now and then, says that they never will be."""
        patience = Patience(self)
        for operation in operations:
            while True:
                try:
                    operation.wait(patience.look_s)
                    break
                except TimeoutError:
                    if unless():
                        return False
                    deadline = patience.deadline
                    left_s = patience.left_s()
                    if patience.deadline > deadline:
                        self.tell_progress()
                    if left_s <= 0:
                        raise TimeoutError(
                            "%s: waited %g s %s" % (self.label, self.wait_timeout_s, what)
                        ) from None
        return True

    def wait_until(self, condition: Callable[[], bool], what: Union[str, Callable[[], str]]) -> None:
        """Until messages have made it true; TimeoutError that says `what` was waited for, if nothing moves for
        P3_WAIT_TIMEOUT_S."""
        patience = Patience(self)
        with self.changed:
            while not condition():
                self.check()
                left_s = patience.left_s()
                if left_s <= 0:
                    text = what() if callable(what) else what
                    raise TimeoutError("%s: waited %g s %s" % (self.label, self.wait_timeout_s, text))
                self.changed.wait(min(left_s, patience.look_s))

    # Failure and end

    def fail(self, text: str) -> None:
        """Fails the whole job: every node gets the text, with this worker's name before it. The first failure wins."""
        if self._unusable is None:
            own = "%s: " % self.label
            text = sendable(own + text.replace(own, ""))  # errors of its own begin with that as well
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

    @property
    def has_ended(self) -> bool:
        """check() would raise."""
        return self._unusable is not None or self.core.error is not None

    def close(self) -> None:
        """Leaves the job: waits for what is pending (at most P3_WAIT_TIMEOUT_S), says goodbye, stops the threads.
        Idempotent."""
        with self.changed:
            if self._unusable is not None:
                return
            self._unusable = "%s: the session was closed" % self.label
        # What is pending may wait for a worker that is only slow; a dead one is noticed by its silence.
        self.core.close(self.wait_timeout_s if self.core.error is None else 0)
        error = self.core.error  # also of what was still pending after that time
        self._link.close(None if error is None else str(error))
        open_sessions.remove(self)
        if error is not None and not self._failure_is_known:  # a script that was done could not see it any more
            print("p3: the job failed: %s" % error, file=sys.stderr)

    def abandon_after_fork(self) -> None:
        """In a forked child: the job goes on in the parent alone. Takes no lock, for the parent's threads held them."""
        self.changed = threading.Condition()
        self.core.abandon_after_fork()
        self._link.abandon_after_fork()
        self._unusable = str(self.core.error)

    # Called by the link

    def _start(self) -> None:
        """Messages come from here on."""
        self._link.start(self._on_message, self._wake)

    def _on_message(self, message: dict) -> None:
        with self.changed:
            handler = self._handlers.get(message["kind"])
            then = handler(message) if handler is not None else None
            self.changed.notify_all()
        if then is not None:
            then()

    def tell_progress(self) -> None:
        """To who waits for this worker: bytes move here. Says so now and then, however often it is called."""
        self._pace.moved()

    def on_progress(self, _message: dict) -> None:
        self._progress += 1

    def moved(self) -> Tuple[int, int]:
        """What grows while a snapshot's bytes move on nodes that this one waits for; and bytes that move here, of which
        some are heartbeats."""
        if self._unusable is not None:  # and the core may be gone
            return self._progress, 0
        counters = self.core.counters()
        of_vans = (counters, counters["local"])
        return self._progress, sum(traffic["bytes_sent"] + traffic["bytes_received"] for traffic in of_vans)

    def _on_abort(self, message: dict) -> Callable[[], None]:
        def abort() -> None:
            self.core.fail(sendable(message["text"]))
            self._wake()

        return abort

    def _wake(self) -> None:
        with self.changed:
            self.changed.notify_all()


class Patience:
    """For one wait: P3_WAIT_TIMEOUT_S from when something moved last. A model may take any time on a slow link."""

    def __init__(self, control: Control, timeout_s: Optional[float] = None) -> None:
        self._control, self._timeout_s = control, control.wait_timeout_s if timeout_s is None else timeout_s
        self.look_s = min(1.0, self._timeout_s / 4)  # so often left_s() should be asked
        self._quiet_bytes = _QUIET_BYTES * (control.num_servers + control.local_size)  # in look_s
        self._looked_at = time.monotonic()
        self.deadline = self._looked_at + self._timeout_s
        self._moved: Optional[Tuple[int, int]] = None  # when it looked last

    def left_s(self) -> float:
        now = time.monotonic()
        if self._moved is None or now - self._looked_at >= self.look_s / 2:
            before, self._moved, self._looked_at = self._moved, self._control.moved(), now
            if before is not None:
                progress, count = (new - old for new, old in zip(self._moved, before))
                if progress > 0 or count > self._quiet_bytes:
                    self.deadline = now + self._timeout_s
        return self.deadline - now
