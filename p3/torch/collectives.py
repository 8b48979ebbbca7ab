"""Small collectives of P3's own, for losses and metrics: sums and JSON-like values, by the servers.

All of them are sums: keys of a store of their own, one for each power of two of elements, without an optimizer. What a
worker has not is zero. Nothing that comes from a socket is unpickled: objects travel as JSON. They are for kilobytes,
and wait for the slowest worker; gradients are DistributedOptimizer's.

Threads: the script's. Every worker makes the same calls in the same order.
"""

from __future__ import annotations

import json
import weakref
from typing import Any, Dict, List, MutableMapping, Optional, Tuple

import numpy as np
import torch

from p3.frontend import waiting
from p3.torch.start import job
from p3.worker.key import Key
from p3.worker.session import Session

_EACH_CALLS = (
    "in a collective (all_reduce(), broadcast_object() ...) for other workers: each must call it, at the same point of "
    "its program; a worker that has taken its last step calls optimizer.join() first"
)
_CANNOT_BE_SENT = -1  # in the place of a length
_WIDE = {True: "float64", False: "int64"}  # of floating point or not: sums are rounded once
# By the servers, slice by slice: of a worker that departs meanwhile some slices have its numbers, and others do not.
_REDUCTIONS = {"sum": "sum", "mean": "average"}


