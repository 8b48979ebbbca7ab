"""The schedulers of one job, one after the other, and what the launcher that outlives them passes on to each: the
listening socket, so that nodes find each at the same address; the pipe through which it says what becomes of the job;
and the journal, from which one takes up what the one before it has left (p3/cluster/journal.py)."""

from __future__ import annotations

import os
from typing import Dict, Mapping

from p3.cluster.journal import Journal
from p3.cluster.node import listen_as_root
from p3.launch.engines import Process, start_here
from p3.launch.placement import Host, Task
from p3.settings import Settings

TASK = Task("scheduler", 0, Host("localhost"), {"DMLC_ROLE": "scheduler"})
_TRIES = 3  # for one to have all nodes back


class Schedulers:
    def __init__(self, settings: Settings, root: str, status_fd: int) -> None:
        """`root`: the address of this host that all nodes reach. `status_fd`: of the pipe; ours from now on.

        ConfigError if no socket can be had there."""
        self._descriptors: Dict[str, int] = {"status_fd": status_fd}
        try:
            self._listener = listen_as_root(root, settings.root_port)
        except BaseException:
            os.close(status_fd)
            raise
        self.port: int = self._listener.getsockname()[1]
        self._descriptors["listen_fd"] = self._listener.fileno()
        self._is_mortal = settings.replaces_workers  # p3/cluster/vacancies.py knows what no journal has
        if not self._is_mortal:
            self._descriptors["journal_fd"] = Journal.make()
        self._tries_left = 0

    async def start(self, job: Mapping[str, str], secret: str) -> Process:
        self._tries_left -= 1
        return await start_here(TASK, job, secret, [], **self._descriptors)

    @property
    def may_start_again(self) -> bool:
        """Whether one that dies now may leave the job to another one."""
        return not self._is_mortal and self._tries_left > 0

    def take_note(self, state: str) -> None:
        """Of what the scheduler says."""
        if state in ("running", "resumed"):
            self._tries_left = _TRIES
        elif state == "mortal":
            self._is_mortal = True

    def close(self) -> None:
        """No more will be started. Idempotent."""
        self._listener.close()
        self._descriptors.pop("listen_fd", None)
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])
