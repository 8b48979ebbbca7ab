"""Rounds of low-rank gradients through a session, which every worker checks, a function for each test: lowrank.py NAME
ARGUMENT...
"""

import sys
import zlib

import numpy as np
from low_rank import LowRankReference

from p3.worker.session import Session

RANK_TYPE = {"type": "lowrank", "rank": 3}
SHAPES = {"wide": (12, 40), "tall": (70, 9), "conv": (16, 4, 3, 3), "large": (300, 401)}
STEPS = 6


def gradient(worker, name, step, shape=None):
    random = np.random.RandomState(abs(hash_of("%s %d %d" % (name, step, worker))))
    return random.standard_normal(shape or SHAPES[name]).astype("float32")


def hash_of(text):
    return zlib.crc32(text.encode())


class Keys:
    """All of one store, by name."""

    def __init__(self, session, shapes=None, reduction=None, compression=RANK_TYPE, dtype="float32"):
        self.session, store = session, session.new_store()
        session.set_option(store, "compression", compression)
        if reduction is not None:
            session.set_option(store, "reduction", {"type": reduction})
        self.keys = {name: session.declare(name, shape, dtype, store) for name, shape in (shapes or SHAPES).items()}
        self.landings = {name: np.full(key.shape, 7, dtype) for name, key in self.keys.items()}
        session.wait([
            session.init(key, np.zeros(key.shape, dtype) if session.rank == 0 else None, self.landings[name])
            for name, key in self.keys.items()
        ])  # fmt: skip
        self.told, self.total = session.declare("told", (session.num_workers,), "int64", session.new_store()), {}
        session.wait([session.init(self.told, np.zeros(session.num_workers, "int64"), self.sums())])

    def sums(self):
        return np.zeros(self.session.num_workers, "int64")

    def begin(self, name, array, priority=0):
        key = self.keys[name]
        if array is None:
            return self.session.skip(key, self.landings[name], priority, goes_on=True)
        return self.session.pushpull(key, array, self.landings[name], priority)

    def round(self, gradients):
        """Of each name; None: this worker has none. Whether any worker had one."""
        begun = [self.begin(name, array, -place) for place, (name, array) in enumerate(gradients.items())]
        self.session.wait(begun)
        return [one.updated for one in begun]

    def state(self, name):
        """What this worker has left out, and its basis."""
        state, elements = self.session.low_rank.state(self.keys[name]), self.keys[name]
        size = int(np.prod(elements.shape))
        return state[:size].reshape(elements.shape), state[size:]

    def require_alike(self):
        """All workers have the same bits."""
        own, sums = self.sums(), self.sums()
        own[self.session.rank] = zlib.crc32(b"".join(one.tobytes() for one in self.landings.values()))
        self.session.wait([self.session.pushpull(self.told, own, sums)])
        assert len(set(sums.tolist())) == 1, sums

    def total_of(self, array):
        """Over the workers, in float64."""
        key = self.session.declare("total %d" % len(self.total), array.shape, "float64", self.told.store)
        self.total[key] = landing = np.zeros(array.shape)
        self.session.wait([self.session.init(key, np.zeros_like(landing), landing)])
        self.session.wait([self.session.pushpull(key, array.astype("float64"), landing)])
        return landing


def near(found, expected, scale):
    error = np.abs(found - expected).max() / scale
    assert error < 1e-6, error


