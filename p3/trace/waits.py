"""What the next forward pass waited for, and why: decided from the lives alone, no printing here.

Where the training thread has marked its stalls (the lab's replay does), the answer is the key it waited for longest.
A real script's forward pass is not seen by the store; then the answer is what the lives prove: the forward pass cannot
go past a layer before its value and those of all layers before it have landed. That front stands still at one key after
the other; the one where it stands longest, after the last gradient of the round was ready, is the critical one. Its
time is what the pass would have waited there if it took no time itself: an upper bound of the stall.

Keys are in forward order by their priorities, highest first, equals by number.
"""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Tuple

import numpy as np

from p3.trace.lives import Trace

WORKERS_QUEUE, WIRE_UP, SUM, OTHERS, UPDATE, SERVERS_QUEUE, WIRE_DOWN, COPY = STAGE_NAMES = (
    "worker's queue",
    "wire to the server",
    "server's receive queue and sum",
    "other workers' pushes",
    "update",
    "server's send queue",
    "wire to the worker",
    "copy to the weight",
)
_BOUNDS = ("ready", "leaving", "received", "summed", "complete", "updated", "returning", "landed")


class Wait(NamedTuple):
    worker: int
    round: int
    key: int
    wait_s: float
    marked: bool  # a stall of the training thread; else an upper bound from the front
    life: np.void  # of the slice of the key that landed last
    stages: Dict[str, float]  # of that life, in seconds; they add up to the time from `ready` to the end of the wait


class Queue(NamedTuple):
    """The bytes that left a process while a frame waited in its queue, by their priority beside the frame's."""

    higher: int
    equal: int
    lower: int


def waits(trace: Trace) -> List[Wait]:
    """Of each worker and round, the longest; sorted by round. Rounds that are not known whole are left out."""
    lives = trace.lives
    stalls: Dict[Tuple[int, int], list] = {}
    for stall in trace.stalls:
        stalls.setdefault((stall.round, stall.worker), []).append(stall)
    changes = (np.diff(lives["round"]) != 0) | (np.diff(lives["worker"]) != 0)
    found = []
    for of_round in np.split(lives, 1 + np.flatnonzero(changes)) if len(lives) else []:
        round_number, worker = int(of_round["round"][0]), int(of_round["worker"][0])
        if not np.isfinite(of_round["landed"]).all() or not np.isfinite(of_round["ready"]).all():
            continue
        marked = stalls.get((round_number, worker))
        if marked:
            longest = max(marked, key=lambda stall: stall.end - stall.begin)
            key, wait_s, end = longest.key, longest.end - longest.begin, longest.end
        elif trace.stalls:
            continue  # this pass did not wait
        else:
            key, wait_s = _front(of_round)
            end = None
        of_key = of_round[of_round["key"] == key]
        if len(of_key) == 0:
            continue
        life = of_key[np.argmax(of_key["landed"])]
        moments = [float(life[moment]) for moment in _BOUNDS]
        moments.append(moments[-1] if end is None else end)
        stages = dict(zip(STAGE_NAMES, np.diff(moments).tolist()))
        found.append(Wait(worker, round_number, key, wait_s, bool(marked), life, stages))
    return found


def _front(lives) -> Tuple[int, float]:
    """The key at which the forward pass is held longest, and for how long, if it takes no time itself."""
    order = np.lexsort((lives["key"], -lives["priority"]))
    passed = np.maximum.accumulate(np.concatenate([[lives["ready"].max()], lives["landed"][order]]))
    steps = {}
    for key, step in zip(lives["key"][order].tolist(), np.diff(passed).tolist()):
        steps[key] = steps.get(key, 0.0) + step
    key = max(steps, key=steps.get)
    return key, steps[key]


def ahead(trace: Trace, life, moment: str) -> Queue:
    """What left the worker while the slice was queued there (`leaving`), or the server (`returning`)."""
    since, sent = ("queued", "sent") if moment == "leaving" else ("broadcast", "returned")
    of_process = _of_sender(trace, life, moment)
    meanwhile = of_process[(of_process[sent] > life[since]) & (of_process[moment] < life[moment])]
    return Queue(
        higher=int(meanwhile["bytes"][meanwhile["priority"] > life["priority"]].sum()),
        equal=int(meanwhile["bytes"][meanwhile["priority"] == life["priority"]].sum()),
        lower=int(meanwhile["bytes"][meanwhile["priority"] < life["priority"]].sum()),
    )


def on_their_way(trace: Trace, life, moment: str) -> int:
    """Bytes of the slices that left the worker (`leaving`) or server (`returning`) before, and had not yet arrived."""
    of_process = _of_sender(trace, life, moment)
    arrived = of_process["received" if moment == "leaving" else "landed"]
    return int(of_process["bytes"][(of_process[moment] < life[moment]) & (arrived > life[moment])].sum())


def _of_sender(trace, life, moment):
    sender = "worker" if moment == "leaving" else "server"
    return trace.lives[trace.lives[sender] == life[sender]]


def last_push(trace: Trace, life) -> np.void:
    """The life of the same slice as the last worker pushed it."""
    lives = trace.lives
    same = lives[(lives["key"] == life["key"]) & (lives["slice"] == life["slice"]) & (lives["round"] == life["round"])]
    return same[same["worker"] == life["last_worker"]][0]
