"""One worker of `p3 bench soak`:  python -m p3.measure.micro.processes.soak_worker SECONDS MEAN_DELAY_MS SEED HAS_ROWS

Pushes for so long, and looks at every element of every sum. All agree on their members before every MARK_EVERY rounds.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from typing import Iterable, List, NamedTuple, Sequence, Tuple

import numpy as np

from p3.worker.session import Session

TENTHS = 10  # at each of which worker 0 tells how it goes
MARK_EVERY = 10
SIZES = [50_000, 30_001, 999, 1, 20_000]
ROWS = (400, 8)
_WAIT_S = 120.0  # when the time is over, for all to be there


class Soak:
    """This worker's part. A gradient is a pattern of small integers, times 2 to the power of the rank: so float32 holds
    every sum exactly, and its bits tell whose gradients it has."""

    def __init__(self, session: Session, delay_ms: float, seed: int, has_rows: bool) -> None:
        self._session, self._delay_ms = session, delay_ms
        self._rng = random.Random(seed * 1000 + session.rank)
        store = session.new_store()
        self._keys = [session.declare(number, (size,), "float32", store) for number, size in enumerate(SIZES)]
        self._landings = [np.zeros(size, np.float32) for size in SIZES]
        self._end = session.declare("end", (1,), "int64", store)
        given = [*zip(self._keys, self._landings), (self._end, np.zeros(1, np.int64))]
        if has_rows:
            self._rows = session.declare("rows", ROWS, "float32", store, sparse=True)
            self._row_landing = np.zeros(ROWS, np.float32)
            given.append((self._rows, self._row_landing))
        self._names = [*range(len(SIZES)), *["rows"] * has_rows]
        first = session.is_first
        session.wait([session.init(key, landing.copy() if first else None, landing) for key, landing in given])
        self._present = 0  # bits of those whose gradients the next sums may have
        self.lacking = 0  # slices without that of one who was lost, of the rounds of their losses

    def agree(self, round_: int) -> Sequence[int]:
        members = self._session.agree_on_members(round_, {})
        self._present = sum(1 << rank for rank in members)
        return members

    def is_over(self, is_ready: bool, members: Sequence[int]) -> bool:
        """Whether all members say so, the same on each of them."""
        ready = np.zeros(1, np.int64)
        self._session.wait([self._session.pushpull(self._end, np.full(1, is_ready, np.int64), ready)])
        return ready[0] == len(members)

    def round(self, round_: int) -> None:
        operations = []
        for name in self._rng.sample(self._names, len(self._names)):
            self._hesitate()
            operations.append(self._push(round_, name))
        self._session.wait(operations)
        parts = [one for name in self._names for one in self._parts(round_, name)]
        self._present, lacking = look(parts, self._present, round_)
        self.lacking += lacking

    def _push(self, round_: int, name):
        session, bit = self._session, np.float32(1 << self._session.rank)
        if name == "rows":
            ids, values = touched(round_, session.rank), pattern_of_rows(round_) * bit
            return session.pushpull(self._rows, (ids, np.full((ids.size, ROWS[1]), values)), self._row_landing)
        gradient = pattern(round_, name) * bit
        return session.pushpull(self._keys[name], gradient, self._landings[name], priority=-name)

    def _parts(self, round_: int, name) -> Iterable[Part]:
        session = self._session
        if name != "rows":
            bits = bits_of(self._landings[name], pattern(round_, name), name, round_)
            whole = session.slice_size.of(SIZES[name])
            cuts = range(whole, SIZES[name], whole)
            yield from (Part(name, number, one, -1) for number, one in enumerate(np.split(bits, cuts)))
            return
        bits = bits_of(self._row_landing, pattern_of_rows(round_), name, round_)
        partitions = session.partitions(self._rows)
        cuts = [ROWS[0] * partition // partitions for partition in range(1, partitions)]
        rows = [touched(round_, rank) for rank in range(session.num_workers)]
        if (bits & ~whose(rows)).any():
            raise AssertionError("the sum of key 'rows' has rows that nobody has pushed in round %d" % round_)
        for number, (begin, end) in enumerate(zip([0, *cuts], [*cuts, ROWS[0]])):
            for rank, ids in enumerate(rows):
                of_rank = bits[ids[(ids >= begin) & (ids < end)]] & (1 << rank)
                yield Part(name, number, of_rank, 1 << rank)

    def _hesitate(self) -> None:
        if self._rng.random() < 0.05:
            time.sleep(self._rng.expovariate(1000 / self._delay_ms))


class Part(NamedTuple):
    """Of a sum, what comes of one worker's gradient whole or not at all."""

    key: object
    number: int
    bits: np.ndarray  # whose gradients each element has
    mask: int  # of whom it tells


