"""The scheduler against members that the test plays itself: what it notices of their lives."""

import asyncio
from dataclasses import replace

import pytest

from p3.cluster import member
from p3.cluster.connections import auth, channel, frames
from p3.cluster.member import Member, _connect_to_scheduler
from p3.cluster.node import listen
from p3.cluster.scheduler import Scheduler
from p3.errors import RendezvousError
from p3.settings import Settings



def frame_of(kind):
    fields = dict.fromkeys(frames.FIELDS, 0)
    return frames.HEADER.pack(*{**fields, "kind": kind}.values())


FRAME = frame_of(frames.HEARTBEAT)
FAILED = frame_of(5)


class Job:
    """A scheduler with one worker and one server, all in this event loop; each has `member` and `watch`."""

    def __init__(self, **settings):
        self.listener = listen("127.0.0.1")
        self.settings = Settings(
            root_host="127.0.0.1",
            root_port=self.listener.getsockname()[1],
            num_workers=1,
            num_servers=1,
            secret="0123456789abcdef",
            rendezvous_timeout_s=3,
            **settings
        )
        self.scheduler = Scheduler(self.settings, self.listener)
        self.ending = asyncio.ensure_future(self.scheduler.run())

    async def join(self):
        self.worker, self.server = await asyncio.gather(
            Member.join(replace(self.settings, role="worker")), Member.join(replace(self.settings, role="server"))
        )
        self.worker_watch = (await self.worker.open_watch()).socket
        self.server_watch = (await self.server.open_watch()).socket

    async def start(self):
        await self.join()
        await asyncio.gather(self.worker.start(), self.server.start())

    async def keep_alive(self, watch):
        while True:
            await channel.send(watch, FRAME)
            assert await channel.read_exactly(watch, len(FRAME)) == FRAME
            await asyncio.sleep(0.05)


def play(test, **settings):
    """Runs test(job); returns the text of the job's failure, None if there was none."""

    async def main():
        job = Job(**settings)
        helpers = []
        try:
            await asyncio.wait_for(test(job, helpers), 20)
            return await asyncio.wait_for(job.ending, 20)
        finally:
            for helper in helpers:
                helper.cancel()

    return asyncio.run(main())


def test_a_job_in_which_all_leave_in_order_has_not_failed():
    async def test(job, _):
        await job.start()
        job.worker.send({"kind": "bye"})
        await job.server.receive("stop")
        job.server.send({"kind": "bye"})
        await asyncio.gather(job.worker.close(), job.server.close())

    assert play(test) is None


def test_signs_of_life_are_echoed_and_their_absence_is_death():
    async def test(job, helpers):
        await job.start()
        helpers.append(asyncio.ensure_future(job.keep_alive(job.server_watch)))
        with pytest.raises(RendezvousError, match="worker 0"):
            await job.server.receive()
        assert not helpers[0].done()

    failure = play(test, timeout_s=0.5)
    assert failure.startswith("scheduler (127.0.0.1): worker 0 (127.0.0.1) sent no heartbeat for 0.5 s")


def test_signs_of_life_are_echoed_between_messages_of_which_many_have_come():
    count = 1000

    async def test(job, _):
        await job.start()
        for number in range(count):
            job.worker.send({"kind": "barrier", "number": number + 1, "mark": None})
        await channel.send(job.worker_watch, FRAME)
        await channel.read_exactly(job.worker_watch, len(FRAME))
        handled = job.scheduler._agreement._barriers_entered.get(job.worker.node, 0)
        assert handled < count
        for _ in range(count):
            await job.worker.receive("barrier_done")
        job.worker.send({"kind": "bye"})
        await job.server.receive("stop")
        job.server.send({"kind": "bye"})
        await asyncio.gather(job.worker.close(), job.server.close())

    assert play(test) is None


def test_a_watch_that_ends_without_a_goodbye_is_death_after_a_while():
    async def test(job, helpers):
        await job.start()
        helpers.append(asyncio.ensure_future(job.keep_alive(job.server_watch)))
        job.worker_watch.close()

    assert "worker 0 (127.0.0.1) ended its data plane without a goodbye" in play(test, timeout_s=0.5)


