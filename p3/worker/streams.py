"""Bytes that one worker has, as a stream, in pieces through a few keys of a store that exists only meanwhile: to all
workers (give), or to those alone who join the job (hand_over). Neither servers nor workers ever hold more than the
pieces that are under way.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Deque, List, Protocol, Tuple

import numpy as np

# Of one piece: enough for what a link of 1 Gbit/s holds in a quarter of a second, and nothing beside what is sent so.
PIECE_BYTES = 16 << 20
_AT_ONCE = 2  # pieces that are handed over in one store, and behind them as many in the next one


class Stream(Protocol):
    """Where the bytes are, on each worker."""

    def next(self, count: int) -> Any:
        """The places of the next `count` bytes; fewer at the end."""

    def read(self, places: Any, array: np.ndarray) -> None:
        """These bytes, to the array."""

    def write(self, places: Any, array: np.ndarray) -> None:
        """The array's, to these places."""


class Bytes:
    """A Stream over one array of uint8."""

    def __init__(self, array: np.ndarray) -> None:
        self._array, self._at = array, 0

    def next(self, count: int) -> slice:
        places = slice(self._at, min(self._at + count, len(self._array)))
        self._at = places.stop
        return places

    def read(self, places: slice, array: np.ndarray) -> None:
        array[:] = self._array[places]

    def write(self, places: slice, array: np.ndarray) -> None:
        self._array[places] = array


def hand_over(session, store: int, total: int, giver: int, takes: bool, stream: Stream, what: str) -> bool:
    """On every worker at the same point: `total` bytes, which is more than 0, of worker `giver`, to those who `take`
    them. The others only wait. `store`: this one and the next have no keys, nor have they any behind this; `what`: is
    waited for. False on those who take, if the giver was lost: the job goes on, and they cannot, as what is under way
    may still land."""
    is_giver = session.rank == giver
    pieces = [min(PIECE_BYTES, total - at) for at in range(0, total, PIECE_BYTES)]
    under_way: Deque[Tuple[int, List[Tuple]]] = deque()

    def begin(store: int, counts: List[int]) -> None:
        begun = []
        for number, count in enumerate(counts) if takes or is_giver else ():
            key = session.declare("piece %d" % number, (count,), "uint8", store)
            places, array = stream.next(count), np.empty(count, np.uint8)
            if is_giver:
                stream.read(places, array)
            session.core.hand_over(key.handle)
            begun.append((session.init(key, array if is_giver else None, array), places, array))
        under_way.append((store, begun))

    def finish() -> bool:
        store, begun = under_way.popleft()
        if not session.wait([one[0] for one in begun], what, unless=lambda: giver not in session.members):
            return False
        for _, places, array in begun if takes else ():
            stream.write(places, array)
        session.release(store)
        return True

    for first in range(0, len(pieces), _AT_ONCE):
        if len(under_way) == 2 and not finish():
            return False
        begin(store + first // _AT_ONCE % 2, pieces[first : first + _AT_ONCE])
    return all(finish() for _ in range(len(under_way)))


def give(session, store: int, total: int, giver: int, stream: Stream) -> bool:
    """On every worker at the same point: `total` bytes, which is more than 0, of worker `giver`. `store`: one that has
    no keys. Waits for them. False, on all workers, if the giver was lost meanwhile."""
    count = -(-total // PIECE_BYTES)
    piece = -(-total // count)  # of equal size: a key is sent whole
    keys = [session.declare("piece %d" % number, (piece,), "uint8", store) for number in range(min(2, count))]
    arrays = [np.zeros(piece, np.uint8) for _ in keys]
    is_whole, is_giver = True, session.rank == giver  # to the end: of two, the bytes would be added up
    under_way: List[Tuple] = []

    def land(operation: Any, places: Any, array: np.ndarray) -> bool:
        session.wait([operation])
        if operation.updated and not is_giver:
            stream.write(places, array)
        return operation.updated

    for number in range(count):
        if len(under_way) == len(keys):
            is_whole &= land(*under_way.pop(0))
        key, array = keys[number % 2], arrays[number % 2]
        places = stream.next(piece)
        if is_giver:
            stream.read(places, array)
        under_way.append((_begin(session, key, array, is_giver, number < len(keys)), places, array))
    for one in under_way:
        is_whole &= land(*one)
    return is_whole and (count <= len(keys) or _is_confirmed(session, store, is_giver))


def _is_confirmed(session, store: int, is_giver: bool) -> bool:
    """Whether all has come: of a piece whose giver is lost within it, some slices may have, and others not."""
    array = np.ones(1, np.uint8)
    key = session.declare("end", (1,), "uint8", store)
    session.wait([session.init(key, array if is_giver else None, array)])
    operation = _begin(session, key, array, is_giver, is_first=False)
    session.wait([operation])
    return operation.updated


def _begin(session, key: Any, array: np.ndarray, gives: bool, is_first: bool) -> Any:
    """The key's first value, and then rounds, which no worker can miss: an init of a worker that is late may be
    answered with the value of a later one."""
    if is_first:
        return session.init(key, array if gives else None, array)
    return session.pushpull(key, array, array) if gives else session.skip(key, array, goes_on=True)
