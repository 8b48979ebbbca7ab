"""`p3 join`: this process becomes a worker of a job that runs, in the place of a lost one or as a further one, or with
--server a server, in the place of a lost one."""

from __future__ import annotations

import os
import sys
from typing import Dict, List, Optional

from p3.cluster.connections import encryption
from p3.errors import ConfigError
from p3.launch import dying_with
from p3.launch.execute import p3_exec, worker_environment
from p3.launch.placement import module_path
from p3.settings import Settings
from p3.top import find


def join(
    at: Optional[str], pid: Optional[int], wait_s: float, command: List[str], is_server: bool = False,
    rank: Optional[int] = None,
) -> int:  # fmt: skip
    """Does not return if all is well: the command, or a server, takes this process's place. `at`: HOST:PORT of the
    scheduler. `pid`: a process of the job. `rank`: of the server; None: any that is lost. ConfigError if it cannot
    be."""
    if is_server and command:
        raise ConfigError("p3 join --server runs a server of P3's: leave the command out")
    if not is_server and rank is not None:
        raise ConfigError("p3 join: --rank is for --server; a worker's is P3_RANK")
    if not is_server and not command:
        raise ConfigError("p3 join needs the command that the job's workers run, for example: p3 join python train.py")
    env = dict(os.environ)
    if at is not None:
        if pid is not None:
            raise ConfigError("p3 join: --at and --pid both name a job: leave one out")
        host, colon, port = at.rpartition(":")
        if not colon or not port.isdigit():
            raise ConfigError("--at %s: it must be HOST:PORT, of the job's scheduler" % at)
        env.update(DMLC_PS_ROOT_URI=host, DMLC_PS_ROOT_PORT=port)
    env.update(_place_in(find.settings_of(Settings.from_env(env), pid, "p3 join"), wait_s, is_server))
    if rank is not None:
        env["P3_RANK"] = str(rank)
    joining = Settings.from_env(env)
    joining.job_secret()
    encryption.require(joining)
    if is_server:  # in a process of its own: its environment tells others what it is
        command, env = [sys.executable, *p3_exec()], {**env, **module_path(env)}
    else:
        env = worker_environment(env)
    try:
        os.execvpe(command[0], command, env)
    except OSError as error:
        raise ConfigError("p3 join: " + dying_with.cannot_run(command[0], error)) from None


def _place_in(job: Settings, wait_s: float, is_server: bool) -> Dict[str, str]:
    """What tells a process that it is to join that job."""
    env = {
        "DMLC_ROLE": "server" if is_server else "worker",
        "DMLC_PS_ROOT_URI": job.root_host,
        "DMLC_PS_ROOT_PORT": str(job.root_port),
        "P3_JOIN": "%g" % wait_s,
        "P3_ON_WORKER_LOSS": job.on_worker_loss if is_server else "continue",
        "P3_ON_SERVER_LOSS": "continue" if is_server else job.on_server_loss,
    }
    if job.secret is not None:
        env["P3_SECRET"] = job.secret
    elif job.secret_file is not None:
        env["P3_SECRET_FILE"] = job.secret_file
    if job.tls:
        env["P3_TLS"] = "1"
    return env
