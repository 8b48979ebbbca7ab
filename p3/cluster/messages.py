"""The control plane's messages: a 4-byte little-endian length, then one JSON object in UTF-8.

Every object has a `kind` and exactly the fields that FIELDS lists for it, of exactly those types; anything else is a
ProtocolError. Nothing received is ever unpickled or evaluated. Before a node has joined, a message has at most
4 KiB, so that a peer cannot make us hold more; afterwards at most 16 MiB.
"""

from __future__ import annotations

import json
import math
import struct
from typing import Any, Callable, Dict, List, Mapping

from p3.errors import ProtocolError
from p3.plan.key_plan import REDUCTIONS, UPDATES

PROTOCOL_VERSION = 25
MAX_BYTES_BEFORE_JOIN = 4 << 10
MAX_BYTES = 16 << 20
MAX_GROUPS = 16  # of layers, in a worker's report of its waits

_LENGTH = struct.Struct("<I")


Check = Callable[[Any], bool]


def _int(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63  # type(): True is an int to isinstance


def _seconds(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < 1e9


def _number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < 1 << 63


def _is(wanted: type) -> Check:
    return lambda value: type(value) is wanted


_str, _bool = _is(str), _is(bool)


def _name(value: Any) -> bool:
    return type(value) is str or (type(value) is int and -(1 << 63) <= value < 1 << 63)


def _sha256(value: Any) -> bool:
    return type(value) is str and len(value) == 64 and set(value) <= set("0123456789abcdef")


def _flat(value: Any) -> bool:
    """An object of strings, numbers, booleans and nulls: a node's settings, the value of an option."""
    return type(value) is dict and all(item is None or type(item) in (str, int, float, bool) for item in value.values())


def _counters(value: Any) -> bool:
    """As _flat(), but for `late_s`, which has one number for each worker."""
    return type(value) is dict and _flat({**value, "late_s": None}) and _list_of(_seconds)(value.get("late_s", []))


def _one_of(*words: str) -> Check:
    return lambda value: type(value) is str and value in words


def _or_none(fits: Check) -> Check:
    return lambda value: value is None or fits(value)


def _list_of(fits: Check) -> Check:
    return lambda value: type(value) is list and all(map(fits, value))


def _pair_of(first: Check, second: Check) -> Check:
    return lambda value: type(value) is list and len(value) == 2 and first(value[0]) and second(value[1])


def _values(fits: Check) -> Check:
    """An object whose values fit, whatever their names."""
    return lambda value: type(value) is dict and all(map(fits, value.values()))


def _of_length(least: int, most: int, fits: Check) -> Check:
    return lambda value: fits(value) and least <= len(value) <= most


def _object(fields: Dict[str, Check]) -> Check:
    """An object of exactly these fields."""
    return lambda value: (
        type(value) is dict
        and value.keys() == fields.keys()
        and all(fits(value[name]) for name, fits in fields.items())
    )


_SNAPSHOT_PART = _object({"role": _str, "rank": _int, "bytes": _int, "sha256": _sha256})
_ROUNDS = {"keys": _list_of(_int), "rounds": _list_of(_int)}  # see columns()
# agree_on_members() of a worker at which another process may enter: how many steps are behind it, as the script counts,
# and why none can enter this script's job, or "".
_MARK = _object({"round": _int, "problem": _str})
# What a process that enters a running job must know: the number of that barrier, and what `mark` says of it.
_ENTERED = {"barrier": _int, "round": _int}
# A key_plan.KeyPlan; and what of it another one that follows changes.
_SUCCESSOR = {"wire_key": _int, "first_slice": _int, "slice_elements": _int, "partitions": _int}
_PLAN = {
    **_SUCCESSOR, "dtype": _str, "elements": _int, "row_elements": _int, "parts": _int, "staleness": _int,
    "codec": _flat, "reduction": _one_of(*REDUCTIONS), "update": _one_of(*UPDATES), "value_codec": _flat,
    "quorum": _int, "grace_s": _seconds, "servers": _list_of(_int),
}  # fmt: skip
# Of a key that is cut anew while the job rests: the plan before, and the last round that went by it.
_RECUT = {**_PLAN, "predecessor": _int, "round": _int}
_ADDRESS = {"host": _str, "port": _int, "local": _str, "machine": _str}  # of a server; of a worker, port 0: it has none
_SERVER = _object({**_ADDRESS, "heir": _or_none(_int)})
_WORKER = _object(_ADDRESS)

# What a process tells of itself while somebody watches; totals are since it began, `at_s` by its own clock.
_REPORT = {
    "at_s": _seconds, "last_round": _int, "bytes_sent": _int, "bytes_received": _int, "queued_slices": _int,
    "memory_bytes": _int,
}  # fmt: skip
# A row of a view (p3/cluster/watching/view.py). Null: nobody could tell. What a process has not reported yet is 0.
_ROW = {
    "rank": _int, "host": _str, "state": _one_of("runs", "left", "lost"), "age_s": _or_none(_seconds), "round": _int,
    "steps_per_s": _number, "sent_bytes": _int, "received_bytes": _int, "sent_per_s": _number,
    "received_per_s": _number, "queued_slices": _int, "memory_bytes": _int,
}  # fmt: skip
_WORKER_ROW = _object({
    **_ROW, "waited_s": _or_none(_seconds), "waited_share": _or_none(_number), "waits": _values(_seconds),
    "group": _str, "group_share": _number, "late_s": _seconds,
})  # fmt: skip
_SERVER_ROW = _object({**_ROW, "received_slices": _int, "value_bytes": _int, "queue_s": _seconds})
_LINK_ROW = _object({"host": _str, "processes": _int, "sent_per_s": _number, "received_per_s": _number})

FIELDS: Dict[str, Dict[str, Check]] = {
    # A node to the scheduler.
    "join": {
        "role": _str,
        "host": _str,  # where others reach this node
        "port": _int,  # its data port: a server's, and a worker's where there are groups; else 0
        "local": _str,  # its abstract AF_UNIX name, without the leading zero byte; empty: it has none
        "machine": _str,  # equal on nodes that can share memory and AF_UNIX sockets; in `welcome`, too
        "pid": _int,
        "rank": _or_none(_int),
        "version": _str,
        "protocol": _int,
        "counts": _flat,  # what must equal the scheduler's
        "settings": _flat,  # what must be equal on all nodes
        # Of a node that has lost the scheduler of a running job, and has found another one in its place: its rank, and
        # how many messages that count it had heard (journal.py).
        "back": _or_none(_object({"rank": _int, "heard": _int})),
        "enters": _bool,  # a job that runs, in a place that no worker has, or as a server that is lost
    },
    "ready": {},  # its connections to the other nodes stand
    "announce": {
        "store": _int,
        "name": _name,
        "shape": _list_of(_int),
        "dtype": _str,
        "sparse": _bool,  # a key of rows
        "staleness": _int,  # rounds that the fastest worker may be ahead of the slowest
        "gathered": _bool,  # a key of factors: its shape is that of one worker's
        "norm": _bool,  # a key of norms, of which its shape is a row for each server
        "defaults": _list_of(_str),  # options of the store that this worker has not set, and from now on cannot set
        "options": _values(_flat),  # that the key has in place of its store's, by name; empty ones: none
    },
    "option": {"store": _int, "name": _str, "value": _flat},  # empty: an optimizer that this worker goes without
    "order": {"store": _int, "names": _list_of(_name)},  # also from the scheduler to all workers
    "barrier": {"number": _int, "mark": _or_none(_MARK)},
    "count": {"number": _int},  # of the worker's request for the servers' counters
    "repartition": {"store": _int, "name": _name, "partitions": _int},  # of a sparse key; rank 0
    "moved": {"wire_key": _int},  # this worker has done with that plan of a sparse key
    # This worker rests, behind these rounds of all keys of these stores, for them to be cut by another strategy, told
    # as the option of that name. The first worker's counts; {}: it knows of none, and all stays.
    "replan": {"stores": _list_of(_int), "strategy": _flat, **_ROUNDS},
    "recut_done": {"number": _int},  # a server has done what `recut` asked
    "release": {"store": _int},  # and with all keys of that store
    # A server has loaded its part of that key from a snapshot; before `defined`. To worker 0, when all have.
    "loaded": {"wire_key": _int},
    "defined": {"wire_key": _int},  # a server has done what `define` asked
    "option_set": {"store": _int, "name": _str},
    "dropped": {"store": _int},
    "counted": {"worker": _int, "number": _int, "counters": _counters},
    "late": {  # a server, or the leader of a machine: this worker keeps others waiting
        "worker": _int,
        "of_machine": _bool,  # or another one of its machine
        "key": _str,
        "round": _int,
        "waited_s": _seconds,
        "waiting": _int,  # how many workers
    },
    # Worker 0: the servers hold the copies of a snapshot. When they began, it knew of so many changes of servers.
    "captured": {"round": _int, "changes": _int},
    "snapshot_written": {"round": _int, "bytes": _int, "sha256": _sha256},  # this server's or worker's part of it
    # It cannot write its part, or worker 0 not complete the snapshot; also to all workers, first words first. Without a
    # text: somebody takes no part in snapshots any more.
    "snapshot_failed": {"round": _int, "text": _str},
    "snapshot_taken": {"round": _int},  # worker 0 has completed it; also to all workers
    "check_snapshot": {"round": _int},  # worker 0: may the job resume from it? Also to all nodes
    "snapshot_checked": {"round": _int, "problem": _str},  # by one node, and to worker 0 by all; "": as it was written
    "progress": {},  # bytes of a snapshot have moved, to worker 0; worker 0's, to the other workers
    "demand_snapshot": {"ends": _bool},  # a worker was asked for one, with which the job `ends` or not
    "mark": {"number": _int, "round": _int},  # to that question: so many steps are behind it, and it waits there
    "load_snapshot": {"round": _int},  # worker 0, to servers: what fits of their own parts is the first values of keys
    "resume": {"round": _int},  # worker 0's choice of a snapshot, 0: none; also from the scheduler to all workers
    # It has called join(), and takes no part in snapshots behind that round; also to all workers.
    "joined": {"worker": _int, "round": _int},
    # A worker has lost its connection to that server, or gets none; so many changes of servers it has heard of by then.
    "server_lost": {"rank": _int, "changes": _int},
    "inherited": {"rank": _int},  # a server serves what the one of that rank did
    "opened": {},  # a server that comes back has all keys; the workers may say what they have
    "handed_over": {"rank": _int},  # its heir serves nothing of that rank any more
    "taken_back": {"rank": _int, "done": _bool},  # a worker has done what `server_returned` asks, or cannot
    "dismissed": {"rank": _int},  # a server waits for that worker no more, which departs
    "admitted": {"rank": _int, "problem": _str},  # so it is, if there is no problem
    "worker_reported": {  # the answer to `report`
        **_REPORT,
        "waited_s": _or_none(_seconds),  # of its script, for values; null: nothing can tell
        "waits": _of_length(0, MAX_GROUPS, _values(_seconds)),  # the same by groups of layers
        # Of each server, by rank: bytes sent to it and received, slices sent, how long they have queued, added up.
        "servers": _list_of(_of_length(4, 4, _list_of(_number))),
    },
    "server_reported": {
        **_REPORT,
        "received_slices": _int,  # not handled yet
        "value_bytes": _int,
        "buffer_bytes": _int,
        "late_s": _list_of(_seconds),  # of each worker, by rank
    },
    "failed": {"text": _str},
    "bye": {},
    # The scheduler to a node.
    # `outlived`: if this scheduler dies, another one takes its place, and the node is to come back to that.
    "welcome": {
        "rank": _int,
        "entered": _or_none(_object(_ENTERED)),
        "outlived": _bool,
    },
    "welcome_back": {"noted": _int},  # so many of this node's messages that count are known; the others come again
    "noted": {"count": _int},  # the same, now and then
    # Right behind it, by rank; of workers all that there may be, null for a place that no process has had. The job has
    # begun with so many. `heir`: of a server that is lost, who serves what it did; None: it is there. `strategy`: the
    # job's Strategy.choices, text and path; null: it has none. `server_changes`: how often one was lost or came back.
    "nodes": {
        "servers": _list_of(_SERVER), "workers": _list_of(_or_none(_WORKER)), "began_with": _int,
        "strategy": _or_none(_pair_of(_str, _str)), "server_changes": _int,
    },
    "waits": {"text": _str},  # to a process that wants to enter a running job: why it still waits
    "start": {},
    # `predecessor`: the key whose other plan this is; wire_key itself: none.
    "define": {"store": _int, "name": _name, **_PLAN, "predecessor": _int},
    "departed": {"rank": _int},  # to servers and workers: that worker is gone, and the job goes on without it
    "inherit": {"rank": _int},  # to a server: that one is lost, and you are its heir
    # To workers: it is lost, and what it served, the other one serves; after so many changes of servers.
    "server_departed": {"rank": _int, "heir": _int, "ranks": _list_of(_int), "changes": _int},
    "open": {},  # to a server that comes back: that were all keys
    "hand_over": {"rank": _int},  # to a server: that one comes back, and you are its heir no more
    "server_returned": {"rank": _int, **_ADDRESS, "changes": _int},  # to workers: it serves its own slices again
    "admit": {"rank": _int},  # to servers: another process may enter the job as that rank, between two rounds
    "entered": {"rank": _int, "host": _str},  # to the other workers: it has
    "members": {"ranks": _list_of(_int)},  # to who has, or a server that is back: all workers, in the order of coming
    "caught_up": {},  # to who has entered: that was all of the past
    "recut": {"number": _int, "keys": _list_of(_object(_RECUT))},  # to servers: these are other cuts of keys that rest
    # To workers, when all servers have: go on by these plans; there may be none.
    "replanned": {"number": _int, "keys": _list_of(_object({"store": _int, "name": _name, **_RECUT}))},
    "drop": {"wire_key": _int},  # no worker uses it any more
    "drop_store": {"store": _int},  # nor any key of that store
    "set_option": {"store": _int, "name": _str, "value": _flat},
    "count_for": {"worker": _int, "number": _int},
    "agreed": {
        "store": _int,
        "name": _name,
        **{field: fits for field, fits in _PLAN.items() if field != "elements"},
        "shape": _list_of(_int),  # which has so many elements
        "catches_up": _bool,  # the job had the key before this worker entered it
    },
    "repartitioned": {"store": _int, "name": _name, **_SUCCESSOR},
    "settled": {"store": _int, "name": _name},  # all workers use the sparse key's other plan
    "releasing": {"store": _int, "worker": _int},  # that worker has done with it
    "released": {"store": _int},  # all have, and it is gone: its number is free
    "option_agreed": {"store": _int, "name": _str, "value": _flat},
    "counters": {"number": _int, "servers": _list_of(_counters)},  # by the servers' ranks
    # All ranks that are part of the job; and those of them that have entered it there, and take part from the next
    # barrier on.
    "barrier_done": {"number": _int, "members": _list_of(_int), "entered": _list_of(_int)},
    "write_snapshot": {"round": _int},  # to servers
    "snapshot_wanted": {"number": _int},  # to workers, a question: where are you?
    # And the answer: behind that step; 0: not now. `ends`: and then the job ends.
    "snapshot_at": {"number": _int, "round": _int, "ends": _bool},
    "snapshot_complete": {"round": _int, "parts": _list_of(_SNAPSHOT_PART)},  # to worker 0: all are written
    "report": {},  # how far are you? Somebody watches the job
    "abort": {"text": _str},  # the job has failed
    "stop": {},  # to servers: every worker has left
    # The first message on a data connection (from a worker) or a watch connection, and its answer.
    "van": {"rank": _int, "ring": _int},  # ring: how many descriptors of shared memory follow, by SCM_RIGHTS
    "watch": {"role": _str, "rank": _int},
    "accepted": {},
    # On the connection of one who only watches: a view every so often, of the last so many seconds; and the last word.
    "look": {"version": _str, "protocol": _int, "every_s": _seconds, "span_s": _seconds},
    "view": {
        "seconds": _seconds,  # since all processes are connected; 0: they are not yet
        "missing": _str,  # who has not joined yet
        "over_s": _seconds,  # what the rates are about
        "workers": _list_of(_WORKER_ROW),  # by rank, as the servers
        "servers": _list_of(_SERVER_ROW),
        "links": _list_of(_LINK_ROW),
        "slowest_worker": _or_none(_int),  # if one keeps the others waiting in each round
        "slowest_server": _or_none(_int),  # if slices queue for one longer than for the others
    },
    "ended": {"text": _str},  # of the job, which has failed if there is a text; or of the watching
}


# Messages about a moment, of connections that come and go: a scheduler that takes another one's place can do without.
_OF_A_MOMENT = frozenset(
    "join ready waits welcome nodes start late report worker_reported server_reported abort welcome_back noted van "
    "watch accepted look view ended".split()
)  # fmt: skip


def counts(kind: str) -> bool:
    """Whether messages of that kind between a node and the scheduler must outlive the scheduler: see journal.py."""
    return kind not in _OF_A_MOMENT


def check(message: Any) -> dict:
    """The message, if FIELDS allows it; else ProtocolError that names the kind and the field, but not the value."""
    kind = message.get("kind") if type(message) is dict else None
    if type(kind) is not str or kind not in FIELDS:
        raise ProtocolError("a control message of unknown kind")
    fields = FIELDS[kind]
    for name in message.keys() - fields.keys() - {"kind"}:
        raise ProtocolError("control message %r has an extra field: %.40r" % (kind, name))
    for name, fits in fields.items():
        if name not in message:
            raise ProtocolError("control message %r lacks its field %r" % (kind, name))
        if not fits(message[name]):
            raise ProtocolError("control message %r has a wrong value in field %r" % (kind, name))
    return message


def encode(message: dict, max_bytes: int = MAX_BYTES) -> bytes:
    """The message as it goes over the wire. ProtocolError if the receiver would refuse it."""
    check(message)
    try:
        body = json.dumps(message, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (ValueError, UnicodeError) as error:
        raise ProtocolError("control message %r cannot be sent: %s" % (message["kind"], error)) from None
    if len(body) > max_bytes:
        raise ProtocolError("control message %r has %d bytes; at most %d" % (message["kind"], len(body), max_bytes))
    return _LENGTH.pack(len(body)) + body


def decode(body: bytes) -> dict:
    """The message in the bytes after the length. ProtocolError if it is not one."""
    try:
        message = json.loads(body.decode(), parse_constant=_finite, parse_float=_finite, parse_int=_short)
    except (ValueError, RecursionError):
        raise ProtocolError("a control message that is not JSON") from None
    return check(message)


def body_bytes(length: bytes, max_bytes: int = MAX_BYTES) -> int:
    """What the 4-byte prefix announces. ProtocolError if that is more than `max_bytes`."""
    (count,) = _LENGTH.unpack(length)
    if count > max_bytes:
        raise ProtocolError("a control message of %d bytes; at most %d are allowed here" % (count, max_bytes))
    return count


def _short(text: str) -> int:
    if len(text) > 20:  # Python takes its time for a million digits
        raise ValueError(text[:20])
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def sendable(text: str) -> str:
    """The text as UTF-8 can carry it, cut to a length that suits a message: error texts may hold anything."""
    return text.encode("utf-8", "replace").decode()[:8000]


def columns(rounds: Mapping[int, int]) -> Dict[str, List[int]]:
    """Rounds of keys, by wire key, as the fields of a message; dict(zip(...)) makes them of these again."""
    return {"keys": list(rounds.keys()), "rounds": list(rounds.values())}
