"""What starts the processes of a job for `p3 run`, or the examiners of `p3 doctor`, and what it can do with each: the
seam below launch.py and doctor/hosts.py.

`Hosts` is this machine and others over ssh; ray_engine.py is a Ray cluster. The scheduler is always a process on this
host, which inherits its listening socket.
"""

from __future__ import annotations

import abc
import asyncio
import os
from typing import List, Mapping, Optional, Sequence

from p3.cluster.execute import Launched, how_ended, signal_group
from p3.cluster.node import address_as_set, address_towards
from p3.cluster.placement import Host, Task, local_command, local_environment, place, remote_command
from p3.errors import ConfigError
from p3.settings import Settings


class Process(abc.ABC):
    """A started process, wherever it runs. All methods belong to the event loop."""

    stdout: asyncio.StreamReader
    stderr: asyncio.StreamReader

    @property
    @abc.abstractmethod
    def returncode(self) -> Optional[int]:
        """None while it runs; -N if signal N has ended it and that is known."""

    @abc.abstractmethod
    async def wait(self) -> None:
        """Returns when it has ended."""

    @abc.abstractmethod
    def signal(self, number: int) -> None:
        """To it and what it has started, also when it has ended. Returns at once."""

    def how(self) -> str:
        """How it ended, in words."""
        return how_ended(self.returncode)


class Engine(abc.ABC):
    """Where the servers and workers of one job run. All methods belong to the event loop."""

    root: str  # the address of this host that all nodes reach

    @abc.abstractmethod
    async def place(self, num_workers: int, num_servers: int) -> List[Task]:
        """Says what runs where, and takes what is needed for that; called once. ConfigError if it cannot be had."""

    @abc.abstractmethod
    async def start(self, task: Task, job: Mapping[str, str], secret: str, command: Sequence[str]) -> Process:
        """Starts one of those, or starts it again. `job`: variables of all processes. ConfigError if it cannot."""

    @abc.abstractmethod
    async def release(self) -> None:
        """Gives back what place() took, however far it came. Called last."""


class Hosts(Engine):
    """This machine, and others over ssh."""

    def __init__(self, settings: Settings, hosts: Sequence[Host]) -> None:
        """ConfigError if this host's address cannot be found."""
        self._settings, self._hosts = settings, hosts
        self.root = root_address(settings, hosts)

    async def place(self, num_workers: int, num_servers: int) -> List[Task]:
        return place(num_workers, num_servers, self._hosts)

    async def start(self, task: Task, job: Mapping[str, str], secret: str, command: Sequence[str]) -> Process:
        if task.host.is_local:
            return await start_here(task, job, secret, command)
        arguments = remote_command(task, job, os.environ, self._settings, os.getcwd(), command)
        child = await _spawn(task, arguments, stdin=asyncio.subprocess.PIPE)
        child.stdin.write(secret.encode() + b"\n")  # stays open: its end ends the remote process
        return Child(child)

    async def release(self) -> None:
        pass  # nothing was taken


class Child(Process):
    """A child of this process, which leads a group of its own; perhaps an ssh."""

    def __init__(self, child: asyncio.subprocess.Process) -> None:
        self._child = child
        self.stdout, self.stderr = child.stdout, child.stderr

    @property
    def returncode(self) -> Optional[int]:
        return self._child.returncode

    async def wait(self) -> None:
        await self._child.wait()

    def signal(self, number: int) -> None:
        if self._child.stdin is not None:
            self._child.stdin.close()  # ends what ssh runs on the other host
        signal_group(self._child.pid, number)


async def start_here(
    task: Task, job: Mapping[str, str], secret: str, command: Sequence[str], **descriptors: int
) -> Process:
    """`descriptors`: fields of Launched, which the process inherits. ConfigError if it cannot be started."""
    arguments = local_command(Launched(os.getpid(), **descriptors), command)
    env = local_environment(task, job, secret, os.environ)
    passed = tuple(descriptors.values())
    return Child(await _spawn(task, arguments, env=env, pass_fds=passed, stdin=asyncio.subprocess.DEVNULL))


async def _spawn(task: Task, arguments: Sequence[str], **how) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    try:
        return await asyncio.create_subprocess_exec(*arguments, stdout=pipe, stderr=pipe, start_new_session=True, **how)
    except OSError as error:
        raise ConfigError("cannot start %s: %s: %s" % (task.name, arguments[0], error.strerror)) from None


def root_address(settings: Settings, hosts: Sequence[Host]) -> str:
    """The address of this host that all others reach. ConfigError if it cannot be found."""
    remotes = [host for host in hosts if not host.is_local]
    if not remotes:
        return "127.0.0.1"
    address = address_as_set(settings)
    if address is not None:
        return address
    for remote in remotes:  # one whose name does not resolve says nothing; who tries to reach it will say so
        address = address_towards(remote.name.rpartition("@")[2])
        if address is not None:
            return address
    raise ConfigError(
        "cannot tell which address of this host %s reaches. Set DMLC_NODE_HOST to it." % remotes[0].name
    )
