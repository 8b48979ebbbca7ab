"""What a scheduler leaves to its successor: the journal itself; and real schedulers that die at any point of random
programs, over real sockets: each node hears all that counts, once, in order."""

import asyncio
import contextlib
import gc
import os
import signal
import socket
import traceback
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from p3.cluster import journal
from p3.cluster.connections import channel, frames
from p3.cluster.connections.vans import accept_workers
from p3.cluster.journal import Journal, Outbox
from p3.cluster.member import Member, SchedulerGone
from p3.cluster.node import Node, listen
from p3.cluster.scheduler import Scheduler
from p3.errors import RendezvousError
from p3.settings import Settings
from p3.worker.links.cluster import ClusterLink

WORKER, SERVER = Node("worker", 0, "a"), Node("server", 1, "b")
HEARTBEAT = frames.HEADER.pack(*{**dict.fromkeys(frames.FIELDS, 0), "kind": frames.HEARTBEAT}.values())


@pytest.fixture
def descriptor():
    made = Journal.make()
    yield made
    os.close(made)


def test_a_journal_is_read_as_it_was_written(descriptor):
    written = Journal(descriptor)
    written.begin([(WORKER, {"kind": "join", "host": "ä"}), (SERVER, {})])
    written.add(WORKER, {"kind": "barrier", "number": 1})
    written.add_demand(True)
    assert list(Journal(descriptor).read()) == [
        {"members": [["worker", 0, "a", {"kind": "join", "host": "ä"}], ["server", 1, "b", {}]], "strategy": None},
        ["worker", 0, {"kind": "barrier", "number": 1}],
        True,
    ]


def test_a_record_that_was_not_written_whole_does_not_count_and_leaves_nothing(descriptor):
    written = Journal(descriptor)
    written.begin([(WORKER, {})])
    whole = os.fstat(descriptor).st_size
    written.add(WORKER, {"kind": "barrier", "number": 1})
    size = os.fstat(descriptor).st_size
    content = os.pread(descriptor, size, 0)
    for cut in range(whole, size):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, content[:cut], 0)
        read = Journal(descriptor)
        assert len(list(read.read())) == 1
        read.add_demand(False)
        assert list(Journal(descriptor).read())[1:] == [False]


def test_a_full_journal_says_so_and_takes_no_more(descriptor, monkeypatch):
    monkeypatch.setattr(journal, "MAX_BYTES", 200)
    written, taken = Journal(descriptor), 0
    while not written.is_full:
        written.add(WORKER, {"kind": "barrier", "number": taken})
        taken += 1
    written.add_demand(True)
    again = Journal(descriptor)
    assert len(list(again.read())) == taken and again.is_full