def follows(session, reduction):
    """The reference, over several steps; in some of which some workers have no gradient, and in one none."""
    keys, workers = Keys(session, reduction=reduction), session.num_workers
    references = {name: LowRankReference(shape, RANK_TYPE["rank"], workers) for name, shape in SHAPES.items()}
    for step in range(STEPS):
        have = {0, 1, 2, 3} if step not in (2, 3) else {1} if step == 2 else set()
        parts = {name: [gradient(one, name, step) if one in have else None for one in range(workers)]
                 for name in SHAPES}  # fmt: skip
        updated = keys.round({name: of_all[session.rank] for name, of_all in parts.items()})
        took_part = len(have & set(range(workers)))
        assert updated == [took_part > 0] * len(SHAPES), (step, updated)
        for name, of_all in parts.items():
            expected = references[name].sum(of_all)
            if expected is None:
                continue
            expected = expected / {"mean": workers, "average": took_part}.get(reduction, 1)
            scale = np.linalg.norm(expected) + np.linalg.norm(references[name].left_out)
            near(keys.landings[name].reshape(expected.shape), expected, scale)
            near(keys.state(name)[0].reshape(expected.shape), references[name].left_out[session.rank], scale)
        keys.require_alike()


def loses_nothing(session):
    """What was decoded, and what all have left out, is what all have given."""
    keys = Keys(session)
    given, decoded = ({name: np.zeros(shape) for name, shape in SHAPES.items()} for _ in range(2))
    for step in range(STEPS):
        keys.round({name: gradient(session.rank, name, step) for name in SHAPES})
        for name in SHAPES:
            given[name] += sum(gradient(one, name, step).astype("float64") for one in range(session.num_workers))
            decoded[name] += keys.landings[name]
            left_out = keys.total_of(keys.state(name)[0])
            assert np.linalg.norm(left_out) > 0.1 * np.linalg.norm(given[name])
            near(decoded[name] + left_out, given[name], np.linalg.norm(given[name]))


def exact(session):
    """Gradients whose sum is such a product come as they are, and nothing is left out, if all workers' have its columns
    and the rows are those of the steps before."""
    keys = Keys(session)
    for step in range(STEPS):
        parts = {}
        for name, shape in SHAPES.items():
            left, right = gradient(0, name, step, (shape[0], 3)), gradient(0, name, -1, (3, int(np.prod(shape[1:]))))
            parts[name] = [(left @ (np.eye(3) + 0.2 * gradient(one, name, step, (3, 3))) @ right).reshape(shape)
                           .astype("float32") for one in range(session.num_workers)]  # fmt: skip
        keys.round({name: of_all[session.rank] for name, of_all in parts.items()})
        for name, of_all in parts.items():
            expected = sum(one.astype("float64") for one in of_all)
            near(keys.landings[name], expected, np.linalg.norm(expected))
            near(keys.state(name)[0], 0, np.linalg.norm(expected))


def overflows(session):
    """One worker's gradient is not finite: NaN for that key on all workers, and what they keep is as it was."""
    keys, last = Keys(session), session.num_workers - 1
    for step, bad in enumerate((None, np.inf, None, np.nan, -np.inf, None)):
        parts = {name: gradient(session.rank, name, step) for name in SHAPES}
        if bad is not None and session.rank == last:
            parts["wide"][3, 5] = bad
        before = {name: keys.state(name) for name in SHAPES} if step > 0 else {}
        keys.round(parts)
        keys.require_alike()
        assert np.isnan(keys.landings["wide"]).all() == (bad is not None)
        assert all(np.isfinite(keys.landings[name]).all() for name in SHAPES if name != "wide")
        if bad is not None:
            for was, now in zip(before["wide"], keys.state("wide")):
                np.testing.assert_array_equal(was, now)
            assert not np.array_equal(before["tall"][0], keys.state("tall")[0])


def zeros(session):
    """A gradient of zeros is one, and the basis is none of zeros behind it."""
    keys = Keys(session)
    keys.round({name: np.zeros(shape, "float32") for name, shape in SHAPES.items()})
    assert not any(one.any() for one in keys.landings.values())
    keys.round({name: gradient(session.rank, name, 1) for name in SHAPES})
    for name in SHAPES:
        singular = np.linalg.svd(keys.landings[name].reshape(SHAPES[name][0], -1), compute_uv=False)
        assert singular[2] > 0.01 * singular[0] and singular[3] < 1e-5 * singular[0], singular


