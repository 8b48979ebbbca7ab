"""Which process of a job runs where, and how it is started there. Pure functions; engines.py starts them."""

from __future__ import annotations

import os
import re
import shlex
import sys
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from p3.cluster.node import is_numeric
from p3.errors import ConfigError
from p3.launch import dying_with
from p3.launch.execute import Launched, p3_exec, worker_environment
from p3.settings import Settings

_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")

# Of the launcher's environment, what processes on other hosts get too; the rest belongs to this host.
_FORWARDED_PREFIXES = ("P3_", "MXNET_", "OMP_", "MKL_", "CUDA_VISIBLE_DEVICES", "PYTHONPATH", "DMLC_INTERFACE")
_NEVER_FORWARDED = ("P3_SECRET", "P3_SECRET_FILE", "P3_SSH")


LOGGED_IN = "p3: logged in"  # the first line of standard error of what runs on another host; Hosts keeps it to itself


class Host(NamedTuple):
    name: str
    slots: Optional[int] = None  # workers it takes, at most

    @property
    def is_local(self) -> bool:
        return self.name in _LOCAL_NAMES

    @property
    def address(self) -> str:
        """Its name, without the user that ssh is to be."""
        return self.name.rpartition("@")[2]


Place = Tuple[str, int]  # in a job: role and rank, whichever process has it


class Task(NamedTuple):
    """One process to start."""

    role: str
    rank: int
    host: Host
    env: Dict[str, str]  # what this process needs beyond the common environment; no secret

    @property
    def name(self) -> str:
        return self.role if self.role == "scheduler" else "%s %d" % (self.role, self.rank)

    @property
    def place(self) -> Place:
        return self.role, self.rank


def read_hostfile(path: str) -> List[Host]:
    """Lines `[user@]host [slots=N]`, where host is a name or an address, of IPv6 also in brackets; # starts a comment.
    ConfigError names the file and the line."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--hostfile %s cannot be read: %s" % (path, error)) from None
    hosts: List[Host] = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        host = Host(re.sub(r"\[([\da-fA-F:.%\w]+)\]$", r"\1", words[0]))
        if words[1:]:
            name, _, count = words[1].partition("=")
            if len(words) > 2 or name != "slots" or not count.isdigit() or int(count) < 1:
                raise ConfigError("%s, line %d: %r is not `host [slots=N]`" % (path, number, line.strip()))
            host = host._replace(slots=int(count))
        if not _is_host(host.address) or host.name.startswith("-"):  # ssh would take that for an option
            raise ConfigError(
                "%s, line %d: %r is not a host: write `name slots=N`; P3_SSH says the port" % (path, number, words[0])
            )
        if any(other.address.lower() == host.address.lower() for other in hosts):
            raise ConfigError("%s, line %d: host %s is listed twice" % (path, number, host.address))
        hosts.append(host)
    if not hosts:
        raise ConfigError("--hostfile %s names no host" % path)
    return hosts


def _is_host(name: str) -> bool:
    return is_numeric(name) if ":" in name else name != "" and not set(name) & set("[]/=")


def place(num_workers: int, num_servers: int, hosts: Sequence[Host]) -> List[Task]:
    """Workers and servers, each round robin over the hosts; a host takes at most its slots of workers."""
    taken: Dict[Host, int] = dict.fromkeys(hosts, 0)
    worker_hosts: List[Host] = []
    while len(worker_hosts) < num_workers:
        free = [host for host in hosts if host.slots is None or taken[host] < host.slots]
        if not free:
            raise ConfigError("the hosts have %d slots; %d workers do not fit" % (len(worker_hosts), num_workers))
        for host in free[: num_workers - len(worker_hosts)]:
            taken[host] += 1
            worker_hosts.append(host)
    return tasks_on([hosts[rank % len(hosts)] for rank in range(num_servers)], worker_hosts)


def tasks_on(server_hosts: Sequence[Host], worker_hosts: Sequence[Host]) -> List[Task]:
    """Servers and workers on these hosts, in the order of their ranks."""
    tasks = []
    for rank, host in enumerate(server_hosts):
        tasks.append(Task("server", rank, host, {"DMLC_ROLE": "server", "P3_RANK": str(rank)}))
    for rank, host in enumerate(worker_hosts):
        env = {"P3_LOCAL_RANK": str(worker_hosts[:rank].count(host)), "P3_LOCAL_SIZE": str(worker_hosts.count(host))}
        tasks.append(Task("worker", rank, host, {"DMLC_ROLE": "worker", "P3_RANK": str(rank), **env}))
    return tasks


def local_environment(task: Task, job: Mapping[str, str], secret: str, own: Mapping[str, str]) -> Dict[str, str]:
    """The whole environment of a process on this host. `job` is what all processes get, `own` is os.environ."""
    said = {"P3_SECRET": secret, "PYTHONUNBUFFERED": own.get("PYTHONUNBUFFERED", "1")}
    env = {**own, **job, **task.env, **said, **module_path(own)}
    env.pop("P3_SECRET_FILE", None)
    return worker_environment(env) if task.role == "worker" else env


def local_command(task: Task, launched: Launched, command: Sequence[str]) -> List[str]:
    if task.role == "worker":  # all else that `p3 exec` does for one has been done here, for all of them
        return [sys.executable, "-S", dying_with.__file__, str(launched.launcher_pid), *command]
    return [sys.executable, *p3_exec(*launched.options(), "--", *command)]


def remote_command(
    task: Task,
    job: Mapping[str, str],
    own: Mapping[str, str],
    settings: Settings,
    directory: str,
    command: Sequence[str],
) -> List[str]:
    """The ssh command line for a process on another host; the secret follows on its standard input."""
    env = {"PYTHONUNBUFFERED": "1", **forwarded_environment(own), **job, **task.env}
    logged_in = ["sh", "-c", 'echo "$0" >&2; exec "$@"', LOGGED_IN]
    options = ["--secret-stdin", "--silence=%g" % settings.wait_timeout_s]
    words = [*logged_in, sys.executable, *p3_exec(*options, "--", *command)]
    return ssh_command(settings, task.host.name, env, directory, words)


def forwarded_environment(own: Mapping[str, str]) -> Dict[str, str]:
    """What processes on other hosts get of the launcher's environment; no secret."""
    env = {
        name: value
        for name, value in own.items()
        if name.startswith(_FORWARDED_PREFIXES) and name not in _NEVER_FORWARDED
    }
    return {**env, **module_path(own)}


def ssh_command(
    settings: Settings, host: str, env: Mapping[str, str], directory: str, words: Sequence[str], *options: str
) -> List[str]:
    """The argv that runs `words` on another host, in `directory` and with `env` added to the environment there."""
    words = ["env", *("%s=%s" % item for item in sorted(env.items())), *words]
    line = "cd %s && exec %s" % (shlex.quote(directory), " ".join(map(shlex.quote, words)))
    return [*shlex.split(settings.ssh), *options, host, line]


def module_path(own: Mapping[str, str]) -> Dict[str, str]:
    """PYTHONPATH, so that a process with the environment `own` finds p3 where this one has found it; {} if p3 is
    installed where Python looks by itself."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if os.path.basename(root) in ("site-packages", "dist-packages"):
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, [own.get("PYTHONPATH"), root]))}
