"""Those who watch, at the scheduler: nothing that they do, or leave, holds up the job. The test plays its members."""

import asyncio
import time
from dataclasses import replace

import pytest

from p3.cluster import messages
from p3.cluster.connections import auth, channel
from p3.cluster.member import Member
from p3.cluster.node import listen
from p3.cluster.scheduler import Scheduler
from p3.cluster.watching import watcher, watching
from p3.errors import AuthenticationError, RendezvousError
from p3.settings import Settings

WORKER = {
    "kind": "worker_reported", "at_s": 8.0, "last_round": 4, "bytes_sent": 800, "bytes_received": 400,
    "queued_slices": 0, "memory_bytes": 7, "waited_s": None, "waits": {}, "servers": [[800, 400, 4, 0.0]],
}  # fmt: skip
SERVER = {
    "kind": "server_reported", "at_s": 8.0, "last_round": 4, "bytes_sent": 400, "bytes_received": 800,
    "queued_slices": 0, "memory_bytes": 7, "received_slices": 0, "value_bytes": 5, "buffer_bytes": 0, "late_s": [0.0],
}  # fmt: skip


class Job:
    """A scheduler with one worker and one server; both answer when they are asked to report, unless told otherwise."""

    def __init__(self, tls=False):
        self.listener = listen("127.0.0.1")
        self.settings = Settings(
            root_host="127.0.0.1", root_port=self.listener.getsockname()[1], num_workers=1, num_servers=1,
            secret="0123456789abcdef", rendezvous_timeout_s=5, tls=tls
        )  # fmt: skip
        self.scheduler = Scheduler(self.settings, self.listener)
        self.ending = asyncio.ensure_future(self.scheduler.run())
        self.asked = []

    async def until_watched_by(self, number):
        for _ in range(400):
            if self.scheduler._watching._watchers == number:
                return
            await asyncio.sleep(0.05)
        raise AssertionError("%d watch the job" % self.scheduler._watching._watchers)

    async def start(self):
        self.worker, self.server = await asyncio.gather(
            Member.join(replace(self.settings, role="worker")), Member.join(replace(self.settings, role="server"))
        )
        self.watches = [await self.worker.open_watch(), await self.server.open_watch()]
        await asyncio.gather(self.worker.start(), self.server.start())

    async def answer(self):
        """Each question once."""
        for member, report in ((self.worker, WORKER), (self.server, SERVER)):
            self.asked.append(await member.receive("report"))
            member.send(report)

    async def end(self):
        """In order; how long the scheduler takes."""
        self.worker.send({"kind": "bye"})
        while (await self.server.receive())["kind"] != "stop":
            pass
        self.server.send({"kind": "bye"})
        began = time.monotonic()
        for watch in self.watches:
            watch.close()
        await asyncio.gather(self.worker.close(), self.server.close())
        assert await asyncio.wait_for(self.ending, 20) is None
        return time.monotonic() - began

    async def end_unasked(self):
        """The same, where no question must be under way any more."""
        self.worker.send({"kind": "bye"})
        assert (await self.server.receive())["kind"] == "stop", "a further question was under way"
        self.server.send({"kind": "bye"})
        await asyncio.gather(self.worker.close(), self.server.close(), self.ending)


def play(test, **options):
    async def main():
        await asyncio.wait_for(test(Job(**options)), 60)

    asyncio.run(main())


async def one_view(job):
    looking = asyncio.ensure_future(watcher.look(job.settings, 10.0))
    await job.answer()
    return await looking


@pytest.mark.parametrize("tls", [False, True])
def test_one_who_knows_the_secret_sees_the_job(tls):
    if tls:
        from p3._core import TLS_BUILT_IN

        if not TLS_BUILT_IN:
            pytest.skip("P3 was built without OpenSSL")

    async def test(job):
        missing = (await watcher.look(job.settings, 10.0))["missing"]
        assert missing == "1 of 1 worker (rank 0) and 1 of 1 server (rank 0)"
        await job.start()
        view = await one_view(job)
        assert (view["workers"][0]["sent_per_s"], view["servers"][0]["value_bytes"]) == (100.0, 5)
        assert view["workers"][0]["waited_share"] is None
        await job.end()

    play(test, tls=tls)


def test_nobody_is_asked_unless_somebody_watches():
    async def test(job):
        await job.start()
        await one_view(job)
        assert len(job.asked) == 2
        await job.end_unasked()

    play(test)


def test_who_does_not_answer_is_shown_and_not_asked_again():
    async def test(job):
        await job.start()
        for _ in range(2):
            view = await watcher.look(job.settings, 10.0)
            assert [row["age_s"] for row in (*view["workers"], *view["servers"])] == [None, None]
        await job.answer()
        await job.end_unasked()

    play(test)


def test_an_answer_that_comes_late_counts():
    async def test(job):
        await job.start()
        await watcher.look(job.settings, 10.0)
        await job.answer()
        assert (await one_view(job))["workers"][0]["sent_bytes"] == 800
        await job.end()

    play(test)


