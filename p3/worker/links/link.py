"""What joins a Session to the rest of its job: the interface of ClusterLink, over the network, and of EmbeddedLink, in
the same process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Callable, Optional

from p3._core import P3Worker
from p3.cluster.node import Node
from p3.placement import Placement
from p3.plan.key_plan import KeyPlan
from p3.plan.strategy import Strategy
from p3.settings import Settings
from p3.trace.recording import Recording
from p3.worker.key import Key


class Link(ABC):
    """Made when the job is complete; its attributes do not change, but for `server_changes`. All methods may be called
    from any thread."""

    settings: Settings
    core: P3Worker  # runs already
    node: Node  # this worker
    num_workers: int  # with which the job has begun
    places: int  # how many there may be at once
    num_servers: int
    server_changes: int  # so many of them were lost, or came back, as this worker has heard by now
    local_rank: int  # among the workers of this machine, by rank
    local_size: int  # how many they are
    placement: Placement
    strategy: Strategy  # of the job, as far as workers have to know it: Strategy.choices
    on_worker_loss: str  # P3_ON_WORKER_LOSS
    on_server_loss: str  # P3_ON_SERVER_LOSS
    entered: Optional[dict]  # of a process that has entered a running job: see messages.py
    recording: Optional[Recording]  # for the trace

    def note_key(self, key: Key, plan: KeyPlan) -> None:
        """For the trace, if there is one."""
        if self.recording is not None:
            self.recording.note_key(key.store, key.name, key.shape, key.dtype, plan)

    @abstractmethod
    def label_of(self, worker: int) -> str:
        """The worker of that rank, as messages name it."""

    @abstractmethod
    def note_host(self, worker: int, host: str) -> None:
        """Where another process is now that worker."""

    @abstractmethod
    def start(self, on_message: Callable[[dict], None], on_failure: Callable[[], None]) -> None:
        """From here on, in a thread of the link or in the one that sends: `on_message` is called for each of the
        scheduler's messages, in order, and `on_failure` once the core has failed."""

    @abstractmethod
    def send(self, message: dict) -> None:
        """To the scheduler; returns at once. ProtocolError if the message cannot be sent at all."""

    @abstractmethod
    def report(self, text: str) -> None:
        """Tells the scheduler, once, that this worker has failed."""

    @abstractmethod
    def close(self, failure: Optional[str]) -> None:
        """Leaves the job, with a goodbye or with what went wrong. Idempotent."""

    @abstractmethod
    def abandon_after_fork(self) -> None:
        """In a forked child: drops what belongs to the parent, without a word to anybody."""
