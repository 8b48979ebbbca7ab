"""What one worker or server writes while it runs with P3_TRACE=DIR: two files in DIR that grow and are never rewritten.

    ROLE-RANK-PID.p3trace        what happened to slices, written by the core (include/p3/trace.h)
    ROLE-RANK-PID.process.json   lines of JSON: who this is and how its clocks stand, then one line for each key
"""

from __future__ import annotations

import json
import logging
import os
import time
from typing import Optional, Sequence

from p3.cluster.node import Node
from p3.errors import ConfigError
from p3.plan.key_plan import KeyPlan
from p3.settings import Settings

log = logging.getLogger("p3.trace")

VERSION = 3
PROCESS_SUFFIX, EVENTS_SUFFIX = ".process.json", ".p3trace"


class Recording:
    """`fd` belongs to the core, once it was given it. note_key() may be called from any thread."""

    def __init__(self, folder: str, node: Node, groups: Sequence[int]) -> None:
        """`groups`: the sizes of P3_GROUPS. ConfigError if the files cannot be made."""
        path = os.path.join(os.path.abspath(folder), "%s-%d-%d" % (node.role, node.rank, os.getpid()))
        try:
            os.makedirs(folder, exist_ok=True)
            open(path + PROCESS_SUFFIX, "x").close()
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self.fd = os.open(path + EVENTS_SUFFIX, flags, 0o666)
        except OSError as error:
            raise ConfigError(
                "%s: P3_TRACE=%r: cannot write %s: %s. Name a new directory, on each host, that this user may write."
                % (node, folder, error.filename, error.strerror)
            ) from None
        self._path = path
        self._write(
            kind="process",
            version=VERSION,
            role=node.role,
            rank=node.rank,
            host=node.host,
            pid=os.getpid(),
            boot=boot_id(),
            wall_ns=time.time_ns(),
            monotonic_ns=time.monotonic_ns(),
            groups=list(groups),
        )

    @classmethod
    def of(cls, settings: Settings, node: Node) -> Optional[Recording]:
        """None where P3_TRACE is unset."""
        return None if settings.trace is None else cls(settings.trace, node, settings.group_sizes)

    def discard(self) -> None:
        """Of a core that was never started, and is gone: another one may be the same node."""
        for suffix in (PROCESS_SUFFIX, EVENTS_SUFFIX):
            os.unlink(self._path + suffix)

    def note_key(self, store: int, name, shape, dtype: str, plan: KeyPlan) -> None:
        """A full disk costs the key its name in the report, and the job nothing."""
        try:
            self._write(
                kind="key", key=plan.wire_key, store=store, name=str(name), shape=list(shape), dtype=dtype,
                slices=plan.slices, slice_elements=plan.slice_elements, servers=list(plan.servers),
                row_elements=plan.row_elements, codec=dict(plan.codec), value_codec=dict(plan.value_codec),
            )  # fmt: skip
        except OSError as error:
            log.warning("%s: key %r is not recorded: %s", self._path + PROCESS_SUFFIX, name, error.strerror)

    def _write(self, **fields) -> None:
        """Opened for each line: there are few, and nothing is left to close, here or in a forked child."""
        with open(self._path + PROCESS_SUFFIX, "a") as file:
            file.write(json.dumps(fields) + "\n")


def fd_of(recording: Optional[Recording]) -> int:
    """What the core is given: -1 for nothing."""
    return -1 if recording is None else recording.fd


def boot_id() -> str:
    """Equal on processes that share CLOCK_MONOTONIC."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return os.urandom(16).hex()
