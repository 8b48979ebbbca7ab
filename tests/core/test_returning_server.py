"""A server is lost, another one takes over, and it comes back: cores in one process."""

import asyncio
import socket

import numpy as np
import pytest
from core_jobs import DEADLINE_S, Job, wait_all
from processes import wait_until

from p3._core import P3Server
from p3.server.process import OnceClaimed, apply, hand_over

SLICE = 1000
LENGTH = 6 * SLICE  # three slices of each server
SOME = SLICE + 17  # of a key whose second slice is small enough to be claimed at once


class ReturningJob(Job):
    """Of two servers, of which the first one is lost and comes back."""

    def __init__(self, num_workers=2):
        super().__init__(num_workers, 2, SLICE, local_aggregation=False, outlives_workers=True,
                         worker_options={"outlives_servers": True})  # fmt: skip
        self.former = []

    def lose(self):
        self.leave_to_heir()
        self.tell_of_heir()

    def leave_to_heir(self, rank=0):
        """Of which the workers have not heard."""
        lost = self.servers[rank]
        lost.fail("killed by the test")
        for worker in self.workers:
            wait_until(lambda worker=worker: worker.lost_servers() == [rank], "a server that is lost")
        self.servers[1 - rank].inherit(rank)
        self.former.append(lost)

    def tell_of_heir(self, rank=0):
        for worker in self.workers:
            worker.inherit(rank, 1 - rank, [rank])
            assert worker.lost_servers() == []

    def come_back(self, seniority=None):
        """At a point where nothing is under way."""
        self.servers[0] = self.open(seniority)
        self.take_back()

    def open(self, seniority=None):
        """The server that has come back, to which no worker is connected yet; its heir has handed over."""
        ranks = range(len(self.workers))
        options = dict(local_aggregation=False, outlives_workers=True)
        back = P3Server(0, 2, len(self.workers), "server 0 (here again)", **options)
        for rank in ranks:
            back.expect_worker(rank, f"worker {rank} (here)")
        back.start()
        for plan in self.plans:
            back.define(plan, f"key{plan.wire_key}")
        back.open(seniority or list(ranks))
        wait_until(lambda: not self.servers[1].awaits_claims(), "all claims to the heir")
        self.servers[1].hand_over(0)
        return back

    def take_back(self):
        back = self.servers[0]
        for rank, worker in enumerate(self.workers):
            ours, its = socket.socketpair()
            worker.take_back(0, ours.detach())
            back.connect_worker(rank, its.detach())
        wait_until(lambda: not back.awaits_claims(), "all claims to who has come back")

    def keys_of(self, *lengths):
        """Initialised, each with its length."""
        keys = [(self.key(length), length) for length in lengths]
        for key, length in keys:
            self.init(key, np.ones(length, "float32"))
        return keys

    def train(self, keys, random):
        """A round of each; the sums have the same bits as without any loss."""
        for key, length in keys:
            gradients = [random.standard_normal(length).astype("float32") for _ in self.workers]
            for landing in self.push(key, gradients):
                np.testing.assert_array_equal(landing, gradients[0] + gradients[1])

    def __exit__(self, *_):
        super().__exit__()
        for server in self.former:
            server.stop()


def test_it_goes_on_where_its_heir_was():
    random = np.random.default_rng(1)
    with ReturningJob() as job:
        keys = job.keys_of(LENGTH, SOME)
        for _ in range(3):
            job.train(keys, random)
            job.lose()
            job.train(keys, random)
            job.come_back()
            job.train(keys, random)
            pushed = job.servers[0].counters()["slices_received"]
            job.train(keys, random)
            assert job.servers[0].counters()["slices_received"] > pushed
        job.train(job.keys_of(LENGTH), random)
        assert [node.error for node in job.workers + job.servers] == [None] * 4


def test_no_round_between():
    """Of a key that has had its first value alone, and of one that nobody has."""
    random = np.random.default_rng(2)
    with ReturningJob() as job:
        key, other = job.key(LENGTH), job.key(LENGTH)
        job.init(key, np.ones(LENGTH, "float32"))
        for _ in range(2):
            job.lose()
            job.come_back()
        job.init(other, np.ones(LENGTH, "float32"))
        job.train([(key, LENGTH), (other, LENGTH)], random)


def test_it_is_lost_again_before_the_workers_use_it():
    random = np.random.default_rng(3)
    with ReturningJob() as job:
        keys = job.keys_of(LENGTH)
        job.lose()
        job.open().stop()
        job.servers[1].inherit(0)
        for worker in job.workers:
            worker.inherit(0, 1, [0])
        job.train(keys, random)
        job.come_back()
        job.train(keys, random)


def test_its_heir_inherits_anew_behind_what_it_hands_over():
    """If it is lost again while the heir is still to hear what the workers have."""
    random = np.random.default_rng(6)

    async def hand_over_and_inherit(heir):
        answers, once_claimed = [], OnceClaimed(heir)
        once_claimed.call(lambda: answers.append(hand_over(heir, 0)))
        once_claimed.behind(lambda: answers.append(apply(heir, {"kind": "inherit", "rank": 0})))
        assert answers == []
        job.tell_of_heir()
        while len(answers) < 2:
            await asyncio.sleep(0.001)
        assert [answer["kind"] for answer in answers] == ["handed_over", "inherited"]

    with ReturningJob() as job:
        keys = job.keys_of(LENGTH)
        job.leave_to_heir()
        asyncio.run(asyncio.wait_for(hand_over_and_inherit(job.servers[1]), DEADLINE_S))
        job.tell_of_heir()
        job.train(keys, random)
        job.come_back()
        job.train(keys, random)


def test_it_inherits_itself_before_the_workers_use_it():
    random = np.random.default_rng(5)
    with ReturningJob() as job:
        keys = job.keys_of(LENGTH, SOME)
        job.train(keys, random)
        job.lose()
        job.train(keys, random)
        job.servers[0] = job.open()
        job.leave_to_heir(1)
        job.tell_of_heir(1)
        job.take_back()
        job.train(keys, random)


def test_gradients_that_were_waiting_are_summed():
    """The loss is in the middle of a round, which the heir has nothing of yet."""
    with ReturningJob() as job:
        key = job.key(LENGTH)
        job.init(key, np.ones(LENGTH, "float32"))
        landing, ones = np.empty(LENGTH, "float32"), np.ones(LENGTH, "float32")
        push = job.workers[0].push(key, ones, landing)
        job.lose()
        wait_all([push, job.workers[1].push(key, ones, np.empty(LENGTH, "float32"))])
        np.testing.assert_array_equal(landing, 2)
        job.come_back(seniority=[1, 0])
        job.train([(key, LENGTH)], np.random.default_rng(4))


def test_misuse_is_refused():
    with ReturningJob() as job:
        job.key(LENGTH)
        with pytest.raises(ValueError, match="it is no heir of server 0"):
            job.servers[1].hand_over(0)
        with pytest.raises(ValueError, match="server 0 is not lost"):
            job.workers[0].take_back(0, socket.socket().detach())
        with pytest.raises(ValueError, match="is connected already"):
            job.servers[0].open([0, 1])
        job.servers[1].inherit(0)
        with pytest.raises(ValueError, match="it is the heir of server 0 already"):
            job.servers[1].inherit(0)
        with pytest.raises(ValueError, match="not all workers have said yet what they have of server 0"):
            job.servers[1].hand_over(0)
