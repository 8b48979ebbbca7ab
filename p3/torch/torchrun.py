"""A job started by torchrun, or by any launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

torchrun starts workers alone; so the workers bring the rest, as p3.launchers has it. All meet at torch's own key-value
store, at MASTER_PORT, which answers whoever asks. So the secret comes from P3_SECRET or P3_SECRET_FILE, alike on all
hosts; on a single host the store tells the path of a file that only this user can read. A restart is a new job.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import subprocess
import tempfile
from datetime import timedelta
from typing import List, Mapping

import torch.distributed

from p3.errors import RendezvousError
from p3.launchers import meeting, nodes
from p3.launchers.adapters import TORCHRUN
from p3.launchers.place import Place
from p3.settings import Settings
from p3.worker.session import Session

_KEY = "root"


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
        children = [node.process for node in nodes.start(place, met, env)]
        atexit.register(_wait_for, children, chosen.wait_timeout_s)  # before the session's: so it is called after that
        env = {**env, **met.variables, "DMLC_ROLE": "worker", "P3_RANK": str(place.rank)}
        return Session.open(Settings.from_env(env))
    finally:
        channel.withdraw()


class StoreChannel(meeting.Channel):
    """torch's store; on a single host, a file whose path the store tells."""

    def __init__(self, settings: Settings, place: Place, env: Mapping[str, str]) -> None:
        self.private = place.machines == 1
        self._path = ""
        try:
            timeout = timedelta(seconds=settings.rendezvous_timeout_s)
            store, _, _ = next(torch.distributed.rendezvous("env://", timeout=timeout))
        except (RuntimeError, ValueError) as error:
            raise RendezvousError("torch's store at MASTER_ADDR and MASTER_PORT cannot be reached: %s"
                                  % str(error).splitlines()[0]) from None  # fmt: skip
        attempt = (env.get("TORCHELASTIC_RUN_ID", ""), env.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self._store = torch.distributed.PrefixStore("p3/%s/%s/" % attempt, store)

    def publish(self, text: str) -> None:
        if self.private:
            file, self._path = tempfile.mkstemp(prefix="p3-secret-")  # of mode 600
            with open(file, "w") as opened:
                opened.write(text)
        self._store.set(_KEY, self._path or text)

    def read(self, timeout_s: float) -> str:
        try:
            self._store.wait([_KEY], timedelta(seconds=timeout_s))
            said = self._store.get(_KEY).decode()
        except RuntimeError:
            raise RendezvousError("rank 0 has not said in %g s where its scheduler is (P3_RENDEZVOUS_TIMEOUT_S)"
                                  % timeout_s) from None  # fmt: skip
        return meeting.read_private(said) if self.private else said

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
