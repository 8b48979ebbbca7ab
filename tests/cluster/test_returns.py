"""A server that comes back (p3/cluster/returns.py): the real scheduler against members that the test plays itself."""

import asyncio
import os
from dataclasses import replace

import pytest
from played_jobs import MARK, SETTINGS, Job, heard, play

from p3.cluster import messages
from p3.cluster.journal import Journal
from p3.cluster.member import Member
from p3.cluster.node import listen
from p3.cluster.roster import Entry
from p3.cluster.scheduler import Scheduler
from p3.errors import RendezvousError

KEY = dict(kind="announce", store=0, name="w", shape=[3], dtype="float32", defaults=[], sparse=False, staleness=0,
           gathered=False, norm=False, options={})  # fmt: skip


async def lose(job, rank, heir):
    """That server; all workers have heard it."""
    job.servers[rank].abort()
    assert (await heard(job.servers[heir], "inherit"))["rank"] == rank
    job.servers[heir].send({"kind": "inherited", "rank": rank})
    for one in job.workers:
        assert (await heard(one, "server_departed"))["rank"] == rank


def waiting(job, rank=None):
    """A process that wants to come back, once it waits."""
    wants = replace(job.settings, role="server", rank=rank, join_s=20.0, num_workers=None, num_servers=None,
                    max_workers=None, on_server_loss="continue")  # fmt: skip
    return asyncio.ensure_future(Member.join(wants))


async def until_it_waits(job, count=1):
    while len(job.scheduler._returns._waiting) < count:
        await asyncio.sleep(0.01)


def rest(job, number=1):
    for one in job.workers:
        one.send(dict(MARK, number=number))


async def be_ready(job, joining):
    back = await joining
    job.watches.append(await back.open_watch())
    await back.start()
    job.servers[back.node.rank] = back
    return back


async def with_server_1_ready(job):
    """It was lost, and server 2 is its heir."""
    await lose(job, 1, heir=2)
    joining = waiting(job)
    await until_it_waits(job)
    rest(job)
    return await be_ready(job, joining)


async def told_of_server_1(job):
    """All workers are told that it has returned, and have not answered."""
    back = await with_server_1_ready(job)
    await heard(back, "open")
    back.send({"kind": "opened"})
    await heard(job.servers[2], "hand_over")
    job.servers[2].send({"kind": "handed_over", "rank": 1})
    for one in job.workers:
        await heard(one, "server_returned")
    return back


async def come_back(job, joining, heir, among=None):
    """All that follows until the mark ends."""
    back = await be_ready(job, joining)
    await heard(back, "open")
    back.send({"kind": "opened"})
    assert (await heard(job.servers[heir], "hand_over"))["rank"] == back.node.rank
    job.servers[heir].send({"kind": "handed_over", "rank": back.node.rank})
    for one in job.workers:
        told = await heard(one, "server_returned")
        assert (told["rank"], told["host"], told["port"]) == (back.node.rank, "127.0.0.1", back.door.port)
        one.send({"kind": "taken_back", "rank": back.node.rank, "done": True})
    return back


async def end_of_mark(job):
    for one in job.workers:
        await heard(one, "barrier_done")


def test_it_is_let_in_at_a_mark_with_all_keys_and_no_worker_goes_on_before_all_have_taken_it_back():
    async def test(job):
        for one in job.workers:
            one.send(KEY)
        for one in job.servers:
            one.send({"kind": "defined", "wire_key": (await heard(one, "define"))["wire_key"]})
        back = await with_server_1_ready(job)
        assert back.node.rank == 1 and back.entered == {"barrier": 1, "round": 7} and back.server_changes == 1
        assert (await heard(back, "members"))["ranks"] == [0, 1]
        define = await back.receive("define")
        assert (define["name"], define["wire_key"], define["predecessor"]) == ("w", 0, 0)
        await back.receive("open")
        back.send({"kind": "opened"})
        assert (await heard(job.servers[2], "hand_over"))["rank"] == 1
        job.servers[2].send({"kind": "handed_over", "rank": 1})
        for one in job.workers:
            assert (await heard(one, "server_returned"))["changes"] == 2
        job.workers[0].send({"kind": "taken_back", "rank": 1, "done": True})
        # Another mark could not have ended either: the scheduler answers in order.
        job.workers[0].send({"kind": "count", "number": 1})
        assert (await heard(back, "count_for"))["worker"] == 0
        job.workers[1].send({"kind": "taken_back", "rank": 1, "done": True})
        await end_of_mark(job)

    play(test)