def test_a_journal_is_a_file_where_python_knows_no_other_memory(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    descriptor = Journal.make()
    Journal(descriptor).add_demand(True)
    assert list(Journal(descriptor).read()) == [True]
    os.close(descriptor)


def test_a_journal_that_cannot_be_written_is_full(descriptor, monkeypatch):
    written = Journal(descriptor)
    written.add_demand(True)
    monkeypatch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    written.add_demand(True)
    assert written.is_full


def test_an_outbox_keeps_what_is_not_known_to_be_heard():
    outbox = Outbox()
    for number in range(10):
        outbox.add({"number": number})
    outbox.forget(3)
    outbox.forget(2)
    assert [message["number"] for message in outbox.after(5)] == [5, 6, 7, 8, 9]
    assert len(outbox) == 5


# Schedulers that die

DEAD = 9  # exit code


class MortalJournal(Journal):
    """Of a scheduler that dies with its n-th message (of a kind), one way or another. 0: with none."""

    def __init__(self, descriptor, left, how, kind=None):
        super().__init__(descriptor)
        self._left, self._how, self._kind, self.tells = left, how, kind, None

    def add(self, node, message):
        self._left -= self._kind in (None, message["kind"])
        if self._left == 0 and self._how == "torn":
            os.pwrite(self._descriptor, b"\x50\0\0\0{", self._bytes)
        if self._left == 0 and self._how in ("unwritten", "torn"):
            os._exit(DEAD)
        super().add(node, message)
        if self._left == 0 and self._how == "untold":
            os._exit(DEAD)
        if self._left == 0:
            self.tells = 1  # and dies with the second


async def run_scheduler(job, listener, journal):
    scheduler = Scheduler(job, listener, journal=journal)
    tell = scheduler._roster.tell_each

    def tell_each(sent):
        for node, message in list(sent):
            if journal.tells == 0:
                os._exit(DEAD)
            tell([(node, message)])
            journal.tells = journal.tells and journal.tells - 1

    scheduler._roster.tell_each = tell_each
    return await scheduler.run()


def in_child(work):
    """The process that returns work() as its exit code."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = work()
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(code)
    return child


def run_schedulers(job, listener, descriptor, deaths):
    """One after the other; the exit code of the last one."""
    os.setsid()
    for death in [*deaths, (0, "")]:
        journal = MortalJournal(descriptor, *death)
        child = in_child(lambda: 0 if asyncio.run(run_scheduler(job, listener, journal)) is None else 1)
        code = os.WEXITSTATUS(os.waitpid(child, 0)[1])
        if code != DEAD:
            break
    return code


@contextlib.contextmanager
def mortal_schedulers(deaths, **settings):
    """The settings of a job whose schedulers die so, and of which the last one does not fail."""
    listener, descriptor = listen("127.0.0.1"), Journal.make()
    job = Settings(
        root_host="127.0.0.1", root_port=listener.getsockname()[1], num_workers=2, secret="0123456789abcdef",
        rendezvous_timeout_s=60, node_host="127.0.0.1", **settings,
    )  # fmt: skip
    child = in_child(lambda: run_schedulers(job, listener, descriptor, deaths))
    try:
        yield job
        assert os.WEXITSTATUS(os.waitpid(child, 0)[1]) == 0  # it has not failed
    except BaseException:
        os.killpg(child, signal.SIGKILL)
        raise
    finally:
        listener.close()
        os.close(descriptor)


class Core:
    """In the place of a node's core: heartbeats, to whichever scheduler is there."""

    def __init__(self, watch):
        self._beat(watch)

    def _beat(self, sock):
        self.beating = asyncio.ensure_future(self._beats(sock))

    async def _beats(self, sock):
        with sock:
            try:
                while True:
                    await channel.send(sock, HEARTBEAT)
                    await channel.read_exactly(sock, len(HEARTBEAT))
                    await asyncio.sleep(0.02)
            except OSError:
                pass

    def replace_watch(self, fd, tls=None):
        self.beating.cancel()
        self._beat(socket.socket(fileno=fd))


class Player:
    def __init__(self, settings, role, rank):
        self.settings = replace(settings, role=role, rank=rank)
        self.heard = []

    async def play(self, program):
        self.member = await Member.join(self.settings)
        core = Core((await self.member.open_watch()).socket)
        await self.member.start()
        assert self.member.outlived
        self.member.outlive(core)
        try:
            await asyncio.wait_for(self._serve() if self.settings.role == "server" else self._work(program), 30)
            await asyncio.wait_for(self.member.close(), 30)  # not for a scheduler that has ended well
        finally:
            core.beating.cancel()

    async def _hear(self, kind=None):
        while True:
            self.heard.append(await self.member.receive())
            if kind is None or self.heard[-1]["kind"] == kind:
                return self.heard[-1]

    async def _work(self, program):
        barriers = counts = 0
        for step in program:
            if step == "barrier":
                barriers += 1
                self.member.send({"kind": "barrier", "number": barriers, "mark": None})
                await self._hear("barrier_done")
            elif step == "count":
                counts += 1
                self.member.send({"kind": "count", "number": counts})
            elif step == "store":
                self.member.send({"kind": "option", "store": 1, "name": "compression", "value": {"type": "bf16"}})
            else:
                self.member.send({
                    "kind": "announce", "store": 0, "name": step, "shape": [10], "dtype": "float32", "sparse": False,
                    "staleness": 0, "gathered": False, "norm": False, "defaults": [], "options": {},
                })  # fmt: skip
        wanted = len([step for step in program if step != "barrier"])
        while len([one for one in self.heard if one["kind"] != "barrier_done"]) < wanted:
            await self._hear()
        self.member.send({"kind": "bye"})

    async def _serve(self):
        while True:
            message = await self._hear()
            if message["kind"] == "define":
                self.member.send({"kind": "defined", "wire_key": message["wire_key"]})
            elif message["kind"] == "set_option":
                self.member.send({"kind": "option_set", "store": message["store"], "name": message["name"]})
            elif message["kind"] == "count_for":
                counted = {"worker": message["worker"], "number": message["number"], "counters": {}}
                self.member.send({"kind": "counted", **counted})
            elif message["kind"] == "departed":
                self.member.send({"kind": "dismissed", "rank": message["rank"]})
            elif message["kind"] == "stop":
                self.member.send({"kind": "bye"})
                return


async def play(settings, program):
    players = [Player(settings, role, rank) for role in ("worker", "server") for rank in range(2)]
    await asyncio.gather(*(player.play(program) for player in players))
    return players


PROGRAMS = st.lists(st.sampled_from(["barrier", "count", "key"]), min_size=1, max_size=12)
DEATHS = st.lists(
    st.tuples(st.integers(1, 12), st.sampled_from(["unwritten", "torn", "untold", "half told"])), max_size=4
)


@settings(max_examples=10, suppress_health_check=list(HealthCheck))
@given(program=PROGRAMS, with_option=st.booleans(), deaths=DEATHS)
def test_whenever_schedulers_die_each_node_hears_all_that_counts_once(program, with_option, deaths):
    keys = iter("key %d" % number for number in range(20))
    program = [next(keys) if step == "key" else step for step in program] + ["store"] * with_option
    with mortal_schedulers(deaths, num_servers=2, timeout_s=20) as job:
        players = asyncio.run(play(job, program))
    names = [step for step in program if step.startswith("key")]
    barriers, counts = program.count("barrier"), program.count("count")
    for player in players:
        heard = [message for message in player.heard if message["kind"] != "bye"]
        if player.settings.role == "worker":
            agreed = [message for message in heard if message["kind"] == "agreed"]
            assert [message["name"] for message in agreed] == names
            assert agreed == [message for message in players[0].heard if message["kind"] == "agreed"]
            done = [message["number"] for message in heard if message["kind"] == "barrier_done"]
            assert done == list(range(1, barriers + 1))
            answers = [message["number"] for message in heard if message["kind"] == "counters"]
            assert sorted(answers) == list(range(1, counts + 1))
        else:
            assert [message["name"] for message in heard if message["kind"] == "define"] == names
            asked = [(one["worker"], one["number"]) for one in heard if one["kind"] == "count_for"]
            assert sorted(asked) == [(rank, number) for rank in range(2) for number in range(1, counts + 1)]
        option = "option_agreed" if player.settings.role == "worker" else "set_option"
        assert [message["kind"] for message in heard].count(option) == with_option


def test_who_has_said_bye_does_not_wait_for_a_scheduler_that_only_had_to_read_it():
    """The first one dies with the last bye: all is in its journal, so the next one has nothing to wait for, and ends
    while those come back whose bye it has read."""
    for _ in range(3):
        with mortal_schedulers([(4, "untold")], num_servers=2, timeout_s=20) as job:
            asyncio.run(play(job, []))


@contextlib.contextmanager
def one_scheduler():
    """-> (settings, played(*players)) of a job with a worker, a server, and a scheduler that ends where they do."""
    descriptor, listener = Journal.make(), listen("127.0.0.1")
    job = Settings(
        root_host="127.0.0.1", root_port=listener.getsockname()[1], num_workers=1, num_servers=1,
        secret="0123456789abcdef", node_host="127.0.0.1",
    )  # fmt: skip

    async def played(*players):
        async def all_of_it():
            scheduling = asyncio.ensure_future(Scheduler(job, listener, journal=Journal(descriptor)).run())
            scheduling.add_done_callback(lambda _: listener.close())
            await asyncio.gather(*(player.play([]) for player in players))
            await scheduling

        await asyncio.wait_for(all_of_it(), 60)

    try:
        yield job, played
    finally:
        listener.close()
        os.close(descriptor)


class Patient(Player):
    """Listens to the end, and beyond."""

    async def _work(self, program):
        await super()._work(program)
        with pytest.raises(SchedulerGone):
            await self.member.receive()


def test_whose_bye_is_noted_does_not_look_for_a_scheduler_that_has_ended(caplog):
    caplog.set_level("INFO")
    with one_scheduler() as (job, played):
        asyncio.run(played(Patient(job, "worker", 0), Player(job, "server", 0)))
    assert not [line for line in caplog.messages if "waits for another one" in line or "refused" in line]


class Impatient(Player):
    """Listens no more while it looks for a scheduler that has ended, and has not told it that its bye is noted."""

    async def _work(self, program):
        self.member._outbox.forget = lambda count: None
        await super()._work(program)
        listening = asyncio.ensure_future(self.member.receive())
        while not self.member.is_away:
            await asyncio.sleep(0.001)
        await channel.cancel(listening)
        while self.member.is_away:
            await asyncio.sleep(0.001)


def test_nobody_reads_of_a_scheduler_that_was_not_found_again_once_all_is_said():
    complaints = []

    async def heard(playing):
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        await playing

    with one_scheduler() as (job, played):
        asyncio.run(heard(played(Impatient(job, "worker", 0), Player(job, "server", 0))))
        gc.collect()
    assert not complaints


class Cut(Player):
    """Of a job of which worker 0 does not reach server 1."""

    async def _work(self, program):
        if self.member.node.rank == 0:
            self.member.send({"kind": "server_lost", "rank": 1, "changes": 0})
        await self._hear("server_departed")
        self.member.send({"kind": "bye"})

    async def _serve(self):
        if self.member.node.rank == 1:
            with pytest.raises(RendezvousError, match="worker 0 .* has lost its connection to it"):
                await self._hear("stop")
            return
        self.member.send({"kind": "inherited", "rank": (await self._hear("inherit"))["rank"]})
        await super()._serve()


@pytest.mark.parametrize("how", ["unwritten", "untold"])
def test_that_a_server_is_not_reached_the_next_scheduler_heeds(how):
    async def played(job):
        players = [Cut(job, role, rank) for role in ("worker", "server") for rank in range(2)]
        await asyncio.gather(*(player.play([]) for player in players))

    with mortal_schedulers([(1, how)], num_servers=2, timeout_s=10, on_server_loss="continue") as job:
        asyncio.run(played(job))


class Frozen(Player):
    """Has come back to the next scheduler, and does nothing more."""

    async def _work(self, program):
        self.member.open_watch = lambda: asyncio.sleep(3600)
        await super()._work(program)


def test_who_comes_back_and_freezes_before_it_is_watched_is_missed():
    async def played(job):
        others = [Player(job, "worker", 0), Player(job, "server", 0)]
        frozen = asyncio.ensure_future(Frozen(job, "worker", 1).play(["barrier", "barrier"]))
        await asyncio.gather(*(player.play(["barrier", "barrier"]) for player in others))
        frozen.cancel()
        await asyncio.gather(frozen, return_exceptions=True)
        return others

    with mortal_schedulers([(1, "unwritten")], num_servers=1, timeout_s=2, on_worker_loss="continue") as job:
        for player in asyncio.run(played(job)):
            assert [one["rank"] for one in player.heard if one["kind"] == "departed"] == [1]


class AtMarks(Player):
    """A worker that comes to one mark after the other, until so many have entered and the last one has gone."""

    def __init__(self, job, rank, begun, entrants=1):
        super().__init__(job, "worker", rank)
        self._begun, self._entrants = begun, entrants

    async def _work(self, program):
        self._begun.set()
        number, entered = 0, []
        while len(entered) < self._entrants:
            number += 1
            self.member.send({"kind": "barrier", "number": number, "mark": {"round": 7, "problem": ""}})
            entered += (await self._hear("barrier_done"))["entered"]
        await self._hear("departed")
        self.member.send({"kind": "bye"})


class Admitting(Player):
    """A server. To the first process that is admitted it does not open its door, to the others it does."""

    def __init__(self, job, is_on_its_way):
        super().__init__(job, "server", 0)
        self._is_on_its_way, self.told = is_on_its_way, []

    async def _serve(self):
        with contextlib.ExitStack() as at_end:
            while True:
                message = await self._hear()
                self.told += [message["kind"]] if message["kind"] in ("admit", "departed") else []
                if message["kind"] == "admit":
                    self.member.send({"kind": "admitted", "rank": message["rank"], "problem": ""})
                    door = self.member.door
                    if not self._is_on_its_way.is_set():
                        await channel.until_ready(door.listeners[-1], "read")
                        self._is_on_its_way.set()
                    else:
                        secret, label = self.settings.job_secret(), str(self.member.node)
                        for van in (await accept_workers(door, secret, label, [message["rank"]])).values():
                            at_end.callback(van.close)
                elif message["kind"] == "departed":
                    self.member.send({"kind": "dismissed", "rank": message["rank"]})
                elif message["kind"] == "count_for":
                    self.member.send({"kind": "counted", "worker": 0, "number": 1, "counters": {}})
                elif message["kind"] == "stop":
                    self.member.send({"kind": "bye"})
                    return


async def leave_after_entering(link, playing, server):
    """The second that was admitted, with which the others go on, and behind whom they end."""
    assert (link.node.rank, link.entered["round"]) == (2, 7)
    link.close("it has seen enough")
    await playing
    assert server.told == ["admit", "departed"] * 2


@pytest.mark.parametrize("traces", [False, True])
def test_who_is_on_its_way_into_the_job_when_the_scheduler_dies_comes_again(tmp_path, traces):
    async def played(job):
        begun, is_on_its_way = asyncio.Event(), asyncio.Event()
        workers, server = [AtMarks(job, rank, begun) for rank in range(2)], Admitting(job, is_on_its_way)
        wants = replace(job, role="worker", join_s=60.0, num_workers=None, num_servers=None, max_workers=None,
                        trace=str(tmp_path) if traces else None)  # fmt: skip

        async def enter():
            await begun.wait()
            return await asyncio.get_running_loop().run_in_executor(None, ClusterLink, wants)

        async def end_the_scheduler():
            await is_on_its_way.wait()
            workers[0].member.send({"kind": "count", "number": 1})  # with which it dies

        playing = asyncio.gather(*(player.play([]) for player in [*workers, server]))
        entering = asyncio.gather(enter(), end_the_scheduler())
        await asyncio.wait([playing, entering], timeout=60, return_when=asyncio.FIRST_COMPLETED)
        assert entering.done(), playing  # why they have failed
        await leave_after_entering(entering.result()[0], playing, server)

    with mortal_schedulers(
        [(1, "unwritten", "count")], num_servers=1, max_workers=3, timeout_s=20, on_worker_loss="continue",
        local_aggregation=False,
    ) as job:
        asyncio.run(played(job))
    assert len(list(tmp_path.glob("*.p3trace"))) == traces


def test_one_that_enters_as_the_scheduler_dies_comes_again_at_once():
    """It is a member by the journal, and knows nothing of it: so it is not waited for."""

    async def played(job):
        begun, opens = asyncio.Event(), asyncio.Event()
        opens.set()
        workers, server = [AtMarks(job, rank, begun, entrants=2) for rank in range(2)], Admitting(job, opens)
        playing = asyncio.gather(*(player.play([]) for player in [*workers, server]))
        wants = replace(job, role="worker", join_s=60.0, num_workers=None, num_servers=None, max_workers=None)
        await begun.wait()
        link = await asyncio.wait_for(asyncio.get_running_loop().run_in_executor(None, ClusterLink, wants), 20)
        await leave_after_entering(link, playing, server)

    with mortal_schedulers(
        [(1, "untold", "entered")], num_servers=1, max_workers=3, timeout_s=25, on_worker_loss="continue",
        local_aggregation=False,
    ) as job:
        asyncio.run(played(job))
