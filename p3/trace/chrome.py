"""A trace as a Chrome trace file (Trace Event Format, JSON), which https://ui.perfetto.dev opens.

Processes are nodes. Threads are what happens one after the other there: what leaves to each peer, what arrives from
it, the waits of the forward pass, sums and updates. A key's round is an asynchronous bar from its ready gradient to its
last landed slice. Arrows lead a slice from sender to receiver, as long as there are few enough to look at. The bars of
partitions that take several frames may overlap with those of more urgent slices.
"""

from __future__ import annotations

import json
from typing import Iterable, Iterator

import numpy as np

from p3.trace.lives import Trace
from p3.trace.reader import local_peer

MAX_ARROWS = 20000

_MAIN = 0  # thread: waits of a worker, sums and updates of a server; then two for each peer


def write(trace: Trace, path: str) -> int:
    """Returns the number of events. OSError as open() gives it."""
    return write_events(events(trace), path)


def write_events(made: Iterable[dict], path: str) -> int:
    """The same for events made by others."""
    count = 0
    with open(path, "w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        for count, event in enumerate(made, 1):
            file.write(("\n" if count == 1 else ",\n") + json.dumps(event))
        file.write("\n]}\n")
    return count


def events(trace: Trace) -> Iterator[dict]:
    """One by one; times in microseconds."""
    number_of = {(process.role, process.rank): number for number, process in enumerate(trace.processes)}
    peers = {node: set() for node in number_of}
    for worker, server in np.unique(np.column_stack([trace.lives["worker"], trace.lives["server"]]), axis=0).tolist():
        for node, peer in ((("worker", worker), server), _other_end(worker, server)):
            if node in peers:
                peers[node].add(peer)
    for number, process in enumerate(trace.processes):
        yield meta("process_name", number, 0, name=process.label)
        yield meta("process_sort_index", number, 0, sort_index=number)
        is_worker = process.role == "worker"
        yield meta("thread_name", number, _MAIN, name="forward waits" if is_worker else "sums and updates")
        for peer in sorted(peers[process.role, process.rank]):
            name = "server %d" % peer if is_worker and peer >= 0 else "worker %d" % max(peer, local_peer(peer))
            yield meta("thread_name", number, _to(peer), name="to " + name)
            yield meta("thread_name", number, _from(peer), name="from " + name)

    with_arrows = 2 * len(trace.lives) <= MAX_ARROWS
    for arrow, life in enumerate(trace.lives, 1):
        worker = number_of.get(("worker", int(life["worker"])))
        node, peer = _other_end(int(life["worker"]), int(life["server"]))
        server = number_of.get(node)
        yield from _way(trace, life, 2 * arrow * with_arrows, "push", (worker, _to(life["server"]), "leaving", "sent"),
                        (server, _from(peer), "arriving", "received"))  # fmt: skip
        yield from _way(trace, life, (2 * arrow + 1) * with_arrows, "value",
                        (server, _to(peer), "returning", "returned"),
                        (worker, _from(life["server"]), "landing", "landed"))  # fmt: skip
        if server is not None and np.isfinite(life["summed"]):
            yield _instant(trace, life, "sum of worker %d" % life["worker"], server, life["summed"])
        if server is not None and np.isfinite(life["updated"]) and life["worker"] == life["last_worker"]:
            yield _instant(trace, life, "update", server, life["updated"])

    yield from _rounds(trace, number_of)
    for stall in trace.stalls:
        name = "waits for " + _key_name(trace, stall.key)
        yield _bar(name, "stall", number_of["worker", stall.worker], _MAIN, stall.begin, stall.end, round=stall.round)


def _way(trace, life, arrow, category, sender, receiver) -> Iterator[dict]:
    """A slice as it leaves one process and arrives at another, of which either may be unknown."""
    name = "%s [%d]" % (_key_name(trace, life["key"]), life["slice"])
    details = {column: int(life[column]) for column in ("round", "bytes", "priority")}
    known = []
    for process, thread, begin, end in (sender, receiver):
        if process is None or not np.isfinite(life[begin]) or not np.isfinite(life[end]):
            continue
        known.append((process, thread, life[begin]))
        yield _bar(name, category, process, thread, life[begin], life[end], **details)
    if arrow and len(known) == 2:
        for (process, thread, time), phase in zip(known, "sf"):
            event = {"ph": phase, "id": arrow, "name": name, "cat": category, "pid": process, "tid": thread,
                     "ts": _us(time)}  # fmt: skip
            yield dict(event, bp="e") if phase == "f" else event


def _rounds(trace, number_of) -> Iterator[dict]:
    lives = trace.lives[np.isfinite(trace.lives["ready"])]
    groups, first, numbers = np.unique(
        np.column_stack([lives["worker"], lives["key"], lives["round"]]), axis=0, return_index=True, return_inverse=True
    )
    landed = np.full(len(groups), -np.inf)
    np.maximum.at(landed, numbers.reshape(-1), np.nan_to_num(lives["landed"], nan=np.inf))
    for (worker, key, round_number), ready, end in zip(groups.tolist(), lives["ready"][first], landed):
        if not np.isfinite(end):
            continue
        common = {"cat": "round", "name": _key_name(trace, key), "id": key, "pid": number_of["worker", worker],
                  "tid": _MAIN}  # fmt: skip
        yield dict(common, ph="b", ts=_us(ready), args={"round": round_number})
        yield dict(common, ph="e", ts=_us(end))


def _instant(trace, life, what, process, time) -> dict:
    name = "%s: %s [%d]" % (what, _key_name(trace, life["key"]), life["slice"])
    return {"ph": "i", "s": "t", "name": name, "cat": "sum", "pid": process, "tid": _MAIN, "ts": _us(time),
            "args": {"round": int(life["round"])}}  # fmt: skip


def _bar(name, category, process, thread, begin, end, **details) -> dict:
    return {"ph": "X", "name": name, "cat": category, "pid": process, "tid": thread, "ts": _us(begin),
            "dur": _us(end - begin), "args": details}  # fmt: skip


def meta(what, process, thread, **args) -> dict:
    """The name, or the place among others, of a process or thread."""
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": args}


def _key_name(trace, key) -> str:
    known = trace.keys.get(int(key))
    return known.name if known else "key %d" % key


def _other_end(worker, server):
    """The node at the other end of a life, and how that calls the worker: a server, or the leader of its machine."""
    return (("server", server), worker) if server >= 0 else (("worker", local_peer(server)), local_peer(worker))


def _to(peer) -> int:
    peer = int(peer)
    return 1 + 4 * peer if peer >= 0 else 3 + 4 * local_peer(peer)


def _from(peer) -> int:
    return 1 + _to(peer)


def _us(seconds) -> float:
    return round(float(seconds) * 1e6, 3)
