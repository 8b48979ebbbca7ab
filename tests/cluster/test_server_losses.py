"""P3_ON_SERVER_LOSS=continue: the scheduler against members that the test plays itself, when a server is lost."""

import asyncio
import contextlib
import json
import os
from dataclasses import replace

import pytest
from played_jobs import HEARTBEAT, MARK, SETTINGS, Job, heard, play

from p3.cluster import entrances, scheduler
from p3.cluster.connections import channel
from p3.cluster.journal import Journal
from p3.cluster.node import Node, listen
from p3.cluster.scheduler import Scheduler
from p3.errors import RendezvousError


def test_one_that_is_on_trial_when_a_server_is_lost_departs_and_hears_of_no_heir():
    async def test(job):
        entrant = await job.let_one_in()
        job.servers[1].abort()
        with pytest.raises(RendezvousError, match="a server was lost before its first members"):
            while True:
                assert (await entrant.receive())["kind"] != "server_departed"
        assert (await heard(job.servers[2], "inherit"))["rank"] == 1
        job.servers[2].send({"kind": "inherited", "rank": 1})
        for one in (job.servers[0], job.servers[2]):
            await heard(one, "departed")
        for one in job.workers:
            told = {(await job_news(one)) for _ in range(2)}
            assert told == {("server_departed", 1), ("departed", 2)}

    async def job_news(member):
        while True:
            message = await member.receive()
            if message["kind"].endswith("departed"):
                return message["kind"], message["rank"]

    play(test)


def test_a_loss_that_one_on_trial_speaks_of_costs_no_server():
    async def test(job):
        entrant = await job.let_one_in()
        entrant.send({"kind": "server_lost", "rank": 1, "changes": 0})
        with pytest.raises(RendezvousError, match=r"worker 2 .* lost its connection to server 1 .* while it joined"):
            await heard(entrant, "server_departed")
        for one in job.servers:
            assert (await heard(one, "departed"))["rank"] == 2

    play(test)


@pytest.mark.parametrize("lost", [[0, 1, 2], [2, 0, 1]])
def test_a_worker_that_reaches_no_server_any_more_is_lost_itself(lost):
    """As one whose host was cut off and is back: its servers have given it up already, and the scheduler has not."""

    async def test(job):
        job.workers[0].outlived = True  # so it looks for the scheduler again, whose connection it loses
        job.workers[0].outlive(None)
        for rank in lost:
            job.workers[0].send({"kind": "server_lost", "rank": rank, "changes": 0})
        for one in [*job.servers, job.workers[1]]:
            assert (await heard(one, "departed"))["rank"] == 0
        with pytest.raises(RendezvousError, match="worker 0 .* the job has gone on without it"):
            await heard(job.workers[0], "report")
        job.workers[1].send({"kind": "server_lost", "rank": 2, "changes": 0})  # and no server was
        assert (await heard(job.servers[0], "inherit"))["rank"] == 2

    play(test)


def test_a_server_that_is_given_up_for_two_reasons_departs_once():
    """It is lost, which is settled in a moment; before that it is given up as one that did not come back."""

    async def test(job):
        errors, settled = [], asyncio.Event()
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: errors.append(context))
        entry = job.scheduler._roster.find("server", 1)
        job.scheduler._lose_server(entry, "Server 1 is lost.")
        job.scheduler._depart_server(entry, "Server 1 did not come back.")
        asyncio.get_running_loop().call_later(scheduler._SECOND_LOOK_S, settled.set)
        assert (await heard(job.servers[2], "inherit"))["rank"] == 1
        job.servers[2].send({"kind": "inherited", "rank": 1})
        for one in job.workers:
            assert (await heard(one, "server_departed"))["rank"] == 1
        await settled.wait()
        assert errors == []

    play(test)


def test_a_worker_that_is_given_up_for_two_reasons_departs_once():
    """Also if another process has its place by then."""

    async def test(job):
        errors, settled = [], asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _loop, context: errors.append(context))
        expelled = await job.let_one_in()
        entry = job.scheduler._roster.find("worker", 2)
        job.scheduler._entrances.expel(entry, "It has done something wrong.")
        job.scheduler._depart(entry, "Worker 2 did not come back.")
        loop.call_later(entrances._WORD_S, settled.set)
        with pytest.raises(RendezvousError, match="something wrong"):
            await heard(expelled, "departed")
        second = await job.let_one_in(number=2)
        await settled.wait()
        job.workers[0].send({"kind": "barrier", "number": 3, "mark": None})
        for one in [job.workers[1], second]:
            one.send({"kind": "barrier", "number": 3, "mark": None})
        told = await heard(job.workers[0], "barrier_done")
        assert told["members"] == [0, 1, 2] and errors == []
        records = [record for record in journal.read() if type(record) is list and record[2]["kind"] in KINDS]
        assert [record[2]["kind"] for record in records] == ["entered", "departed", "entered"]

    KINDS, descriptor = ("entered", "departed"), Journal.make()
    journal = Journal(descriptor)
    try:
        play(test, journal)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("others_wait", [False, True])