def test_to_watch_is_for_those_who_have_proved_to_be_watchers_and_to_join_is_not():
    async def test(job):
        worker = await proved(job, "worker", auth.LOOK)
        watcher = await proved(job, "watcher", auth.CONTROL)
        join = {"kind": "join", "role": "worker", "host": "127.0.0.1", "port": 0, "local": "", "machine": "m", "pid": 1,
                "rank": 0, "version": "0", "protocol": 0, "counts": {}, "settings": {}, "back": None,
                "enters": False}  # fmt: skip
        for sock, first in ((worker, LOOK), (watcher, join)):
            await channel.send_message(sock, first)
            with pytest.raises(OSError):
                await channel.read_exactly(sock, 1)
            sock.close()
        await job.start()
        await job.end()

    play(test)


def test_a_report_that_nobody_asked_for_is_refused():
    async def test(job):
        await job.start()
        job.worker.send(WORKER)
        with pytest.raises(RendezvousError, match=r"worker 0 \(127.0.0.1\) sent a report that nobody asked for"):
            await job.server.receive()
        await asyncio.gather(job.worker.close(), job.server.close())
        assert "nobody asked for" in await job.ending

    play(test)


def test_a_wrong_secret_is_an_error_and_no_matter_to_the_job():
    async def test(job):
        await job.start()
        with pytest.raises(AuthenticationError, match="^the scheduler at 127.0.0.1:.*P3_SECRET"):
            await watcher.look(replace(job.settings, secret="another secret of 16"), 10.0)
        await job.end()

    play(test)


def test_one_that_would_encrypt_where_the_job_does_not_is_refused_before_the_job_has_begun():
    async def test(job):
        with pytest.raises(AuthenticationError, match="P3_TLS=0, but here P3_TLS=1"):
            await watcher.look(replace(job.settings, tls=True), 10.0)
        await job.start()
        await job.end()

    play(test)


LOOK = {"kind": "look", "version": "0", "protocol": messages.PROTOCOL_VERSION, "every_s": 0.5, "span_s": 10.0}


async def silent_watcher(job, **changed):
    """Its socket; it has asked for views."""
    sock = await proved(job, "watcher", auth.LOOK)
    await channel.send_message(sock, dict(LOOK, **changed))
    return sock


async def proved(job, role, purpose):
    sock, _ = await channel.connect_and_prove(
        lambda: connected(job.settings.root_port), b"0123456789abcdef", role, purpose, "scheduler", time.monotonic() + 5
    )
    return sock


async def connected(port):
    import socket

    sock = socket.socket()
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    return sock


def large(view):
    """More than any socket buffers."""
    row = view["links"][0]
    return dict(view, links=[dict(row, host="x" * 1000)] * 10000)


@pytest.fixture
def large_views(monkeypatch):
    made = watching.views.view
    monkeypatch.setattr(watching.views, "view", lambda *arguments: large(made(*arguments)))


def test_one_that_reads_nothing_is_cut_off(large_views, monkeypatch):
    monkeypatch.setattr(watching, "_SLOW_S", 0.3)

    async def test(job):
        await job.start()
        sock = await silent_watcher(job)
        await job.answer()
        await job.until_watched_by(0)
        received = 0
        with pytest.raises(ConnectionError):
            while True:
                received += len(await channel.read_exactly(sock, 1000))
        assert received < 10_000_000, "a whole view"
        sock.close()
        await job.end()

    play(test)


def test_one_that_reads_nothing_does_not_hold_up_the_jobs_end(large_views):
    async def test(job):
        await job.start()
        sock = await silent_watcher(job)
        await job.answer()
        assert await job.end() < 1.5, "the scheduler would wait 2 s for its handlers"
        sock.close()

    play(test)


def test_one_of_another_version_hears_so_and_no_more_watch_than_there_is_room_for(monkeypatch):
    monkeypatch.setattr(watching, "MAX_WATCHERS", 2)

    async def last_word(sock):
        message = await channel.read_message(sock, "ended")
        sock.close()
        return message["text"]

    async def test(job):
        await job.start()
        text = await last_word(await silent_watcher(job, protocol=7, version="0.0.1"))
        assert "this is P3 0.0.1 with protocol 7" in text
        others = [await silent_watcher(job) for _ in range(2)]
        await job.answer()
        for sock in others:
            await channel.read_message(sock, "view")
        assert await last_word(await silent_watcher(job)) == "2 others watch this job already"
        for sock in others:
            sock.close()
        await job.until_watched_by(0)
        await job.end()

    play(test)


def test_whoever_watches_hears_of_the_end():
    async def test(job):
        await job.start()
        views = watcher.views(job.settings, 0.5, 10.0)
        answering = asyncio.ensure_future(job.answer())
        await views.__anext__()
        await answering
        job.worker.send({"kind": "failed", "text": "worker 0 (127.0.0.1): the disk is full"})
        with pytest.raises(watcher.Ended, match="the disk is full"):
            while True:
                await views.__anext__()
        await asyncio.gather(job.worker.close(), job.server.close(), job.ending)
        with pytest.raises(RendezvousError, match="^no job at 127.0.0.1:.* connection refused"):
            await watcher.look(job.settings, 10.0)

    play(test)
