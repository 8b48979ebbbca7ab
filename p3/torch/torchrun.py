"""A job started by torchrun, or by any launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

torchrun starts workers alone; so the workers bring the rest. All meet at torch's own key-value store, at MASTER_PORT.
Rank 0 starts the scheduler on a free port, and tells the others; on each host the worker of local rank 0 starts a
server. Both end with the process that has started them, however that ends. A restart by torchrun is a new job, perhaps
with another number of workers.

The store may be that of the starts before, with what they have left there, and no variable tells one start from another
(TORCHELASTIC_RESTART_COUNT is each agent's own, and stays when a host comes or goes). So rank 0 first forgets who has
asked, and answers only those who ask then.

The secret comes from P3_SECRET or P3_SECRET_FILE, alike on all hosts; on a single host rank 0 makes one up, and passes
it on in a file that only this user can read.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from typing import Dict, List, Mapping, Optional

import torch.distributed

from p3.cluster.execute import Launched
from p3.cluster.node import listen
from p3.cluster.placement import source_path
from p3.errors import ConfigError, RendezvousError
from p3.settings import Settings

_ASK_AGAIN_S = 0.2
_stores: List[torch.distributed.Store] = []  # kept, as rank 0's process may be its server
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def started(env: Mapping[str, str]) -> bool:
    return all(env.get(name) for name in _NEEDED)


def settings(env: Mapping[str, str]) -> Settings:
    """Those of this worker, with what the job needs besides started. Blocks until rank 0 has published where it is.

    ConfigError for a variable that makes no sense, RendezvousError if the others do not come in
    P3_RENDEZVOUS_TIMEOUT_S.
    """
    chosen = Settings.from_env(env)
    rank, local_rank = _number(env, "RANK"), _number(env, "LOCAL_RANK", env["RANK"])
    size = _number(env, "WORLD_SIZE")
    servers = _number(env, "GROUP_WORLD_SIZE", str(max(1, size // _number(env, "LOCAL_WORLD_SIZE", "1"))))
    deadline = time.monotonic() + chosen.rendezvous_timeout_s
    store = _store(chosen.rendezvous_timeout_s, "p3/%s/" % env.get("TORCHELASTIC_RUN_ID", ""))
    job = {
        "DMLC_PS_ROOT_URI": env["MASTER_ADDR"],
        "DMLC_NUM_WORKER": str(size),
        "DMLC_NUM_SERVER": str(servers),
    }
    children: List[subprocess.Popen] = []
    if rank == 0:
        secret_file = _make_secret(chosen, servers)
        job.update(secret_file)
        listener = listen("0.0.0.0" if ":" not in env["MASTER_ADDR"] else "::")
        job["DMLC_PS_ROOT_PORT"] = str(listener.getsockname()[1])
        children.append(_start("scheduler", {**env, **job}, listener))
        _tell(store, size, "%s %s" % (job["DMLC_PS_ROOT_PORT"], secret_file.get("P3_SECRET_FILE", "")), deadline)
    else:
        job["DMLC_PS_ROOT_PORT"], _, path = _ask(store, rank, deadline).partition(" ")
        if path:
            job["P3_SECRET_FILE"] = path
    if local_rank == 0:
        children.append(_start("server", {**env, **job, "P3_RANK": env.get("GROUP_RANK", str(rank))}))
    _stores.append(store)
    atexit.register(_wait_for, children, chosen.wait_timeout_s)  # before the session's: so it is called after that
    return Settings.from_env({**env, **job, "DMLC_ROLE": "worker", "P3_RANK": str(rank)})


def _store(timeout_s: float, prefix: str) -> torch.distributed.Store:
    try:
        store, _, _ = next(torch.distributed.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    except (RuntimeError, ValueError) as error:
        raise RendezvousError("torch's store at MASTER_ADDR and MASTER_PORT cannot be reached: %s"
                              % str(error).splitlines()[0]) from None  # fmt: skip
    return torch.distributed.PrefixStore(prefix, store)


def _tell(store: torch.distributed.Store, size: int, root: str, deadline: float) -> None:
    """Where the scheduler is, to every other worker of this start."""
    for rank in range(1, size):
        store.delete_key("asks/%d" % rank)
    for rank in range(1, size):
        nonce = _get(store, "asks/%d" % rank, deadline - time.monotonic())
        if nonce is None:
            raise RendezvousError("rank %d has not asked where the scheduler is (P3_RENDEZVOUS_TIMEOUT_S)" % rank)
        store.set("told/" + nonce, root)


def _ask(store: torch.distributed.Store, rank: int, deadline: float) -> str:
    nonce, told = secrets.token_hex(8), None
    while told is None:
        if time.monotonic() > deadline:
            raise RendezvousError("rank 0 has not said where its scheduler is (P3_RENDEZVOUS_TIMEOUT_S)")
        store.set("asks/%d" % rank, nonce)  # again and again, as rank 0 may just have forgotten it
        told = _get(store, "told/" + nonce, _ASK_AGAIN_S)
    return told


def _get(store: torch.distributed.Store, key: str, timeout_s: float) -> Optional[str]:
    try:
        store.wait([key], timedelta(seconds=max(timeout_s, 0.001)))
        return store.get(key).decode()
    except RuntimeError:
        return None


def _make_secret(chosen: Settings, servers: int) -> Dict[str, str]:
    """The variable of a new secret, if one is needed, and can be had: nobody else could read it on another host."""
    if chosen.secret or chosen.secret_file:
        return {}
    if servers > 1:
        raise ConfigError("the job has no secret: set P3_SECRET or P3_SECRET_FILE to the same value on every host "
                          "before torchrun")  # fmt: skip
    file, path = tempfile.mkstemp(prefix="p3-secret-")  # of mode 600
    with open(file, "w") as opened:
        opened.write(secrets.token_hex(32))
    atexit.register(_remove, path)
    return {"P3_SECRET_FILE": path}


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _start(role: str, env: Dict[str, str], listener: Optional[socket.socket] = None) -> subprocess.Popen:
    """A node that the kernel ends with this process."""
    fd = None if listener is None else listener.detach()
    launched = Launched(launcher_pid=os.getpid(), listen_fd=fd)
    env = dict(env, DMLC_ROLE=role)
    path = source_path()
    if path is not None:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [env.get("PYTHONPATH"), path]))
    command = [sys.executable, "-m", "p3", "exec", *launched.options()]
    try:
        return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, pass_fds=() if fd is None else (fd,))
    finally:
        if fd is not None:
            os.close(fd)


def _wait_for(children: List[subprocess.Popen], timeout_s: float) -> None:
    """They serve the others until those are done, too."""
    for child in children:
        try:
            child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            child.kill()


def _number(env: Mapping[str, str], name: str, default: str = "") -> int:
    text = env.get(name) or default
    if not text.isdigit():
        raise ConfigError("%s=%r is no whole number" % (name, text))
    return int(text)