def all_reduce(tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
    """The sum of every worker's `tensor`, or with op="mean" its mean: a new tensor, which has the same bits everywhere.

    Of the same shape and type on every worker, real; integers have no mean. Summed in float64 or int64, in the order of
    ranks. ValueError for anything else; TimeoutError after P3_WAIT_TIMEOUT_S if a worker does not call it.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ValueError("all_reduce() takes a tensor, not a %s: torch.tensor(...) makes one of a number"
                         % type(tensor).__name__)  # fmt: skip
    if op not in ("sum", "mean"):
        raise ValueError("op is %r; P3 has 'sum' and 'mean'" % (op,))
    floating = tensor.dtype.is_floating_point
    if tensor.layout != torch.strided or tensor.dtype.is_complex or (op == "mean" and not floating):
        what = "%s %s" % (tensor.layout, tensor.dtype)
        raise ValueError("all_reduce(op=%r) of a tensor of %s: it takes dense tensors of real numbers, and the mean of "
                         "floating-point numbers alone" % (op, what))  # fmt: skip
    session = job.current()
    own = tensor.detach().to("cpu", getattr(torch, _WIDE[floating])).reshape(-1).numpy()
    _require_alike(session, len(own), floating)
    reduced = _sum(session, own, _REDUCTIONS[op])
    return torch.from_numpy(reduced).reshape(tensor.shape).to(tensor.device, tensor.dtype)


def _require_alike(session: Session, elements: int, floating: bool) -> None:
    """ValueError on all workers, unless all give as many elements, and none or all of them floating-point ones: else
    they would wait for each other in sums of different keys, or sum what does not belong together."""
    lengths, squares, floats, size = _sum(session, np.array([elements, elements**2, floating, 1], np.int64))
    if lengths**2 != squares * size or floats not in (0, size):
        raise ValueError("all_reduce: all workers must give tensors of one shape and type; this one has given %d %s"
                         % (elements, "floating-point numbers" if floating else "integers"))  # fmt: skip


def broadcast_object(value: Any = None, src: int = 0) -> Any:
    """Worker `src`'s `value` on every worker. What the others pass does not matter.

    None, a bool, an int, a float, a string, or lists and dicts (with strings as keys) of these; ValueError names what
    is none of them, as no pickle is read from a socket. ValueError on all workers, too, if `src` has departed.
    """
    session = job.current()
    ranks = _ranks(session)
    if src not in ranks:
        raise ValueError("src is %r; the workers are 0 to %d" % (src, len(ranks) - 1))
    (text,) = _gathered(session, [src], value)
    if text is None:
        raise ValueError("src is %d, and that worker has departed" % src)
    return json.loads(text)


def all_gather_object(value: Any) -> List[Any]:
    """Every worker's `value`, by rank, on every worker; None in the place of one that has departed. Where others have
    joined as further workers, up to the highest rank of the last members(). Values as in broadcast_object()."""
    session = job.current()
    texts = _gathered(session, _ranks(session), value)
    return [None if text is None else json.loads(text) for text in texts]


def _ranks(session: Session) -> range:
    """That workers may have; the same on all between two calls of members()."""
    return range(max(session.num_workers, max(session.agreed_members) + 1))


def _gathered(session: Session, ranks: Any, value: Any) -> List[Optional[bytes]]:
    """Those ranks' values as texts, None of who has departed: first how long each is, and then all, one behind the
    other."""
    places = {rank: place for place, rank in enumerate(ranks)}
    lengths, text, problem = np.zeros(len(places), np.int64), np.empty(0, np.uint8), None
    if session.rank in places:
        try:
            text = np.frombuffer(_encoded(value), np.uint8)
        except ValueError as error:  # the others are to hear of it, and not to wait
            problem = error
        lengths[places[session.rank]] = len(text) if problem is None else _CANNOT_BE_SENT
    lengths = _sum(session, lengths)
    if problem is not None:
        raise problem
    for rank, place in places.items():
        if lengths[place] == _CANNOT_BE_SENT:
            raise ValueError("worker %d has given a value that cannot be sent: see its own error" % rank)
    ends = np.cumsum(lengths)
    texts = np.zeros(int(ends[-1]), np.int64)
    if session.rank in places:
        end = int(ends[places[session.rank]])
        texts[end - len(text) : end] = text
    texts = _sum(session, texts).astype(np.uint8)
    # JSON has no zeros; they are where one has departed before all of its text had left.
    return [bytes(one) if one.size and one.all() else None for one in np.split(texts, ends[:-1])]


def _encoded(value: Any) -> bytes:
    _require_plain(value, "the value")
    return json.dumps(value).encode()


def _require_plain(value: Any, where: str) -> None:
    """So that it comes out as it was put in: JSON would make lists of tuples, and strings of other keys."""
    if value is None or type(value) in (bool, int, float, str):
        return
    if type(value) is list:
        for number, item in enumerate(value):
            _require_plain(item, "%s[%d]" % (where, number))
    elif type(value) is dict and all(type(key) is str for key in value):
        for key, item in value.items():
            _require_plain(item, "%s[%r]" % (where, key))
    else:
        kind = "dict with keys that are no strings" if type(value) is dict else type(value).__name__
        raise ValueError("%s is a %s; numbers, strings, None, and lists and dicts of them can be sent, tensors by "
                         "all_reduce()" % (where, kind))  # fmt: skip


class _Sums:
    """Of one session and kind of reduction: its store, and the keys that have been needed so far."""

    def __init__(self, session: Session, reduction: str) -> None:
        self._store = session.new_store(of="collectives by " + reduction)
        session.set_option(self._store, "reduction", {"type": reduction})
        self._keys: Dict[Tuple[str, int], Key] = {}

    def sum(self, session: Session, own: np.ndarray) -> np.ndarray:
        """Over all workers, of one axis of float64 or int64, equally long on each; waits for it."""
        session.send_kept()
        padded = np.zeros(1 << max(0, len(own) - 1).bit_length(), own.dtype)
        padded[: len(own)] = own
        total = np.empty_like(padded)
        session.wait([session.pushpull(self._key(session, padded), padded, total)], _EACH_CALLS)
        return total[: len(own)]

    def _key(self, session: Session, like: np.ndarray) -> Key:
        identity = (like.dtype.name, len(like))
        if identity not in self._keys:
            key = session.declare("%s[%d]" % identity, like.shape, like.dtype.name, self._store)
            waiting.from_rank_0(session, key, np.zeros_like(like))
            self._keys[identity] = key
        return self._keys[identity]


_of_sessions: MutableMapping[Session, Dict[str, _Sums]] = weakref.WeakKeyDictionary()


def _sum(session: Session, own: np.ndarray, reduction: str = "sum") -> np.ndarray:
    sums = _of_sessions.setdefault(session, {})
    if reduction not in sums:
        sums[reduction] = _Sums(session, reduction)
    return sums[reduction].sum(session, own)