def plain(session):
    """Keys for which thin matrices would save nothing are exact, and so are those of other types."""
    for dtype, shapes in (("float32", {"bias": (50,), "small": (6, 5), "scalar": ()}), ("float64", SHAPES)):
        keys = Keys(session, shapes, dtype=dtype)
        assert not any(key.rank for key in keys.keys.values())
        keys.round({name: np.full(shape, session.rank + 1, dtype) for name, shape in shapes.items()})
        for name, landing in keys.landings.items():
            np.testing.assert_array_equal(landing, np.full(shapes[name], sum(range(1, session.num_workers + 1)), dtype))


def counts(session):
    """Bytes that are sent and received in a step are those of the formula."""
    from p3 import codecs
    from p3.placement import FRAME_BYTES

    keys = Keys(session)
    keys.round({name: gradient(session.rank, name, 0) for name in SHAPES})  # the first values of thin matrices, too
    before = session.counters()
    keys.round({name: gradient(session.rank, name, 1) for name in SHAPES})
    after = session.counters()
    expected = sum(
        4 * rows * columns + FRAME_BYTES
        for shape in SHAPES.values() for rows, columns in codecs.in_place_of(shape, RANK_TYPE["rank"])
    )  # fmt: skip
    for way in ("bytes_sent", "bytes_received"):
        counted = after[way] - before[way]
        assert 0 <= counted - expected < 0.01 * expected, (way, counted, expected)  # heartbeats


def overlaps(session):
    """Nothing waits for a round, of which the caller's thread computes nothing; only one of a key is under way."""
    keys = Keys(session)
    session.barrier()
    if session.rank == 1:
        session.barrier("all have begun")
    begun = {name: keys.begin(name, gradient(session.rank, name, 0)) for name in SHAPES}
    if session.rank == 0:
        assert not any(one.done for one in begun.values())
        try:
            keys.begin("wide", gradient(0, "wide", 1))
            raise AssertionError("a second round has begun")
        except ValueError as error:
            assert "key 'wide' has a round under way" in str(error)
        try:
            session.release(keys.keys["wide"].store)
            raise AssertionError("a store was released under way")
        except ValueError as error:
            assert "has operations under way" in str(error)
        session.barrier("all have begun")
    session.wait(begun.values())


def leaves(session):
    """Worker 0 ends its script without waiting for the round that it has begun; which the others get."""
    shape = (900, 1100)  # its products take a while
    keys = Keys(session, {"large": shape})
    operation = keys.begin("large", gradient(session.rank, "large", 0, shape))
    if session.rank > 0:
        session.wait([operation])
        assert operation.updated and keys.landings["large"].any()


def waits_in_vain(session):
    """Worker 0 ends its script in a round that worker 1 never pushes."""
    import time

    keys = Keys(session)
    if session.rank == 0:
        keys.begin("wide", gradient(0, "wide", 0))
    else:
        time.sleep(5)


def dies_unseen(session):
    """Worker 1 goes away when worker 0 has begun its last round, and waits for nothing any more."""
    import os
    import time

    keys = Keys(session)
    if session.rank == 1:
        session.barrier()
        time.sleep(0.5)
        os._exit(3)
    keys.begin("wide", gradient(0, "wide", 0))
    session.barrier()
    while not session.has_ended:
        time.sleep(0.1)
    time.sleep(1.5)  # until lowrank has seen it, too


def dies(session):
    """Worker 1 goes away while worker 0 waits for the round."""
    import os

    keys = Keys(session)
    if session.rank == 1:
        session.barrier()
        os._exit(3)
    operation = keys.begin("wide", gradient(0, "wide", 0))
    try:
        session.barrier()  # whose end may come behind the other's
        session.wait([operation])
    except Exception as error:
        print("worker 0 was told: %s %s" % (type(error).__name__, error), flush=True)
    raise SystemExit(1)


if __name__ == "__main__":
    with Session.open() as session:
        globals()[sys.argv[1]](session, *sys.argv[2:])
        print("worker %d is right" % session.rank, flush=True)
