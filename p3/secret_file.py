"""Reads the file that holds a job's secret, if nobody else can.

Either its mode gives it to its owner alone. Or it lies where a container's runtime puts secrets, on a file system in
memory that is mounted read-only: Docker gives its files 0444, Kubernetes 0644 or, with an fsGroup, 0440, and neither
lets the mode be what it should be for any user. There only the container's own processes reach it.
"""

from __future__ import annotations

import os
import stat

from p3.errors import ConfigError

_MAX_BYTES = 1 << 16
_IN_MEMORY = ("tmpfs", "ramfs")


def read(path: str) -> bytes:
    """Its content, without white space around it. ConfigError that says what to do if the file cannot serve."""
    try:
        with open(path, "rb") as file:
            descriptor = file.fileno()
            mode = os.fstat(descriptor).st_mode
            if mode & 0o077 and (mode & 0o022 or not _is_containers_own(descriptor)):
                _refuse(path, stat.S_IMODE(mode))
            return file.read(_MAX_BYTES).strip()
    except OSError as error:
        raise ConfigError("P3_SECRET_FILE=%r cannot be read: %s" % (path, error.strerror)) from None


def _refuse(path: str, mode: int) -> None:
    raise ConfigError(
        "P3_SECRET_FILE=%r can be read by others: its mode is %04o, and it is not on a read-only tmpfs, where "
        "Kubernetes and Docker mount secrets. Run: chmod 600 %s" % (path, mode, path)
    )


def _is_containers_own(descriptor: int) -> bool:
    if not os.fstatvfs(descriptor).f_flag & os.ST_RDONLY:  # of this mount; the file system itself is writable outside
        return False
    device = os.fstat(descriptor).st_dev
    number = "%d:%d" % (os.major(device), os.minor(device))
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
        for mount in mounts:
            before, _, after = mount.partition(" - ")
            if before.split()[2] == number:
                return after.split()[0] in _IN_MEMORY
    return False
