"""How what rank 0 says reaches the other processes of a job.

A channel that only this user can read is `private`: then rank 0 makes the secret up, too, and says it there. A file of
mode 0600 is private; torch's store, which answers whoever asks, is not (see torch_store.py).
"""

from __future__ import annotations

import abc
import contextlib
import errno
import os
import secrets
import stat
import time
from typing import Optional

from p3.errors import ConfigError, RendezvousError
from p3.launch.launchers.place import Place
from p3.settings import Settings

_LOOK_S = 0.1  # from one look for a file to the next


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
