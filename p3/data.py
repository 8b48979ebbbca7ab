"""Sharing out data: each worker's part of it, with equally many samples on every worker unless told otherwise.

    dataset = p3.shard(dataset)                                                    # fixed parts, or
    batches = DataLoader(dataset, 32, sampler=p3.SplitSampler(len(dataset)))       # other parts in each epoch

Workers take turns: of the samples in their common order, worker r of n has number r, r + n, r + 2n ... So n workers
that take b samples a step see together what one process sees with batches of n * b. And so the samples that all have
taken are always the first ones of that order: a SplitSampler's state_dict() is how many, from which any number of
workers can go on.

`even` says what happens if the workers do not divide the samples:
    "pad"    samples from the start of the common order are used again, at most n - 1 of them unless there are fewer
             samples than workers
    "drop"   the last samples of the common order, at most n - 1, are left out
    None     the first workers have one sample more; those that run out of batches first must then call kv.join()

Without `rank` and `num_workers` they are those of the process's job: of its open session, as this worker's place among
those on whom all have agreed last (Session.agree_on_members), else (P3_RANK and DMLC_NUM_WORKER) of the environment,
else this process is alone. Wrong values are ValueError. MXNet is not needed; where it is installed, parts are a
gluon.data.Dataset and samplers a gluon.data.Sampler.
"""

from __future__ import annotations

import collections.abc
import operator
import os
import sys
from typing import Any, Dict, Iterator, Mapping, Optional, Sequence, Tuple

import numpy as np

from p3.settings import Settings, in_job

try:
    from mxnet import gluon
except ModuleNotFoundError as error:
    if error.name != "mxnet":  # it is there, but broken
        raise
    Dataset = Sampler = object
else:
    Dataset, Sampler = gluon.data.Dataset, gluon.data.Sampler


def shard(data: Any, rank: Optional[int] = None, num_workers: Optional[int] = None, even: Optional[str] = "pad"):
    """This worker's part of a Dataset, list, array or other sequence, as a view that reads `data` when it is read."""
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")) or isinstance(data, collections.abc.Mapping):
        raise ValueError(
            "p3.shard: a %s cannot be shared out, because it has no length or no numbered items; "
            "pass a Dataset, list or array" % type(data).__name__
        )
    _, *worker = _worker(rank, num_workers)
    return _Part(data, _turns(len(data), *worker, even))


class _Part(Dataset):
    def __init__(self, data, turns: range) -> None:
        self._data = data
        self._length = len(data)  # as it was when the parts were made
        self._turns = turns

    def __len__(self) -> int:
        return len(self._turns)

    def __getitem__(self, index):
        chosen = self._turns[index]  # IndexError where there is none, which also ends a loop
        if isinstance(chosen, range):
            return [self._data[turn % self._length] for turn in chosen]
        return self._data[chosen % self._length]


