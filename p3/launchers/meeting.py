"""Where the processes of a job meet: rank 0 says where its scheduler is, the others wait for that.

What it says goes through a channel. One that only this user can read is `private`: then rank 0 makes the secret up,
too, and says it there. A file of mode 0600 is private; torch's store, which answers whoever asks, is not (see
torchrun.py).
"""

from __future__ import annotations

import abc
import contextlib
import errno
import os
import secrets
import signal
import socket
import stat
import time
from typing import Dict, Iterator, Mapping, NamedTuple, Optional, Tuple

from p3.cluster.node import address_as_set, address_towards, is_loopback, listen_as_root, loopback
from p3.errors import ConfigError, RendezvousError
from p3.launchers.adapters import TORCHRUN
from p3.launchers.place import Place
from p3.settings import Settings

_LOOK_S = 0.1  # from one look for a file to the next
_ANYWHERE = ("192.0.2.1", "2001:db8::1")  # RFC 5737, RFC 3849: no host has them, so the route is the default one


class Channel(abc.ABC):
    private: bool
    place: Optional[Place] = None  # of this process, if that was found out through it

    @abc.abstractmethod
    def publish(self, text: str) -> None:
        """By rank 0, once. ConfigError if that cannot be."""

    @abc.abstractmethod
    def read(self, timeout_s: float) -> str:
        """What rank 0 has published. RendezvousError if it has not in that time."""

    @abc.abstractmethod
    def withdraw(self) -> None:
        """Nobody needs it any more. Idempotent; by rank 0."""


class FileChannel(Channel):
    """A file in a folder that all hosts of the job share and only this user can read."""

    private = True

    def __init__(self, folder: str, place: Place) -> None:
        self._folder, self._path = folder, os.path.join(folder, place.job)

    def publish(self, text: str) -> None:
        try:
            os.makedirs(self._folder, mode=0o700, exist_ok=True)
            _check(os.stat(self._folder), 0o022, self._folder)
            draft = "%s.%s" % (self._path, secrets.token_hex(4))
            write_private(draft, text)
            os.replace(draft, self._path)  # whole, or not there
        except OSError as error:
            raise ConfigError(
                "cannot write to %s (%s), where the processes of a job meet. Name a folder of yours that all "
                "its hosts share: --meeting-dir DIR" % (self._folder, error.strerror)
            ) from None

    def read(self, timeout_s: float) -> str:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                os.listdir(self._folder)  # has NFS look at the folder anew
                return read_private(self._path)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ESTALE):  # rank 0 has not written it yet
                    text = "cannot read %s, where the processes of a job meet: %s"
                    raise ConfigError(text % (self._path, error.strerror)) from None
            if time.monotonic() > deadline:
                raise RendezvousError(
                    "rank 0 has not written %s in %g s (P3_RENDEZVOUS_TIMEOUT_S). Is it started, and do all hosts "
                    "share that folder? If not, name one that they do: --meeting-dir DIR" % (self._path, timeout_s)
                )
            time.sleep(_LOOK_S)

    def withdraw(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._path)


class Known(Channel):
    """For jobs whose settings say all: where the scheduler is to be, and the secret."""

    private = False

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def publish(self, text: str) -> None:
        pass

    def read(self, timeout_s: float) -> str:
        return "%s %d" % (self._settings.root_host, self._settings.root_port)

    def withdraw(self) -> None:
        pass


class Met(NamedTuple):
    variables: Dict[str, str]  # for every node of the job that this process starts; the secret's among them
    listener: Optional[socket.socket]  # rank 0's, for the scheduler


