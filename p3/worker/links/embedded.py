"""A whole job inside one process: one worker, one server, no scheduler, no secret, nothing that listens.

The two halves of the core are joined by a socket pair. The scheduler's Agreement decides, as in a real job; its
messages are delivered at once, in the thread that caused them.
"""

from __future__ import annotations

import socket
import threading
import time
from typing import Callable, Optional

from p3._core import P3Server, P3Worker
from p3.cluster import messages
from p3.cluster.agreement import Agreement
from p3.cluster.node import Node
from p3.placement import Placement
from p3.plan.strategy import of_job
from p3.server.process import DROP_AGAIN_S, apply, drop_store
from p3.server.snapshot_writer import SnapshotWriter
from p3.settings import Settings
from p3.trace.recording import Recording, fd_of
from p3.worker.links.link import Link

_WORKER = Node("worker", 0, "this process")
_SERVER = Node("server", 0, "this process")


class EmbeddedLink(Link):
    node = _WORKER
    num_workers = places = 1
    num_servers = 1
    server_changes = 0
    local_rank = 0
    local_size = 1
    placement = Placement.one_of_each(1)
    on_worker_loss = on_server_loss = "fail"
    entered = None

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        strategy = of_job(settings.strategy, 1)
        self.strategy = strategy.choices
        self._agreement = Agreement([_WORKER], [_SERVER], settings.slice_elements, settings.partitions, strategy)
        self._lock = threading.RLock()  # messages are delivered in the order in which they were decided
        self._closed = False
        options = {
            "heartbeat_s": settings.heartbeat_s,
            "timeout_s": settings.timeout_s,
            "checksums": settings.checksum,
        }
        self.recording = Recording.of(settings, _WORKER)
        self.core = P3Worker(0, 1, str(_WORKER), trace_fd=fd_of(self.recording), **options)
        self._server = P3Server(
            0,
            1,
            1,
            str(_SERVER),
            sum_order=settings.sum_order,
            threads=settings.server_threads,
            trace_fd=fd_of(Recording.of(settings, _SERVER)),
            **options,
        )
        self._snapshots = SnapshotWriter(self._server, settings, str(_SERVER), 0, self.num_servers, self._fail)
        worker_end, server_end = socket.socketpair()
        self.core.add_server(0, worker_end.detach(), str(_SERVER))
        self._server.add_worker(0, server_end.detach(), str(_WORKER))
        self._server.start()
        self.core.start()

    def label_of(self, worker: int) -> str:
        return str(self.node)

    def note_host(self, worker: int, host: str) -> None:
        pass  # there is no other

    def start(self, on_message: Callable[[dict], None], on_failure: Callable[[], None]) -> None:
        self._on_message, self._on_failure = on_message, on_failure

    def send(self, message: dict) -> None:
        self._deliver(_WORKER, messages.check(message))

    def report(self, text: str) -> None:
        pass  # nobody else is there; the core keeps the error for the session

    def close(self, _failure: Optional[str]) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._server.stop()

    def abandon_after_fork(self) -> None:
        self._server.abandon_after_fork()

    def _fail(self, text: str) -> None:
        """Behind half a frame a server cannot say why it fails, and here is no scheduler to pass it on."""
        self.core.fail(text)
        self._server.fail(text)
        self._on_failure()

    def _deliver(self, sender: Node, message: dict) -> None:
        with self._lock:
            for receiver, decided in self._agreement.receive(sender, message):
                if receiver == _WORKER:
                    self._on_message(decided)
                elif decided["kind"] == "drop_store":
                    self._deliver(_SERVER, self._drop(decided))
                elif not self._snapshots.apply(decided, lambda told: self._deliver(_SERVER, told)):
                    answer = apply(self._server, decided)
                    if answer is not None:
                        self._deliver(_SERVER, answer)

    def _drop(self, message: dict) -> dict:
        while True:
            answer = drop_store(self._server, message)
            if answer is not None:
                return answer
            time.sleep(DROP_AGAIN_S)
