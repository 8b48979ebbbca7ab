"""The life of each slice, put together from what the processes have recorded; all times in seconds on one clock.

    trace = load("trace")
    trace.lives            # a structured array: one row for each worker, key, slice and round that the worker pushed
    trace.lives["landed"]  # NaN where it is not known, because a process was killed, say

The moments of a life, in their order (`sent` and `returned` may be later than the moment that follows, by the time that
a process takes to look at its clock):

    ready      the gradient is there, the worker's core was given it
    queued     a frame waits in the worker's queue
    leaving    it is taken off the queue; nothing overtakes it any more
    sent       its last byte is in the worker's socket or ring
    arriving   the server has read its header
    received   the server has read its last byte
    summed     the server has added it, or put it aside until lower ranks have come
    complete   the last worker's is summed: that of `last_worker`; with staleness, it need wait no longer
    updated    the new value is there, and no send of the last one borrows it any more
    broadcast  the value waits in the server's queue for this worker
    returning  it is taken off the queue
    returned   its last byte is in the server's socket or ring
    landing    the worker has read its header
    landed     the worker has read its last byte

Of a key of rows, each partition is such a slice, whichever partitions the key has in that round. It may be several
frames each way: then queued, leaving, arriving, broadcast, returning and landing are moments of the first one, and
sent, received, summed, returned and landed of the last one. `bytes` are those of the push.

Where the workers of a machine, or of a group, add up their gradients, their leader stands for the server in the lives
of the others: `server` is then local_peer(its rank). The leader's own slice is queued once the others' are in.
"""

from __future__ import annotations

from typing import Dict, List, NamedTuple

import numpy as np

from p3.trace.clocks import Offset, offsets
from p3.trace.reader import (
    CHANGE, PUSH, PUSH_ROWS, QUEUED, READY, RECEIVE_BEGIN, RECEIVE_END, ROWS, SEND_BEGIN, SEND_END, STALL_BEGIN,
    STALL_END, SUMMED, UPDATED, VALUE, Key, Process, local_peer, read,
)  # fmt: skip

MOMENTS = (
    "ready", "queued", "leaving", "sent", "arriving", "received", "summed",
    "complete", "updated", "broadcast", "returning", "returned", "landing", "landed",
)  # fmt: skip

LIFE = np.dtype(
    [(name, "i8") for name in ("worker", "server", "key", "slice", "round", "bytes", "priority", "last_worker")]
    + [(name, "f8") for name in MOMENTS]
)


class Stall(NamedTuple):
    """The training thread of a worker waited for the value that a round of a key brings."""

    worker: int
    key: int
    round: int
    begin: float
    end: float


class Trace(NamedTuple):
    processes: List[Process]
    offsets: List[Offset]
    start_ns: int  # of the first event, on the first process's clock: time 0
    keys: Dict[int, Key]  # as first planned: one that got other partitions keeps its number here
    lives: np.ndarray  # sorted by round, worker, key, slice
    stalls: List[Stall]

    def seconds(self, process: int, time_ns) -> np.ndarray:
        """Times of that process on the common clock."""
        return (np.asarray(time_ns) + (self.offsets[process].ns - self.start_ns)) * 1e-9


def load(folder: str) -> Trace:
    """ConfigError if the directory holds no trace, a damaged one, or several."""
    processes = read(folder)
    found = offsets(processes)
    starts = [one.events["time_ns"][0] + offset.ns for one, offset in zip(processes, found) if len(one.events)]
    keys = _one_number_each(processes)
    trace = Trace(processes, found, int(min(starts, default=0)), keys, np.empty(0, LIFE), [])
    return trace._replace(lives=_lives(trace), stalls=_stalls(trace))


def _one_number_each(processes) -> Dict[int, Key]:
    """The keys by number. Events of a key that got other partitions, and so another number, are given its first one."""
    keys = {number: key for process in processes for number, key in process.keys.items()}
    first: Dict[tuple, int] = {}
    for number, key in sorted(keys.items()):
        first.setdefault((key.store, key.name), number)
    for number, key in keys.items():
        if first[key.store, key.name] != number:
            for process in processes:
                process.events["key"][process.events["key"] == number] = first[key.store, key.name]
    return {number: keys[number] for number in first.values()}


def _lives(trace: Trace) -> np.ndarray:
    lives = np.concatenate([_lives_of(trace, PUSH, VALUE, CHANGE), _lives_of(trace, PUSH_ROWS, ROWS)])
    lives.sort(order=["round", "worker", "key", "slice"])
    _complete(lives)
    return lives