@contextlib.contextmanager
def arrange(
    settings: Settings, place: Place, folder: str, env: Mapping[str, str]
) -> Iterator[Tuple[Channel, Place, str]]:
    """The channel of this job, the place of this process where that is known by now, and the address at which the
    others reach rank 0; what rank 0 has said is withdrawn at the end, also by SIGTERM. `folder`: for files, where
    nothing better is known. In the main thread. ConfigError if nobody would know the secret, or the address cannot be
    found; RendezvousError if torch's store cannot be reached."""
    channel = _channel(settings, place, folder, env)
    place = channel.place or place
    address = env["MASTER_ADDR"] if place.launcher == TORCHRUN.name else address_of_rank_0(settings, place)

    def leave(number: int, _frame: object) -> None:
        withdraw()
        signal.signal(number, before)
        os.kill(os.getpid(), number)  # which now does what it would have done

    def withdraw() -> None:
        if place.rank == 0:
            channel.withdraw()

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield channel, place, address
    finally:
        signal.signal(signal.SIGTERM, before)
        withdraw()


def _channel(settings: Settings, place: Place, folder: str, env: Mapping[str, str]) -> Channel:
    if place.launcher == TORCHRUN.name:
        from p3.torch.torchrun import StoreChannel  # imports torch

        return StoreChannel(settings, place, env)
    if settings.root_host is not None and settings.root_port is not None:
        settings.job_secret()
        return Known(settings)
    if not place.job:
        raise ConfigError("%s has no name for its jobs by which the processes could find each other. Set "
                          "DMLC_PS_ROOT_URI to rank 0's host, and DMLC_PS_ROOT_PORT to a free port there"
                          % place.launcher)  # fmt: skip
    return FileChannel(os.path.expanduser(folder), place)


def meet(settings: Settings, place: Place, channel: Channel, address: str) -> Met:
    """Blocks until rank 0 has said where it is. `address`: rank 0's, as the others reach it."""
    job = {"DMLC_NUM_WORKER": str(place.size), "DMLC_NUM_SERVER": str(place.machines)}
    if place.rank > 0:
        return Met({**job, **_parsed(channel.read(settings.rendezvous_timeout_s))}, None)
    secret = ""
    if settings.secret is None and settings.secret_file is None:
        if not channel.private:
            raise ConfigError("the job has no secret: set P3_SECRET or P3_SECRET_FILE to the same value on every host "
                              "before %s" % place.launcher)  # fmt: skip
        secret = secrets.token_hex(32)
    listener = listen_as_root(address, settings.root_port)
    said = "%s %d %s" % (address, listener.getsockname()[1], secret)
    if place.size > 1:
        channel.publish(said)
    return Met({**job, **_parsed(said)}, listener)


def address_of_rank_0(settings: Settings, place: Place) -> str:
    """At which the others reach this host. ConfigError if it cannot be found."""
    if settings.root_host is not None:
        return settings.root_host
    address = address_as_set(settings)
    if address is not None:
        return address
    if place.machines == 1:
        return loopback()
    for other in (place.gateway, socket.gethostname(), *_ANYWHERE):
        own = address_towards(other) if other else None
        if own is not None and not is_loopback(own):
            return own
    raise ConfigError("cannot tell which address of this host the others reach. Set DMLC_INTERFACE or "
                      "DMLC_NODE_HOST")  # fmt: skip


def _parsed(said: str) -> Dict[str, str]:
    try:
        host, port, *secret = said.split()
        variables = {"DMLC_PS_ROOT_URI": host, "DMLC_PS_ROOT_PORT": str(int(port))}
    except ValueError:
        raise RendezvousError("cannot understand what rank 0 said: do all hosts have the same version of P3?") from None
    return {**variables, "P3_SECRET": secret[0]} if secret else variables


def write_private(path: str, text: str) -> None:
    """A new file that no other user can read, not even for a moment."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        file.write(text)


def read_private(path: str) -> str:
    """OSError as open() has it; ConfigError if another user could have written it, or could read it."""
    with open(path, encoding="ascii") as file:
        _check(os.fstat(file.fileno()), 0o077, path)
        return file.read()


def _check(found: os.stat_result, forbidden: int, path: str) -> None:
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & forbidden:
        raise ConfigError("%s belongs to another user, or others have access to it. Name a folder of yours: "
                          "--meeting-dir DIR" % path)  # fmt: skip
