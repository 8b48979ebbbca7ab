"""A job started by torchrun, or by any launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

torchrun starts workers alone; so the workers bring the rest, as p3.launchers has it. All meet at torch's own key-value
store, at MASTER_PORT, which answers whoever asks. So the secret comes from P3_SECRET or P3_SECRET_FILE, alike on all
hosts; on a single host the store tells the path of a file that only this user can read. A restart is a new job, perhaps
with another number of workers.

The store may be that of the starts before, with what they have left there, and no variable tells one start from another
(TORCHELASTIC_RESTART_COUNT is each agent's own, and stays when a host comes or goes). So rank 0 first forgets who has
asked, and answers only those who ask then.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import os
import secrets
import subprocess
import tempfile
import threading
import time
from datetime import timedelta
from typing import List, Mapping, Optional

import torch.distributed

from p3.errors import RendezvousError
from p3.launchers import meeting, nodes
from p3.launchers.adapters import TORCHRUN
from p3.launchers.place import Place
from p3.settings import Settings
from p3.worker.session import Session

_ASK_AGAIN_S = 0.2
_stores: List[torch.distributed.Store] = []  # kept, as rank 0's process may be its server


def started(env: Mapping[str, str]) -> bool:
    return TORCHRUN.is_seen(env)


def open_session(env: Mapping[str, str]) -> Session:
    """This worker's, with what the job needs besides started. Blocks until all are there.

    ConfigError for a variable that makes no sense, RendezvousError if the others do not come in
    P3_RENDEZVOUS_TIMEOUT_S.
    """
    chosen = Settings.from_env(env)
    place = TORCHRUN.place(env)
    channel = StoreChannel(chosen, place, env)
    try:
        met = meeting.meet(chosen, place, channel, env["MASTER_ADDR"])
        children = [node.process for node in _start_nodes(place, met, env)]
        atexit.register(_wait_for, children, chosen.wait_timeout_s)  # before the session's: so it is called after that
        env = {**env, **met.variables, "DMLC_ROLE": "worker", "P3_RANK": str(place.rank)}
        return Session.open(Settings.from_env(env))
    finally:
        channel.withdraw()


def _start_nodes(place: Place, met: meeting.Met, env: Mapping[str, str]) -> List[nodes.Node]:
    """nodes.start(), in a thread that goes on as long as the process: the kernel ends scheduler and server with the
    *thread* that has started them, and the caller's may be one of the script's own."""
    started: concurrent.futures.Future = concurrent.futures.Future()

    def start() -> None:
        try:
            started.set_result(nodes.start(place, met, env))
        except BaseException as error:  # handed to who waits below
            started.set_exception(error)
            return
        if started.result():
            threading.Event().wait()

    threading.Thread(target=start, daemon=True, name="p3-nodes").start()
    return started.result()


class StoreChannel(meeting.Channel):
    """torch's store; on a single host, a file whose path the store tells."""

    def __init__(self, settings: Settings, place: Place, env: Mapping[str, str]) -> None:
        self.private = place.machines == 1
        self._rank, self._size, self._timeout_s = place.rank, place.size, settings.rendezvous_timeout_s
        self._path = ""
        try:
            timeout = timedelta(seconds=settings.rendezvous_timeout_s)
            store, _, _ = next(torch.distributed.rendezvous("env://", timeout=timeout))
        except (RuntimeError, ValueError) as error:
            raise RendezvousError("torch's store at MASTER_ADDR and MASTER_PORT cannot be reached: %s"
                                  % str(error).splitlines()[0]) from None  # fmt: skip
        self._store = torch.distributed.PrefixStore("p3/%s/" % env.get("TORCHELASTIC_RUN_ID", ""), store)
        _stores.append(self._store)

    def publish(self, text: str) -> None:
        if self.private:
            file, self._path = tempfile.mkstemp(prefix="p3-secret-")  # of mode 600
            with open(file, "w") as opened:
                opened.write(text)
        self._tell(self._path or text, time.monotonic() + self._timeout_s)

    def _tell(self, said: str, deadline: float) -> None:
        """To every other worker of this start."""
        for rank in range(1, self._size):
            self._store.delete_key("asks/%d" % rank)
        for rank in range(1, self._size):
            nonce = self._get("asks/%d" % rank, deadline - time.monotonic())
            if nonce is None:
                raise RendezvousError("rank %d has not asked in %g s where the scheduler is (P3_RENDEZVOUS_TIMEOUT_S)"
                                      % (rank, self._timeout_s))  # fmt: skip
            self._store.set("told/" + nonce, said)

    def read(self, timeout_s: float) -> str:
        nonce, deadline = secrets.token_hex(8), time.monotonic() + timeout_s
        while True:
            self._store.set("asks/%d" % self._rank, nonce)  # again and again, as rank 0 may just have forgotten it
            said = self._get("told/" + nonce, _ASK_AGAIN_S)
            if said is not None:
                return self._content(said) if self.private else said
            if time.monotonic() > deadline:
                raise RendezvousError("rank 0 has not said in %g s where its scheduler is (P3_RENDEZVOUS_TIMEOUT_S)"
                                      % timeout_s)  # fmt: skip

    @staticmethod
    def _content(path: str) -> str:
        try:
            return meeting.read_private(path)
        except OSError as error:
            text = "rank 0 has ended, or is not on this host: %s: %s"
            raise RendezvousError(text % (path, error.strerror)) from None

    def _get(self, key: str, timeout_s: float) -> Optional[str]:
        try:
            self._store.wait([key], timedelta(seconds=max(timeout_s, 0.001)))
            return self._store.get(key).decode()
        except RuntimeError:
            return None

    def withdraw(self) -> None:
        if self._path:
            with contextlib.suppress(OSError):
                os.unlink(self._path)


def _wait_for(children: List[subprocess.Popen], timeout_s: float) -> None:
    """They serve the others until those are done, too."""
    for child in children:
        try:
            child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            child.kill()
