"""What starts the processes of a job for `p3 run`, or the examiners of `p3 doctor`, and what it can do with each: the
seam below run.py and doctor/hosts.py.

`Hosts` is this machine and others over ssh; ray/engine.py is a Ray cluster. The scheduler is always a process on this
host, which inherits its listening socket.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import os
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from p3.cluster.node import address_as_set, address_towards, is_loopback, loopback
from p3.errors import ConfigError
from p3.launch.execute import ALIVE, Launched, how_ended, signal_group
from p3.launch.placement import (
    LOGGED_IN, Host, Task, local_command, local_environment, place, remote_command
)  # fmt: skip
from p3.settings import Settings

# sshd drops some of more than 10 connections that have not logged in yet (MaxStartups 10:30:100).
_LOGINS_AT_ONCE = 5
# From here to a process on another host, which ends P3_WAIT_TIMEOUT_S after the last of them.
_LIFE_SIGN_S = 5.0
_LIFE_SIGNS = 10  # in that time, at least
_MOST_BEFORE_LOGIN = 1 << 16  # bytes that ssh and a shell may say
_READ_AHEAD = 1 << 16  # of a process's output; as much again may wait in the pipe


class Process(abc.ABC):
    """A started process, wherever it runs. All methods belong to the event loop."""

    stdout: asyncio.StreamReader
    stderr: Union[asyncio.StreamReader, AfterLogin]  # of which read() is called

    @property
    @abc.abstractmethod
    def returncode(self) -> Optional[int]:
        """None while it runs; -N if signal N has ended it and that is known."""

    @property
    def has_begun(self) -> bool:
        """Whether its host was reached; until then it may wait for one that does not answer."""
        return True

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
        self._logins: Dict[str, asyncio.Semaphore] = {}  # by host: how many more may begin now

    async def place(self, num_workers: int, num_servers: int) -> List[Task]:
        return place(num_workers, num_servers, self._hosts)

    async def start(self, task: Task, job: Mapping[str, str], secret: str, command: Sequence[str]) -> Process:
        if task.host.is_local:
            return await start_here(task, job, secret, command)
        arguments = remote_command(task, job, os.environ, self._settings, os.getcwd(), command)
        logins = self._logins.setdefault(task.host.address, asyncio.Semaphore(_LOGINS_AT_ONCE))
        with contextlib.suppress(asyncio.TimeoutError):  # of a host that does not answer
            await asyncio.wait_for(logins.acquire(), self._settings.timeout_s)
        try:
            child, ended = await _spawn(task, arguments, stdin=asyncio.subprocess.PIPE)
        except ConfigError:
            logins.release()
            raise
        child.stdin.write(os.fsencode(secret) + b"\n")  # stays open: its end ends the remote process
        process = Child(child, ended)
        process.prove_life(min(_LIFE_SIGN_S, self._settings.wait_timeout_s / _LIFE_SIGNS))
        process.stderr = AfterLogin(child.stderr, logins.release)
        return process

    async def release(self) -> None:
        pass  # nothing was taken


class AfterLogin:
    """Standard error of an ssh, without the line by which the other host says that it has logged in."""

    def __init__(self, reader: asyncio.StreamReader, logged_in: Callable[[], None]) -> None:
        """`logged_in` is called once: then, or when the ssh has ended."""
        self._reader, self._logged_in = reader, logged_in
        self._said: Optional[bytes] = b""  # until then

    @property
    def is_over(self) -> bool:
        return self._said is None

    async def read(self, count: int) -> bytes:
        mark = LOGGED_IN.encode() + b"\n"
        while self._said is not None:
            data = await self._reader.read(count)
            self._said += data
            if not data or mark in self._said or len(self._said) > _MOST_BEFORE_LOGIN:
                self._logged_in()
                said, self._said = self._said.replace(mark, b"", 1), None
                if said or not data:
                    return said
        return await self._reader.read(count)


class Child(Process):
    """A child of this process, which leads a group of its own; perhaps an ssh."""

    def __init__(self, child: asyncio.subprocess.Process, ended: asyncio.Future) -> None:
        self._child, self._ended = child, ended
        self.stdout, self.stderr = child.stdout, child.stderr
        self._proving_life: Optional[asyncio.Task] = None

    def prove_life(self, pause_s: float) -> None:
        """Has ssh tell the other side every `pause_s` that we are still here."""

        async def prove() -> None:
            while self._child.returncode is None and not self._child.stdin.is_closing():
                self._child.stdin.write(ALIVE)
                await asyncio.sleep(pause_s)

        self._proving_life = asyncio.ensure_future(prove())

    @property
    def returncode(self) -> Optional[int]:
        return self._child.returncode

    @property
    def has_begun(self) -> bool:
        return not isinstance(self.stderr, AfterLogin) or self.stderr.is_over

    async def wait(self) -> None:
        await asyncio.wait({self._ended})

    def signal(self, number: int) -> None:
        if self._child.stdin is not None:
            self._child.stdin.close()  # ends what ssh runs on the other host
        signal_group(self._child.pid, number)


async def start_here(
    task: Task, job: Mapping[str, str], secret: str, command: Sequence[str], **descriptors: int
) -> Process:
    """`descriptors`: fields of Launched, which the process inherits. ConfigError if it cannot be started."""
    arguments = local_command(task, Launched(os.getpid(), **descriptors), command)
    env = local_environment(task, job, secret, os.environ)
    passed = tuple(descriptors.values())
    return Child(*await _spawn(task, arguments, env=env, pass_fds=passed, stdin=asyncio.subprocess.DEVNULL))


class _TellingItsEnd(asyncio.subprocess.SubprocessStreamProtocol):
    """`ended` is done when the process has ended. Python 3.11 to 3.13's wait() waits for the end of its output, too,
    which a process that it has left behind may hold open for ever."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(limit=_READ_AHEAD, loop=loop)
        self.ended = loop.create_future()

    def process_exited(self) -> None:
        super().process_exited()
        self.ended.set_result(None)


async def _spawn(
    task: Task, arguments: Sequence[str], **how
) -> Tuple[asyncio.subprocess.Process, asyncio.Future]:
    """The process, and a future that is done when it has ended."""
    pipe, loop = asyncio.subprocess.PIPE, asyncio.get_running_loop()
    try:
        transport, protocol = await loop.subprocess_exec(
            _TellingItsEnd, *arguments, stdout=pipe, stderr=pipe, start_new_session=True, **how
        )
    except OSError as error:
        raise ConfigError("cannot start %s: %s: %s" % (task.name, arguments[0], error.strerror)) from None
    return asyncio.subprocess.Process(transport, protocol, loop), protocol.ended


def root_address(settings: Settings, hosts: Sequence[Host]) -> str:
    """The address of this host that all others reach. ConfigError if it cannot be found."""
    remotes = [host for host in hosts if not host.is_local]
    if not remotes:
        return loopback()
    address = address_as_set(settings)
    if address is not None:
        return address
    # One whose name does not resolve says nothing; who tries to reach it will say so. One that is this host, by its own
    # name, may say its loopback, which counts if no other says more.
    towards = (address_towards(remote.address) for remote in remotes)
    for address in sorted(filter(None, towards), key=is_loopback):
        return address
    raise ConfigError(
        "cannot tell which address of this host %s reaches. Set DMLC_NODE_HOST to it." % remotes[0].name
    )
