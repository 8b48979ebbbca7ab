"""What is behind every call of a Session: its lock, its link to the job, the scheduler's messages, failure and end."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any, Callable, Dict, Optional, Sequence

from p3._core import P3Error
from p3.cluster.messages import sendable
from p3.key_plan import slice_elements
from p3.worker import open_sessions
from p3.worker.link import Link

Handler = Callable[[dict], Optional[Callable[[], None]]]


class Control:
    """Session's base. Its parts share the lock, and say with handle() which messages they want."""

    def __init__(self, link: Link) -> None:
        self.core = link.core
        self.rank: int = link.node.rank
        self.num_workers, self.num_servers = link.num_workers, link.num_servers
        self.local_rank, self.local_size = link.local_rank, link.local_size
        self.label = str(link.node)  # "worker 2 (10.0.0.5)", as messages name this node
        self.slice_elements = slice_elements(link.settings.slice_elements, link.num_servers)
        self.wait_timeout_s = link.settings.wait_timeout_s
        # Guards what messages change; notified after each, and of the core's failure.
        self.changed = threading.Condition()
        self._link = link
        self._handlers: Dict[str, Handler] = {"abort": self._on_abort}
        self._unusable: Optional[str] = None  # why no call is possible any more: closed, or a forked child
        self._failure_is_known = False  # to the script: it caused the job's failure, or has been told
        self._forked = False

    def handle(self, kind: str, handler: Handler) -> None:
        """Messages of that kind are passed to `handler`, with the lock held; what it returns is called without."""
        self._handlers[kind] = handler

    def wait(self, operations: Sequence[Any]) -> None:
        """Until all are done; TimeoutError after P3_WAIT_TIMEOUT_S."""
        deadline = time.monotonic() + self.wait_timeout_s
        for operation in operations:
            operation.wait(max(0.0, deadline - time.monotonic()))

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Until messages have made it true; TimeoutError, after P3_WAIT_TIMEOUT_S, that says `what` was waited for."""
        deadline = time.monotonic() + self.wait_timeout_s
        with self.changed:
            while not condition():
                self.check()
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError("%s: waited %g s %s" % (self.label, self.wait_timeout_s, what))
                self.changed.wait(left)

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
        self._forked = True
        self._unusable = (
            "%s: this process was forked from a worker and is no part of the job; use P3 in the parent only"
            % self.label
        )
        self.core.abandon_after_fork()
        self._link.abandon_after_fork()

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

    def _on_abort(self, message: dict) -> Callable[[], None]:
        def abort() -> None:
            self.core.fail(sendable(message["text"]))
            self._wake()

        return abort

    def _wake(self) -> None:
        with self.changed:
            self.changed.notify_all()
