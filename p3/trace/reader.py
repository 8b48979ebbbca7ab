"""Reads what the processes of one job have recorded. Nothing in the files is trusted: ConfigError names what is wrong.

    for process in read("trace"):
        process.label, process.boot, process.keys      # "worker 0 (10.0.0.5)", ..., {3: Key(...)}
        process.events                                 # a structured array of EVENT, in the order of time
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Dict, List, NamedTuple, Tuple

import numpy as np

from p3.errors import ConfigError
from p3.trace.recording import EVENTS_SUFFIX, PROCESS_SUFFIX, VERSION

MAGIC = b"P3trace1"

# include/p3/trace.h: TraceEvent
EVENT = np.dtype(
    [
        ("time_ns", "<i8"),
        ("key", "<u4"),
        ("slice", "<u4"),
        ("round", "<u4"),
        ("bytes", "<u4"),
        ("priority", "<i4"),
        ("peer", "<i2"),
        ("kind", "u1"),
        ("frame", "u1"),
    ]
)

# TraceKind
(
    READY, QUEUED, SEND_BEGIN, SEND_END, RECEIVE_BEGIN, RECEIVE_END, SUMMED, UPDATED, STALL_BEGIN, STALL_END, END
) = range(1, 12)  # fmt: skip
NO_PEER = -1


def local_peer(rank):
    """A peer that is another worker, of the same machine or group; and of that, its rank."""
    return -2 - rank


# FrameKind, as far as rounds go
PUSH, VALUE, PUSH_ROWS, ROWS, CHANGE = 1, 3, 10, 11, 17


class Key(NamedTuple):
    store: int
    name: str
    shape: tuple
    dtype: str
    slices: int
    slice_elements: int
    servers: tuple  # of its plan; (): all
    row_elements: int  # 0: it is dense
    codec: dict  # of what is pushed, and of what comes back; {}: as it is
    value_codec: dict


class Process(NamedTuple):
    """One worker or server. `complete`: the recording was closed in order; else what it did last is missing."""

    path: Path
    role: str
    rank: int
    host: str
    pid: int
    boot: str
    wall_ns: int  # the two clocks at the same moment
    monotonic_ns: int
    groups: Tuple[int, ...]  # the sizes of P3_GROUPS
    keys: Dict[int, Key]
    events: np.ndarray
    complete: bool

    @property
    def label(self) -> str:
        return "%s %d (%s)" % (self.role, self.rank, self.host)


def read(folder: str) -> List[Process]:
    """All processes of a directory: workers by rank, then servers by rank."""
    paths = sorted(Path(folder).glob("*" + PROCESS_SUFFIX))
    if not paths:
        raise ConfigError(
            "%s holds no trace: run the job with P3_TRACE=%s in its environment, and bring the files of all its hosts "
            "together here" % (folder, folder)
        )
    processes = sorted((_read(path) for path in paths), key=lambda one: (one.role != "worker", one.rank))
    for one, next_one in zip(processes, processes[1:]):
        if (one.role, one.rank) == (next_one.role, next_one.rank):
            raise ConfigError(
                "%s holds two traces of %s %d (%s and %s): several jobs wrote there, or another process took its "
                "place. Move the files of one elsewhere."
                % (folder, one.role, one.rank, one.path.name, next_one.path.name)
            )
    return processes


def _read(path: Path) -> Process:
    lines = _lines(path)
    try:
        head = lines[0]
        if (head["kind"], head["version"]) != ("process", VERSION):
            raise ConfigError("%s is of another version of P3 (%r)" % (path, head["version"]))
        if head["role"] not in ("worker", "server"):
            raise ValueError("role")
        keys = {
            int(line["key"]): Key(
                int(line["store"]), str(line["name"]), tuple(map(int, line["shape"])), str(line["dtype"]),
                int(line["slices"]), int(line["slice_elements"]), tuple(map(int, line["servers"])),
                int(line["row_elements"]), dict(line["codec"]), dict(line["value_codec"]),
            )
            for line in lines[1:]
        }  # fmt: skip
        fields = {name: int(head[name]) for name in ("rank", "pid", "wall_ns", "monotonic_ns")}
        events = _events(path.with_name(path.name[: -len(PROCESS_SUFFIX)] + EVENTS_SUFFIX))
        complete = bool(len(events) and (events["kind"] == END).any())
        events = events[events["kind"] != END]
        events = events[np.argsort(events["time_ns"], kind="stable")]
        return Process(
            path=path, role=head["role"], host=str(head["host"]), boot=str(head["boot"]), keys=keys, events=events,
            complete=complete, groups=tuple(map(int, head["groups"])), **fields,
        )  # fmt: skip
    except (KeyError, IndexError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError("%s is damaged or not a file of P3_TRACE (%s)" % (path, error)) from None


def _lines(path: Path) -> List[dict]:
    """A last line without its end is that of a process which was killed as it wrote it."""
    try:
        text = path.read_text(encoding="utf-8")
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    except (OSError, ValueError) as error:
        raise ConfigError("%s cannot be read: %s" % (path, error)) from None


def _events(path: Path) -> np.ndarray:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError("%s cannot be read: %s" % (path, error.strerror)) from None
    if content[: len(MAGIC)] != MAGIC:
        raise ConfigError("%s is damaged or not a file of P3_TRACE: it does not begin with %s" % (path, MAGIC.decode()))
    whole = (len(content) - len(MAGIC)) // EVENT.itemsize  # a killed process may leave a part of one
    events = np.frombuffer(content, EVENT, whole, len(MAGIC)).copy()
    if ((events["kind"] < READY) | (events["kind"] > END)).any():
        first = int(np.argmax((events["kind"] < READY) | (events["kind"] > END)))
        raise ConfigError("%s is damaged: event %d is of an unknown kind" % (path, first))
    return events