def test_the_text_of_a_core_that_has_failed_is_no_heartbeat():
    """It is as long as several, and its bytes would be read as rounds and rates."""

    async def test(job, helpers):
        await job.start()
        helpers.append(asyncio.ensure_future(job.keep_alive(job.server_watch)))
        entries.extend(job.scheduler._roster.entries)
        await channel.send(job.worker_watch, FAILED + b"server 0 (10.0.0.1): the script ended with an error" * 9)
        job.worker_watch.close()

    entries = []
    assert "worker 0 (127.0.0.1) ended its data plane without a goodbye" in play(test, timeout_s=0.5)
    (worker,) = [one for one in entries if one.node.role == "worker"]
    assert worker.last_round == 0


def test_a_control_connection_that_ends_without_a_goodbye_is_death():
    async def test(job, _):
        await job.start()
        await job.worker.close()

    assert "worker 0 (127.0.0.1) closed its control connection without a goodbye" in play(test)


def test_the_first_failure_is_the_jobs_and_reaches_all_in_full():
    async def test(job, _):
        await job.start()
        job.worker.send({"kind": "failed", "text": "worker 0 (127.0.0.1): the disk is full"})
        job.worker.send({"kind": "failed", "text": "a consequence"})
        for node in (job.worker, job.server):
            with pytest.raises(RendezvousError, match=r"^worker 0 \(127.0.0.1\): the disk is full$"):
                await node.receive()
            await node.close()

    assert play(test) == "worker 0 (127.0.0.1): the disk is full"


def test_a_member_that_reads_nothing_holds_up_nobody():
    async def test(job, helpers):
        await job.start()
        for _ in range(200):  # 40 MB for a worker that reads none of them, more than any socket buffers
            job.worker.send({"kind": "order", "store": 0, "names": ["x" * 200000]})
        key = {"store": 0, "name": "w", "shape": [3], "dtype": "float32", "sparse": False, "staleness": 0,
               "gathered": False, "norm": False, "defaults": [], "options": {}}
        job.worker.send(dict(key, kind="announce"))
        assert (await job.server.receive("define"))["name"] == "w"
        job.worker.send({"kind": "failed", "text": "that will do"})
        await job.server.close()

    assert play(test) == "that will do"


def test_a_node_is_not_ready_before_it_is_watched():
    async def test(job, _):
        _, job.server = await asyncio.gather(
            Member.join(replace(job.settings, role="worker")), Member.join(replace(job.settings, role="server"))
        )
        job.server.send({"kind": "ready"})

    assert "server 0 (127.0.0.1) said that it is ready at the wrong time" in play(test)


def test_nodes_that_cannot_connect_to_each_other_are_named():
    async def test(job, helpers):
        await job.join()
        job.worker.send({"kind": "ready"})

    failure = play(test, timeout_s=2)
    assert failure.endswith("no connection between the nodes within 3 s: waiting for server 0 (127.0.0.1)")


def test_a_node_that_is_cut_off_while_it_waits_for_others_gives_up(monkeypatch):
    monkeypatch.setattr(member, "_MARGIN_S", 0.1)

    async def test(job, _):
        await job.join()
        job.server._settings = replace(job.settings, rendezvous_timeout_s=0.1)  # the scheduler says nothing so soon
        with pytest.raises(RendezvousError, match="server 0.*heard nothing from the scheduler .* for 0.2 s"):
            await job.server.unless_aborted(asyncio.Event().wait())
        job.server.abort()

    assert "server 0 (127.0.0.1) closed its control connection" in play(test)


def test_a_data_connection_is_not_for_the_scheduler():
    async def test(job, _):
        worker = replace(job.settings, role="worker")
        sock, _ = await _connect_to_scheduler(worker, b"0123456789abcdef", auth.DATA, 1)
        with pytest.raises(OSError):
            await channel.read_exactly(sock, 1)
        sock.close()
        await job.start()
        await job.worker.close()

    assert "closed its control connection" in play(test)


def test_a_worker_that_is_lost_is_not_late():
    late = {"kind": "late", "worker": 0, "of_machine": False, "key": "w", "round": 8, "waited_s": 50.0, "waiting": 1}

    async def test(job, _):
        await job.start()
        job.worker.abort()
        await job.server.receive("departed")
        job.server.send(late)
        job.server.send({"kind": "dismissed", "rank": 0})
        await job.server.close()

    failure = play(test, on_worker_loss="continue", stuck_s=40.0, local_aggregation=False)
    assert "no other worker is left" in failure
