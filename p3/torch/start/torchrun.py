"""A job started by torchrun, or by any launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Where that is
all, the processes tell each other on which machine they are.

torchrun starts workers alone; so the workers bring the rest, as p3.launch.launchers has it. All meet at torch's own
key-value store, at MASTER_PORT, which answers whoever asks. So the secret comes from P3_SECRET or P3_SECRET_FILE, alike
on all hosts; on a single host the store tells the path of a file that only this user can read. A restart is a new job,
perhaps with another number of workers.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import subprocess
import threading
from typing import List, Mapping

from p3.launch.launchers import meeting, nodes
from p3.launch.launchers.adapters import TORCHRUN
from p3.launch.launchers.place import Place
from p3.launch.launchers.torch_store import StoreChannel
from p3.launch.schedulers import Schedulers
from p3.settings import Settings
from p3.worker.session import Session


def started(env: Mapping[str, str]) -> bool:
    return TORCHRUN.is_seen(env)


def open_session(env: Mapping[str, str]) -> Session:
    """This worker's, with what the job needs besides started. Blocks until all are there.

    ConfigError for a variable that makes no sense, RendezvousError if the others do not come in
    P3_RENDEZVOUS_TIMEOUT_S.
    """
    chosen = Settings.from_env(env)
    channel = StoreChannel(chosen, TORCHRUN.place(env), env)
    place = channel.place
    try:
        met = meeting.meet(chosen, place, channel, place.store)
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
            schedulers = None if met.listener is None else Schedulers(met.listener)
            try:
                started.set_result(nodes.start(place, met, env, schedulers))
            finally:
                if schedulers is not None:
                    schedulers.close()
        except BaseException as error:  # handed to who waits below
            started.set_exception(error)
            return
        if started.result():
            threading.Event().wait()

    threading.Thread(target=start, daemon=True, name="p3-nodes").start()
    return started.result()


def _wait_for(children: List[subprocess.Popen], timeout_s: float) -> None:
    """They serve the others until those are done, too."""
    for child in children:
        try:
            child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            child.kill()