def look(parts: Iterable[Part], present: int, round_: int) -> Tuple[int, int]:
    """Whose gradients the next round may have, those that all parts have; and how many parts lack one that others have.
    AssertionError if a part has one that is not `present`, or some elements of it have one and others do not."""
    masks: List[Tuple[int, int]] = []
    for part in parts:
        if part.bits.size == 0:
            continue
        first = int(part.bits.flat[0])
        if (part.bits != first).any() or first & ~present:
            raise AssertionError(
                "the sum of key %r is wrong in round %d, slice %d: it has, whole or in part, gradients of the workers "
                "%s, and of %s it may have some"
                % (part.key, round_, part.number, ranks(np.bitwise_or.reduce(part.bits)), ranks(present))
            )
        masks.append((first, part.mask))
    common, seen = present, 0
    for bits, mask in masks:
        common &= bits | ~mask
        seen |= bits
    return common, sum(bits != seen & mask for bits, mask in masks)


def ranks(bits: int) -> List[int]:
    return [rank for rank in range(int(bits).bit_length()) if int(bits) >> rank & 1]


def bits_of(total: np.ndarray, pattern_: np.ndarray, key, round_: int) -> np.ndarray:
    """Of each element, or of each row."""
    bits = (total / pattern_).astype(np.int64)
    if not np.array_equal(bits * pattern_, total) or (bits.ndim > 1 and (bits != bits[:, :1]).any()):
        raise AssertionError("the sum of key %r is wrong in round %d: it is none of gradients of that round"
                             % (key, round_))  # fmt: skip
    return bits if bits.ndim == 1 else bits[:, 0]


def pattern(round_: int, key: int) -> np.ndarray:
    """1 to 101, which tell a wrong round, key or place."""
    return ((np.arange(SIZES[key]) * 7 + round_ * 31 + key * 11) % 101 + 1).astype(np.float32)


def pattern_of_rows(round_: int) -> np.float32:
    return np.float32(round_ % 101 + 1)


def touched(round_: int, rank: int) -> np.ndarray:
    """Ids of rows."""
    return np.arange((round_ * 5 + rank) % 7, ROWS[0], 3 + rank, dtype=np.int64)


def whose(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Bits of who touches each row."""
    bits = np.zeros(ROWS[0], np.int64)
    for rank, ids in enumerate(rows):
        bits[ids] |= 1 << rank
    return bits


def main(seconds: float, delay_ms: float, seed: int, has_rows: bool) -> None:
    with Session.open() as session:
        behind, _ = session.resume()
        soak = Soak(session, delay_ms, seed, has_rows)
        members = soak.agree(behind)
        begin, told = time.monotonic(), 0
        if session.rank == 0:
            report(session, told, behind, soak.lacking)
        while not soak.is_over(session.rank > 0 or told == TENTHS, members):
            for number in range(behind + 1, behind + 1 + MARK_EVERY):
                soak.round(number)
            behind += MARK_EVERY
            members = soak.agree(behind)
            passed_s = time.monotonic() - begin
            all_there = len(members) == session.num_workers and session.servers.changes % 2 == 0
            # At most one tenth at a mark, and where others have come in the places of all who died: so they compare.
            if session.rank == 0 and all_there and passed_s / seconds * TENTHS >= told + 1:
                told += 1
                report(session, told, behind, soak.lacking)
            if passed_s > seconds + _WAIT_S:
                raise TimeoutError("%s: only the workers %s are there, %g s behind the last death"
                                   % (session.label, list(members), _WAIT_S))  # fmt: skip


def report(session: Session, tenth: int, rounds: int, lacking: int) -> None:
    servers: List[dict] = session.server_counters()
    sums = {name: sum(server.get(name, 0) for server in servers) for name in ("buffer_bytes", "held_bytes")}
    print(json.dumps({"soak": dict(sums, tenth=tenth, rounds=rounds, lacking=lacking)}), flush=True)
    # The processes must be there when they are looked at.
    with open(os.environ["SOAK_SAMPLED"], "rb", buffering=0) as sampled:
        sampled.read(1)


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "1")
