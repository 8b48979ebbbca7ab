"""A job that a benchmark talks to while it lives: packets of JSON over Unix sockets to its workers.

    with ControlledJob(store, hosts, command, folder=folder, controlled=2, ...) as job:
        job.start()                        # returns when two workers have connected
        job.hear("the start")              # a message of each
        job.ask({"rounds": 5}, "5 rounds") # and its answer
        job.leave()

p3/measure/workers/control.py is the other end.
"""

from __future__ import annotations

import json
import select
import socket
import time
from pathlib import Path
from typing import Dict, List, Mapping, Sequence

from p3.measure.jobs.job import POLL_S, STOP_TIMEOUT_S, Job, JobHung
from p3.measure.jobs.stores import Store
from p3.measure.workers.control import VARIABLE

_PACKET_BYTES = 1 << 20


class ControlledJob(Job):
    def __init__(
        self, store: Store, hosts: Sequence, worker: Sequence[str], *, folder: Path, controlled: int,
        start_timeout_s: float, timeout_s: float, environment: Mapping[str, str] = {}, **more,
    ) -> None:  # fmt: skip
        """`controlled`: how many workers connect; `timeout_s`: for one answer; all else as of a Job."""
        self.start_timeout_s, self._timeout_s, self._controlled = start_timeout_s, timeout_s, controlled
        self._path = str(folder / f"{store.name}.sock")
        self._controls: List[socket.socket] = []
        super().__init__(store, hosts, worker, folder=folder, environment={VARIABLE: self._path, **environment}, **more)

    def start(self) -> None:
        deadline = time.monotonic() + self.start_timeout_s
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(self._path)
            listener.listen()
            super().start()
            while len(self._controls) < self._controlled:
                self._wait_readable(listener, deadline, "the workers' start")
                self._controls.append(listener.accept()[0])

    def ask(self, message: Dict, what: str) -> List[Dict]:
        self.tell(message, what)
        return self.hear(what)

    def tell(self, message: Dict, what: str) -> None:
        try:
            for control in self._controls:
                control.send(json.dumps(message).encode())
        except OSError as error:
            raise self.error(f"a worker was gone before {what}: {error}", *self.names()) from error

    def hear(self, what: str) -> List[Dict]:
        """One message of every worker that is connected. JobError if one fails, or says nothing in time."""
        deadline, heard = time.monotonic() + self._timeout_s, []
        for control in self._controls:
            self._wait_readable(control, deadline, what)
            try:
                packet = control.recv(_PACKET_BYTES)
            except ConnectionError:
                packet = b""
            if not packet:
                raise self.error(f"a worker closed its control socket during {what}", *self.names())
            heard.append(json.loads(packet))
        return heard

    def leave(self) -> None:
        """The orderly end: workers whose control socket closes end by themselves. JobError if one does not, in
        time, unless its store is one that may hang here: every answer has been heard."""
        self._close_controls()
        try:
            self.wait(STOP_TIMEOUT_S)
        except JobHung:
            if not self.store.may_hang_at_end:
                raise

    def kill(self) -> None:
        self._close_controls()
        super().kill()

    def _wait_readable(self, waited: socket.socket, deadline: float, what: str) -> None:
        while not select.select([waited], [], [], POLL_S)[0]:
            self.check()
            if time.monotonic() > deadline:
                raise self.error(f"{what} did not end in time", *self.names())

    def _close_controls(self) -> None:
        for control in self._controls:
            control.close()
        self._controls.clear()