def test_several_come_back_one_after_the_other_at_one_mark():
    async def test(job):
        await lose(job, 1, heir=2)
        job.servers[2].abort()
        for rank in (1, 2):
            assert (await heard(job.servers[0], "inherit"))["rank"] == rank
            job.servers[0].send({"kind": "inherited", "rank": rank})
        for one in job.workers:
            assert (await heard(one, "server_departed"))["ranks"] == [1, 2]
        first, second = waiting(job), waiting(job, rank=1)
        await until_it_waits(job, 2)
        rest(job)
        await come_back(job, second, heir=0)
        assert (await come_back(job, first, heir=0)).node.rank == 2
        await end_of_mark(job)

    play(test)


@pytest.mark.parametrize("when", ["waiting", "on the way", "ready", "open", "told"])
def test_one_that_is_lost_again_costs_the_others_nothing(when):
    async def test(job):
        await lose(job, 1, heir=2)
        joining = waiting(job)
        await until_it_waits(job)
        if when == "waiting":
            joining.cancel()
            await asyncio.gather(joining, return_exceptions=True)
        else:
            rest(job)
            back = await joining
            if when != "on the way":
                job.watches.append(await back.open_watch())
                await back.start()
            if when in ("open", "told"):
                await heard(back, "open")
                back.send({"kind": "opened"})
                await heard(job.servers[2], "hand_over")
            if when == "told":
                job.servers[2].send({"kind": "handed_over", "rank": 1})
                for one in job.workers:
                    await heard(one, "server_returned")
            back.abort()
        if when in ("ready", "open", "told"):
            assert (await heard(job.servers[2], "inherit"))["rank"] == 1
            if when != "told":  # it was asked for that, before, and has its time
                job.servers[2].send({"kind": "handed_over", "rank": 1})
            job.servers[2].send({"kind": "inherited", "rank": 1})
            for one in job.workers:
                told = await heard(one, "server_departed")
                assert (told["heir"], told["ranks"], told["changes"]) == (2, [1], 3)
                if when == "told":
                    one.send({"kind": "taken_back", "rank": 1, "done": False})
        if when == "waiting":
            rest(job)
        await end_of_mark(job)
        joining = waiting(job)
        await until_it_waits(job)
        rest(job, 2)
        await come_back(job, joining, heir=2)
        await end_of_mark(job)

    play(test)


def test_the_mark_does_not_end_before_one_that_a_worker_cannot_reach_is_lost():
    """Its heir has handed over, and serves nothing of it before it has inherited anew."""

    async def test(job):
        await told_of_server_1(job)
        job.workers[0].send({"kind": "taken_back", "rank": 1, "done": True})
        job.workers[1].send({"kind": "server_lost", "rank": 1, "changes": 2})
        job.workers[1].send({"kind": "taken_back", "rank": 1, "done": False})
        assert (await heard(job.servers[2], "inherit"))["rank"] == 1
        job.servers[2].send({"kind": "inherited", "rank": 1})
        for one in job.workers:
            message = await one.receive()
            while message["kind"] in ("departed", "report"):
                message = await one.receive()
            assert (message["kind"], message["ranks"]) == ("server_departed", [1])
        await end_of_mark(job)

    play(test)


def test_its_heir_may_be_lost_before_it_has_handed_over():
    async def test(job):
        back = await with_server_1_ready(job)
        await heard(back, "open")
        await heard(job.servers[2], "hand_over")
        job.servers[2].abort()
        assert (await heard(job.servers[0], "inherit"))["rank"] == 2  # and not what the lost one was to hand over
        back.send({"kind": "opened"})
        for one in job.workers:
            assert (await heard(one, "server_returned"))["rank"] == 1
            one.send({"kind": "taken_back", "rank": 1, "done": True})
        job.servers[0].send({"kind": "inherited", "rank": 2})
        for one in job.workers:
            assert (await heard(one, "server_departed"))["ranks"] == [2]
        await end_of_mark(job)

    play(test)


def test_a_worker_that_departs_meanwhile_is_not_waited_for():
    async def test(job):
        back = await told_of_server_1(job)
        job.workers[1].abort()
        job.workers[0].send({"kind": "taken_back", "rank": 1, "done": True})
        for one in (job.servers[0], job.servers[2], back):
            assert (await heard(one, "departed"))["rank"] == 1
        await heard(job.workers[0], "barrier_done")

    play(test)