class SplitSampler(Sampler):
    """This worker's indices of `length` samples, for gluon.data.DataLoader(sampler=...).

    Each iteration is the next epoch, with an order made from `seed` and the epoch's number, on every worker the same:
    give all workers the same `seed`, and begin equally many iterations on each (or call set_epoch). After
    load_state_dict() the first iteration is the rest of an epoch. len() is of the next iteration.
    """

    def __init__(
        self,
        length: int,
        rank: Optional[int] = None,
        num_workers: Optional[int] = None,
        even: Optional[str] = "pad",
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        self._length = _whole("p3.SplitSampler: length", length)
        self._rank, *worker = _worker(rank, num_workers)
        self._worker, self._even = tuple(worker), even  # of the next iteration: place, of so many
        self._shuffle = bool(shuffle)
        self._seed = _whole("p3.SplitSampler: seed", seed, 1 << 32)
        self._epoch = self._consumed = 0  # where the next iteration begins
        # Where the last one began: epoch, samples consumed by all, and among how many it is split.
        self._begun: Optional[Tuple[int, int, int]] = None
        _turns(0, *self._worker, even)  # a wrong `even` is an error here

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is that epoch, counted from 0: all of it, or what load_state_dict() has left of it."""
        epoch = _whole("p3.SplitSampler: epoch", epoch, 1 << 32)
        if epoch != self._epoch:
            self._epoch, self._consumed = epoch, 0

    def share_among(self, members: Sequence[int]) -> None:
        """From the next iteration on, among the workers of these ranks (p3.torch.members, Session.agree_on_members),
        in their order; on all of them alike. ValueError if this worker is none of them."""
        ranks = [_whole("p3.SplitSampler: a rank", rank) for rank in members]
        if self._rank not in ranks or len(set(ranks)) < len(ranks):
            raise ValueError("p3.SplitSampler: this worker has rank %d, and the members are %r" % (self._rank, ranks))
        self._worker = ranks.index(self._rank), len(ranks)

    def state_dict(self, taken: int) -> Dict[str, Any]:
        """Where all workers are in the data; the same on each, and for any number of workers to go on from.

        `taken`: how many samples each worker has trained on since the last iteration began, full batches times their
        size, also if the last one was short. The sampler cannot know it, as a DataLoader reads ahead. It is 0 before
        the first iteration. At the end of an epoch the state is the beginning of the next one.
        """
        taken = _whole("p3.SplitSampler: taken", taken)
        if self._begun is None and taken > 0:
            raise ValueError("p3.SplitSampler: taken is %d, but no iteration has begun" % taken)
        if self._begun is None:
            epoch, consumed = self._epoch, self._consumed
        else:
            epoch, consumed, sharing = self._begun
            if taken < len(self._rest(consumed, (0, sharing))):  # of the first, which has no fewer than any other
                consumed += taken * sharing
            else:
                epoch, consumed = epoch + 1, 0
        return {"epoch": epoch, "consumed": consumed, **self._order()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration is the rest of the epoch in which state_dict() was called, on however many workers.

        Together they take what was not consumed, each sample once but for what `even` says of the last ones. ValueError
        if the state is of other data, another seed or another order.
        """
        for name, here in self._order().items():
            if state[name] != here:
                raise ValueError(
                    "p3.SplitSampler: the state has %s=%r, and this sampler %r: it would repeat and leave out samples"
                    % (name, state[name], here)
                )
        consumed = _whole("p3.SplitSampler: consumed", state["consumed"], max(1, self._length))
        self._epoch, self._consumed = _whole("p3.SplitSampler: epoch", state["epoch"], 1 << 32), consumed
        self._begun = None

    def __len__(self) -> int:
        return len(self._rest(self._consumed))

    def __iter__(self) -> Iterator[int]:
        epoch, consumed = self._epoch, self._consumed
        self._begun = epoch, consumed, self._worker[1]
        self._epoch, self._consumed = epoch + 1, 0
        turns = self._rest(consumed)
        if not self._shuffle:
            return (turn % self._length for turn in turns)
        # Of NumPy's generators this one gives the same numbers in every version, and workers may differ in theirs.
        order = np.random.RandomState([self._seed, epoch]).permutation(self._length)
        return (int(order[turn % self._length]) for turn in turns)

    def _order(self) -> Dict[str, Any]:
        """What the common order of an epoch is made from."""
        return {"length": self._length, "shuffle": self._shuffle, "seed": self._seed}

    def _rest(self, consumed: int, worker: Optional[Tuple[int, int]] = None) -> range:
        """The places of that worker, or of this one, in the common order, behind those that all have consumed."""
        turns = _turns(self._length - consumed, *(worker or self._worker), self._even)
        return range(turns.start + consumed, turns.stop + consumed, turns.step)


def _turns(length: int, rank: int, num_workers: int, even: Optional[str]) -> range:
    """This worker's places in the common order; those from `length` on mean that order from its start again."""
    if even == "pad":
        length = -(-length // num_workers) * num_workers
    elif even == "drop":
        length = length // num_workers * num_workers
    elif even is not None:
        raise ValueError("even is 'pad', 'drop' or None, not %r" % (even,))
    return range(rank, length, num_workers)


def _worker(rank: Optional[int], num_workers: Optional[int]) -> Tuple[int, int, int]:
    """Its rank, its place among those that share the data, and how many these are."""
    if rank is None and num_workers is None:
        session = _session()
        if session is not None:
            members = session.agreed_members
            return session.rank, members.index(session.rank), len(members)
    if rank is None or num_workers is None:
        rank_of_job, workers_of_job = _worker_of_job()
        num_workers = workers_of_job if num_workers is None else num_workers
        rank = rank_of_job if rank is None else rank
    num_workers = _whole("num_workers", num_workers)
    if num_workers == 0:
        raise ValueError("num_workers is 0; a job has at least one worker")
    if rank is None and num_workers == 1:
        rank = 0
    if rank is None:
        raise ValueError(
            "the rank of this worker, one of %d, is not known yet: join the job first, with mx.kv.create('p3_sync') or "
            "p3.torch.rank(), or pass rank=" % num_workers
        )
    rank = _whole("rank", rank)
    if rank >= num_workers:
        raise ValueError("rank %d must be below num_workers, which is %d: ranks start at 0" % (rank, num_workers))
    return rank, rank, num_workers


def _session() -> Optional[Any]:
    """Never opens one, as that may wait for the whole job."""
    sessions = sys.modules.get("p3.worker.open_sessions")
    return sessions and sessions.opened()


def _worker_of_job() -> Tuple[Optional[int], int]:
    """(rank, workers) of this process."""
    session = _session()
    if session is not None:
        return session.rank, session.num_workers
    if not in_job(os.environ):
        return 0, 1
    settings = Settings.from_env(os.environ)
    settings.require("role", "num_workers")
    return settings.rank, settings.num_workers


def _whole(what: str, number: Any, below: Optional[int] = None) -> int:
    try:
        value = operator.index(number)
    except TypeError:
        value = -1
    if value < 0 or (below is not None and value >= below):
        allowed = "from 0" if below is None else "from 0 to %d" % (below - 1)
        raise ValueError("%s must be a whole number %s, not %r" % (what, allowed, number))
    return value
