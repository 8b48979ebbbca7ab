"""Jobs of a real scheduler with members that a test plays itself, all in one event loop: P3_ON_SERVER_LOSS=continue."""

import asyncio
from dataclasses import replace

from p3.cluster.connections import frames
from p3.cluster.member import Member
from p3.cluster.node import listen
from p3.cluster.scheduler import Scheduler
from p3.settings import Settings

SETTINGS = Settings(root_host="127.0.0.1", num_workers=2, num_servers=3, max_workers=3, secret="0123456789abcdef",
                    rendezvous_timeout_s=10, timeout_s=20, on_worker_loss="continue", on_server_loss="continue",
                    node_host="127.0.0.1")  # fmt: skip
HEARTBEAT = frames.HEADER.pack(*{**dict.fromkeys(frames.FIELDS, 0), "kind": frames.HEARTBEAT}.values())
MARK = {"kind": "barrier", "number": 1, "mark": {"round": 7, "problem": ""}}


class Job:
    """That runs, with `workers` and `servers`, all in this event loop."""

    def __init__(self, journal=None, **settings):
        listener = listen("127.0.0.1")
        self.settings = replace(SETTINGS, root_port=listener.getsockname()[1], **settings)
        self.scheduler = Scheduler(self.settings, listener, journal=journal)
        self.ending = asyncio.ensure_future(self.scheduler.run())
        self.watches = []

    async def start(self):
        roles = ["worker"] * 2 + ["server"] * 3
        joining = [Member.join(replace(self.settings, role=role)) for role in roles]
        members = await asyncio.gather(*joining)
        members.sort(key=lambda one: one.node)
        self.servers, self.workers = members[:3], members[3:]
        self.watches += [await one.open_watch() for one in members]
        await asyncio.gather(*(one.start() for one in members))

    async def let_one_in(self, number=1):
        """At the mark of that number. It is on trial then."""
        (entrant,) = await self.admit(1, number)
        self.watches.append(await entrant.open_watch())
        await entrant.start()
        for one in self.workers:
            assert (await heard(one, "barrier_done"))["entered"] == [2]
        await heard(entrant, "caught_up")
        return entrant

    async def admit(self, count, number=1):
        """So many at the mark of that number, in the order of ranks. They are on their way then."""
        wants = replace(self.settings, role="worker", join_s=20.0, num_workers=None, num_servers=None, max_workers=None)
        joining = [asyncio.ensure_future(Member.join(wants)) for _ in range(count)]
        while len(self.scheduler._entrances._entrants.waiting) < count:
            await asyncio.sleep(0.01)
        for one in self.workers:
            one.send(dict(MARK, number=number))
        await asyncio.gather(*(self._admit(one, count) for one in self.servers))
        return sorted(await asyncio.gather(*joining), key=lambda one: one.node)

    async def _admit(self, server, count):
        for _ in range(count):
            admit = await heard(server, "admit")
            server.send({"kind": "admitted", "rank": admit["rank"], "problem": ""})


async def heard(member, kind):
    """Its next message of that kind. A server dismisses at once whom it is to dismiss."""
    while True:
        message = await member.receive()
        if message["kind"] == "departed" and member.node.role == "server":
            member.send({"kind": "dismissed", "rank": message["rank"]})
        if message["kind"] == kind:
            return message


def play(test, journal=None):
    async def main():
        job = Job(journal)
        try:
            await job.start()
            await asyncio.wait_for(test(job), 20)
            assert not job.ending.done()
        finally:
            job.ending.cancel()
            await asyncio.gather(job.ending, return_exceptions=True)

    asyncio.run(main())