def _lives_of(trace: Trace, push: int, *value: int) -> np.ndarray:
    sent = _moments(trace, QUEUED, [push], at_worker=True)
    names = np.column_stack([sent[name] for name in ("worker", "key", "slice", "round")]).astype("i8")
    _, first, numbers = np.unique(names, axis=0, return_index=True, return_inverse=True)
    lives = np.zeros(len(first), LIFE)
    for name in MOMENTS:
        lives[name] = np.nan
    lives["server"], lives["queued"] = sent["peer"][first], sent["time"][first]
    for name in ("worker", "key", "slice", "round", "priority"):
        lives[name] = sent[name][first]
    np.add.at(lives["bytes"], numbers.reshape(-1), sent["bytes"].astype("i8"))

    last = ROWS in value  # of several frames; a later kValue of a slice is a value set anew
    for name, at_worker, kind, frame, takes_last in (
        ("leaving", True, SEND_BEGIN, [push], False),
        ("sent", True, SEND_END, [push], last),
        ("arriving", False, RECEIVE_BEGIN, [push], False),
        ("received", False, RECEIVE_END, [push], last),
        ("summed", False, SUMMED, [push], last),
        ("broadcast", False, QUEUED, value, False),
        ("returning", False, SEND_BEGIN, value, False),
        ("returned", False, SEND_END, value, last),
        ("landing", True, RECEIVE_BEGIN, value, False),
        ("landed", True, RECEIVE_END, value, last),
    ):
        found = _moments(trace, kind, frame, at_worker)
        _fill(lives, name, found, ("worker", "key", "slice", "round"), takes_last)
    _fill(lives, "ready", _moments(trace, READY, [push], at_worker=True), ("worker", "key", "round"))
    _fill(lives, "updated", _moments(trace, UPDATED, value, at_worker=False), ("key", "slice", "round"))
    return lives


def _moments(trace, kind, frames, at_worker) -> Dict[str, np.ndarray]:
    """Columns of all events of that kind, in the order of time. `worker`: whose life they belong to. Recorded by that
    worker, or at the other end: by a server, or the leader of its machine or group."""
    parts = []
    for number, process in enumerate(trace.processes):
        events = process.events[(process.events["kind"] == kind) & np.isin(process.events["frame"], frames)]
        events = events[events["round"] > 0]  # round 0 is the first value
        if process.role == "server":
            events = events[:0] if at_worker else events
        elif not at_worker:
            events = events[(events["peer"] < -1) & (events["peer"] != local_peer(process.rank))]
        columns = {name: events[name].astype("i8") for name in ("key", "slice", "round", "bytes", "priority", "peer")}
        peers = columns["peer"]
        columns["worker"] = np.full(len(events), process.rank) if at_worker else np.where(peers < -1, -2 - peers, peers)
        columns["time"] = trace.seconds(number, events["time_ns"])
        parts.append(columns)
    names = ("key", "slice", "round", "bytes", "priority", "peer", "worker", "time")
    joined = {name: np.concatenate([part[name] for part in parts] or [np.empty(0)]) for name in names}
    order = np.argsort(joined["time"], kind="stable")
    return {name: column[order] for name, column in joined.items()}


def _fill(lives, name, found, by, takes_last=False) -> None:
    """Gives each life the first, or the last, of `found` that agrees with it in the columns `by`."""
    both = np.concatenate([np.column_stack([found[column] for column in by]),
                           np.column_stack([lives[column] for column in by])]).astype("i8")  # fmt: skip
    _, numbers = np.unique(both, axis=0, return_inverse=True)
    numbers = numbers.reshape(-1)
    theirs, ours = numbers[: len(found["time"])], numbers[len(found["time"]):]
    order = slice(None, None, 1 if takes_last else -1)
    times = np.full(numbers.max(initial=-1) + 1, np.nan)
    times[theirs[order]] = found["time"][order]  # of equals, the last assignment stays
    lives[name] = times[ours]


def _complete(lives) -> None:
    """When the last worker's push was summed, and whose it was. Unknown if one of them is. Of keys with staleness,
    whose pushes may be answered before that: when the slowest worker was near enough."""
    slices, numbers = np.unique(np.column_stack([lives["key"], lives["slice"], lives["round"]]), axis=0,
                                return_inverse=True)  # fmt: skip
    numbers = numbers.reshape(-1)
    order = np.argsort(np.nan_to_num(lives["summed"], nan=np.inf), kind="stable")
    last = np.zeros(len(slices), "i8")
    last[numbers[order]] = order  # the latest assignment stays
    lives["complete"], lives["last_worker"] = lives["summed"][last[numbers]], lives["worker"][last[numbers]]
    is_early = lives["broadcast"] < lives["complete"]
    lives["complete"][is_early] = lives["broadcast"][is_early]
    lives["updated"] = np.maximum(lives["updated"], lives["complete"])


def _stalls(trace) -> List[Stall]:
    stalls = []
    for number, process in enumerate(trace.processes):
        begin = None
        marks = process.events[np.isin(process.events["kind"], (STALL_BEGIN, STALL_END))]
        for mark, time in zip(marks, trace.seconds(number, marks["time_ns"]).tolist()):
            if mark["kind"] == STALL_BEGIN:
                begin = time
            elif begin is not None:
                stalls.append(Stall(process.rank, int(mark["key"]), int(mark["round"]), begin, time))
                begin = None
    return stalls
