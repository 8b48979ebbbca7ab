"""The schedulers of one job, one after the other, and what whoever starts them, and outlives them, passes on to each:
the listening socket, so that nodes find each at the same address; the pipe through which it says what becomes of the
job; and the journal, from which one takes up what the one before it has left (p3/cluster/journal.py)."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Dict, Optional

from p3.cluster.journal import Journal

_TRIES = 3  # for one to have all nodes back


class Schedulers:
    def __init__(self, listener: socket.socket, status_fd: Optional[int] = None) -> None:
        """`listener` and `status_fd`, the pipe's, are ours from now on. Without a pipe they leave no journal."""
        self._listener = listener
        self._descriptors: Dict[str, int] = {"listen_fd": listener.fileno()}
        if status_fd is not None:
            self._descriptors["status_fd"] = status_fd
            with contextlib.suppress(OSError):
                self._descriptors["journal_fd"] = Journal.make()
        self._tries_left = 0  # none before the job runs
        self._is_mortal = False
        self.serves = False  # the one that runs: the job runs, and all nodes are there

    def next(self) -> Dict[str, int]:
        """What the next one inherits, by fields of Launched."""
        self.serves = False
        self._tries_left = max(0, self._tries_left - 1)
        return self._descriptors

    @property
    def may_start_again(self) -> bool:
        """Whether one that dies now may leave the job to another one."""
        return "journal_fd" in self._descriptors and self._tries_left > 0 and not self._is_mortal

    def take_note(self, state: str) -> None:
        """Of what the scheduler says."""
        if state in ("running", "resumed"):
            self._tries_left, self.serves = _TRIES, True
        elif state in ("mortal", "failed"):
            self._is_mortal = True

    def close(self) -> None:
        """No more will be started. Idempotent."""
        self._listener.close()
        self._descriptors.pop("listen_fd", None)
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])
