"""Which job `p3 top` shows and `p3 join` joins, and where its secret comes from: as for a node from the environment, or
from a process of the job on this host. A process's environment can be read by its own user alone, and by root."""

from __future__ import annotations

import argparse
import contextlib
import os
from typing import Callable, Dict, List, Mapping, Optional, Tuple

from p3.errors import ConfigError
from p3.settings import Settings

_OF_A_NODE = {"DMLC_ROLE", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT"}
_SECRETS = {"P3_SECRET", "P3_SECRET_FILE"}
_SHOWN_CHARACTERS = 80  # of a command
_LOSSES = {"P3_ON_WORKER_LOSS", "P3_ON_SERVER_LOSS"}  # which who joins must have, too


def process_number(text: str) -> int:
    """Of an option."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError("%r is not the number of a process" % text)
    return int(text)


def settings_of(settings: Settings, pid: Optional[int], command: str = "p3 top") -> Settings:
    """Those of the job that `settings`, the environment's, name; or of the process, or of the only one that this user
    has on this host. ConfigError, which names the `command`, if there is none, or not one."""
    if pid is not None:
        found = {_job(one): one for one in _environments(lambda process: process == pid or _parent(process) == pid)}
        if not found:
            raise ConfigError("--pid %d: it is no process of a job, nor a p3 run, of this user on this host" % pid)
        return _of(next(iter(found.values())))
    if settings.root_host is not None:
        settings.require("root_host", "root_port")
        settings.job_secret()
        return settings
    found = {_job(one): one for one in sorted(_environments(_is_ours), key=lambda one: one["DMLC_ROLE"])}
    if len(found) == 1:
        return _of(next(iter(found.values())))
    if not found:
        raise ConfigError(
            "%s: no job of this user runs on this host. On another one set DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT and "
            "P3_SECRET or P3_SECRET_FILE, as for its nodes" % command
        )
    listed = "; ".join(map(_shown, found.values()))
    raise ConfigError("%s: %d jobs run on this host; name a process of one, or its p3 run: %s"
                      % (command, len(found), listed))  # fmt: skip


def _shown(env: Mapping[str, str]) -> str:
    """A process of a job, of whose processes it is a worker if there is one here."""
    words, where = "", ""
    with contextlib.suppress(OSError):  # it has ended
        with open("/proc/%s/cmdline" % env["pid"], "rb") as file:
            words = " ".join(os.fsdecode(file.read()).split("\0")).strip()
        where = os.readlink("/proc/%s/cwd" % env["pid"])
    return "--pid %s (%s, in %s)" % (env["pid"], words[:_SHOWN_CHARACTERS], where)


def _of(env: Dict[str, str]) -> Settings:
    needed = _OF_A_NODE | _SECRETS | _LOSSES | {"P3_TLS"}
    return Settings.from_env({name: value for name, value in env.items() if name in needed})


def _job(env: Mapping[str, str]) -> Tuple[str, str]:
    return env["DMLC_PS_ROOT_URI"], env["DMLC_PS_ROOT_PORT"]


def _environments(is_wanted: Callable[[int], bool]) -> List[Dict[str, str]]:
    """Of those processes of a job on this host that this user may look into; with their numbers as `pid`."""
    found = []
    for process in sorted(map(int, filter(str.isdigit, os.listdir("/proc")))):
        with contextlib.suppress(OSError):  # another user's, or it has ended
            if is_wanted(process):
                with open("/proc/%d/environ" % process, "rb") as file:
                    pairs = (item.partition("=") for item in os.fsdecode(file.read()).split("\0"))
                env = {name: value for name, _, value in pairs}
                if env.keys() >= _OF_A_NODE and env.keys() & _SECRETS:
                    found.append({**env, "pid": str(process)})
    return found


def _is_ours(process: int) -> bool:
    """Root may look into those of others, too, but means its own unless it names one."""
    return os.stat("/proc/%d" % process).st_uid == os.getuid()


def _parent(process: int) -> int:
    with open("/proc/%d/stat" % process) as file:
        return int(file.read().rpartition(")")[2].split()[1])