def test_a_worker_enters_behind_it_and_hears_of_no_heir():
    async def test(job):
        await lose(job, 1, heir=2)
        returning = waiting(job)
        await until_it_waits(job)
        wants = replace(job.settings, role="worker", join_s=20.0, num_workers=None, num_servers=None, max_workers=None)
        entering = asyncio.ensure_future(Member.join(wants))
        while not job.scheduler._entrances._entrants.waiting:
            await asyncio.sleep(0.01)
        rest(job)
        await come_back(job, returning, heir=2)
        for one in job.servers:
            one.send({"kind": "admitted", "rank": (await heard(one, "admit"))["rank"], "problem": ""})
        entrant = await entering
        assert [one["heir"] for one in entrant.servers] == [None] * 3 and entrant.server_changes == 2
        job.watches.append(await entrant.open_watch())
        await entrant.start()
        for one in job.workers:
            assert (await heard(one, "barrier_done"))["entered"] == [2]

    play(test)


def test_that_a_worker_had_lost_the_former_one_is_not_said_of_the_one_that_is_back():
    async def test(job):
        await lose(job, 1, heir=2)
        joining = waiting(job)
        await until_it_waits(job)
        rest(job)
        back = await come_back(job, joining, heir=2)
        job.workers[0].send({"kind": "server_lost", "rank": 1, "changes": 1})  # late
        await end_of_mark(job)
        job.workers[0].send({"kind": "count", "number": 1})
        await heard(back, "count_for")
        job.workers[0].send({"kind": "server_lost", "rank": 1, "changes": 2})
        with pytest.raises(RendezvousError, match="worker 0 .* has lost its connection to it"):
            await heard(back, "stop")
        assert (await heard(job.servers[2], "inherit"))["rank"] == 1

    play(test)


def test_who_cannot_come_back_is_told_why():
    async def test(job):
        with pytest.raises(RendezvousError, match="wants to come back to the job, which has servers 0 to 2"):
            await waiting(job, rank=3)
        with pytest.raises(RendezvousError, match="P3_ON_WORKER_LOSS=fail, .* P3_ON_WORKER_LOSS=continue"):
            job.settings = replace(job.settings, on_worker_loss="fail")
            await waiting(job)

    play(test)


def test_a_job_that_ends_with_a_lost_server_takes_none_back():
    async def main():
        job = Job(on_server_loss="fail")
        await job.start()
        with pytest.raises(RendezvousError, match="does not go on without lost servers: --on-server-loss continue"):
            await waiting(job, rank=1)
        job.ending.cancel()
        await asyncio.gather(job.ending, return_exceptions=True)

    asyncio.run(asyncio.wait_for(main(), 20))


PHASES = ("waiting", "ready", "opened", "handed over", "one took it back", "back", "lost again")


@pytest.mark.parametrize("phase", PHASES)
def test_a_scheduler_that_takes_over_tells_everybody_the_same(phase, monkeypatch, caplog):
    """Up to whatever point the one before had come: so nobody misses a message, or hears one twice."""
    told, tell = {}, Entry.tell

    def note(entry, message, encoded=b""):
        if entry.hears and messages.counts(message["kind"]):
            told.setdefault(entry.node, []).append(message)
        tell(entry, message, encoded)

    async def test(job):
        for one in job.workers:
            one.send(KEY)
        for one in job.servers:
            one.send({"kind": "defined", "wire_key": (await heard(one, "define"))["wire_key"]})
        await lose(job, 1, heir=2)
        joining = waiting(job)
        await until_it_waits(job)
        if phase == "waiting":
            joining.cancel()
            return
        rest(job)
        back = await be_ready(job, joining)
        await heard(back, "open")
        await heard(job.servers[2], "hand_over")
        if phase == "ready":
            return
        back.send({"kind": "opened"})
        if phase != "opened":
            job.servers[2].send({"kind": "handed_over", "rank": 1})
            for one in job.workers:
                await heard(one, "server_returned")
        if phase == "lost again":
            back.abort()
            await heard(job.servers[2], "inherit")
            job.servers[2].send({"kind": "inherited", "rank": 1})
            for one in job.workers:
                await heard(one, "server_departed")
        for one in job.workers[: {"one took it back": 1, "back": 2}.get(phase, 0)]:
            one.send({"kind": "taken_back", "rank": 1, "done": True})
        if phase == "back":
            await end_of_mark(job)

    async def take_over(journal):
        running = asyncio.ensure_future(Scheduler(SETTINGS, listen("127.0.0.1"), journal=journal).run())
        await asyncio.sleep(0)  # in which it takes over
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    monkeypatch.setattr(Entry, "tell", note)
    descriptor = Journal.make()
    try:
        play(test, Journal(descriptor))
        before = dict(told)
        told.clear()
        caplog.clear()
        asyncio.run(take_over(Journal(descriptor)))
        assert told.keys() == before.keys()
        for node, heard_before in before.items():
            assert told[node][: len(heard_before)] == heard_before, node
        assert "is back" not in caplog.text  # which the one before had said
    finally:
        os.close(descriptor)