def test_a_goodbye_of_one_on_trial_is_no_members_and_its_place_is_free_again(others_wait):
    async def test(job):
        first = await job.let_one_in()
        if others_wait:
            for one in job.workers:
                one.send(dict(MARK, number=2))
            while 2 not in job.scheduler._agreement._barriers:
                await asyncio.sleep(0.01)
        first.send({"kind": "bye"})
        with pytest.raises(RendezvousError, match="worker 2 .* said goodbye before its first members"):
            await heard(first, "departed")
        for one in job.servers:
            await heard(one, "departed")
        for one in job.workers:
            assert (await heard(one, "departed"))["rank"] == 2
            if not others_wait:
                one.send(dict(MARK, number=2))
        for one in job.workers:
            assert (await heard(one, "barrier_done"))["members"] == [0, 1]
        second = await job.let_one_in(number=3)
        for one in [*job.workers, second]:
            one.send(dict(MARK, number=4))
        for one in [*job.workers, second]:
            assert (await heard(one, "barrier_done"))["members"] == [0, 1, 2]

    play(test)


def test_one_on_its_way_is_heard_when_it_has_come():
    """What it said before would be left behind of it."""

    async def test(job):
        (early,) = await job.admit(1)
        early.send(MARK)
        with pytest.raises(RendezvousError, match="worker 2 .* sent a 'barrier' message before it had taken its place"):
            await heard(early, "barrier_done")
        for one in job.workers:
            assert (await heard(one, "barrier_done"))["members"] == [0, 1]
        await job.let_one_in(number=2)

    play(test)


def test_a_job_does_not_wait_for_one_that_is_gone_on_its_way_behind_the_last_worker():
    async def main():
        job = Job(max_workers=4)
        await job.start()
        came, on_its_way = await job.admit(2)
        job.watches.append(await came.open_watch())
        await came.start()
        await heard(came, "caught_up")
        for one in job.workers:  # at whose mark it was on its way
            one.abort()
        for one in [*job.servers, came]:
            for _ in job.workers:
                await heard(one, "departed")
        came.send(dict(MARK, number=2, mark=None))
        await heard(came, "barrier_done")
        came.send({"kind": "bye"})
        for one in job.servers:
            await heard(one, "stop")
            one.send({"kind": "bye"})
        on_its_way.abort()
        return await job.ending

    assert asyncio.run(asyncio.wait_for(main(), 20)) is None


@pytest.mark.parametrize("stuck", [{1}, {0, 1, 2}])
def test_a_server_that_does_not_end_behind_the_last_worker_costs_no_job_that_goes_on_without_it(stuck, caplog):
    """As one that is frozen then: whether its silence, or that it does not end, is noticed first, is chance."""

    async def keep_alive(watch):
        while True:
            await channel.send(watch, HEARTBEAT)
            await channel.read_exactly(watch, len(HEARTBEAT))
            await asyncio.sleep(0.05)

    async def main():
        job = Job(timeout_s=1.0)
        await job.start()
        beating = [asyncio.ensure_future(keep_alive(one.socket)) for one in job.watches]
        try:
            for one in job.workers:
                one.send({"kind": "bye"})
            for rank, one in enumerate(job.servers):
                await asyncio.wait_for(heard(one, "stop"), 20)
                if rank not in stuck:
                    one.send({"kind": "bye"})
            return await asyncio.wait_for(job.ending, 20)
        finally:
            for one in [*beating, job.ending]:
                one.cancel()
            await asyncio.gather(*beating, job.ending, return_exceptions=True)

    assert asyncio.run(main()) is None
    assert "All workers were done by then" in caplog.text and "takes over" not in caplog.text


def reports_of_a_successor(lost, entrant=False):
    """Of a scheduler that dies with those servers lost, and perhaps one on trial."""

    async def first(journal):
        job = Job(journal)
        await job.start()
        if entrant:
            (await job.let_one_in()).abort()
        job.ending.cancel()
        await asyncio.gather(job.ending, return_exceptions=True)
        for one in [*job.workers, *job.servers]:
            one.abort()

    async def second(journal, write):
        settings = replace(SETTINGS, timeout_s=0.5)
        running = asyncio.ensure_future(Scheduler(settings, listen("127.0.0.1"), write, journal=journal).run())
        await asyncio.sleep(0)  # in which it takes over
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    descriptor, (read, write) = Journal.make(), os.pipe()
    with contextlib.ExitStack() as at_end:
        for each in (descriptor, read):
            at_end.callback(os.close, each)
        journal = Journal(descriptor)
        asyncio.run(first(journal))
        for rank in lost:
            journal.add(Node("server", rank, "127.0.0.1"), {"kind": "server_departed"})
        asyncio.run(second(Journal(descriptor), write))
        os.close(write)
        return [json.loads(line) for line in os.read(read, 1 << 16).splitlines()]


def test_a_successor_expels_who_was_on_trial():
    reported = reports_of_a_successor([1], entrant=True)
    assert [one["rank"] for one in reported if one["state"] == "expelled"] == [2], reported
    assert not [one for one in reports_of_a_successor([], entrant=True) if one["state"] == "expelled"]


def test_a_successor_reports_each_of_several_servers_that_are_lost():
    reported = reports_of_a_successor([0, 2])
    assert [one["server"] for one in reported if one["state"] == "server_departed"] == [0, 2], reported


def test_one_server_has_no_heir_whoever_starts_the_scheduler(capsys):
    settings = replace(SETTINGS, root_port=1, num_servers=1, max_workers=None, rendezvous_timeout_s=0.5)
    assert scheduler.main(settings) == 1
    assert "needs another server that can take over: p3 run -s 2" in capsys.readouterr().err
