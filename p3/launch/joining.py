"""`p3 join`: this process becomes a worker of a job that runs, in the place of a lost one or as a further one."""

from __future__ import annotations

import os
from typing import List, Optional

from p3.cluster.connections import encryption
from p3.errors import ConfigError
from p3.launch import dying_with
from p3.launch.execute import worker_environment
from p3.settings import Settings
from p3.top import find


def join(at: Optional[str], pid: Optional[int], wait_s: float, command: List[str]) -> int:
    """Does not return if all is well: the command takes this process's place. `at`: HOST:PORT of the scheduler. `pid`:
    a process of the job. ConfigError if it cannot be."""
    if not command:
        raise ConfigError("p3 join needs the command that the job's workers run, for example: p3 join python train.py")
    env = dict(os.environ)
    if at is not None:
        if pid is not None:
            raise ConfigError("p3 join: --at and --pid both name a job: leave one out")
        host, colon, port = at.rpartition(":")
        if not colon or not port.isdigit():
            raise ConfigError("--at %s: it must be HOST:PORT, of the job's scheduler" % at)
        env.update(DMLC_PS_ROOT_URI=host, DMLC_PS_ROOT_PORT=port)
    job = find.settings_of(Settings.from_env(env), pid, "p3 join")
    env.update(
        DMLC_ROLE="worker",
        DMLC_PS_ROOT_URI=job.root_host,
        DMLC_PS_ROOT_PORT=str(job.root_port),
        P3_JOIN="%g" % wait_s,
        P3_ON_WORKER_LOSS="continue",
    )
    if job.secret is not None:
        env["P3_SECRET"] = job.secret
    elif job.secret_file is not None:
        env["P3_SECRET_FILE"] = job.secret_file
    if job.tls:
        env["P3_TLS"] = "1"
    joining = Settings.from_env(env)
    joining.job_secret()
    encryption.require(joining)
    try:
        os.execvpe(command[0], command, worker_environment(env))
    except OSError as error:
        raise ConfigError("p3 join: " + dying_with.cannot_run(command[0], error)) from None
