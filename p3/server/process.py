"""The server process: joins the job, does what the scheduler tells it, and ends when every worker has left.

Its tensors live in the core (P3Server); this file only carries control messages to it. It imports neither NumPy nor
a framework, so that it starts at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from typing import Callable, Dict, List, Optional, Sequence

from p3._core import P3Error, P3Server
from p3.cluster.connections.channel import cancel
from p3.cluster.connections.strangers import PACE_S
from p3.cluster.connections.vans import DoorStep, Van, accept_workers, admit_workers, provide_for
from p3.cluster.groups import Groups
from p3.cluster.member import Member
from p3.cluster.messages import sendable
from p3.cluster.stragglers import report_late
from p3.cluster.watching import report
from p3.errors import ConfigError, RendezvousError
from p3.plan import combinations
from p3.plan.key_plan import KeyPlan
from p3.plan.options import validate
from p3.server.snapshot_writer import SnapshotWriter
from p3.settings import Settings
from p3.trace.recording import Recording, fd_of

log = logging.getLogger("p3.server")

_LOOK_S = 0.5
_CLAIMS_S = 0.005
DROP_AGAIN_S = 0.002  # all that a store has sent has arrived, and the sender's thread is about to hear of it


def apply(core: P3Server, message: dict, only_sums: bool = False) -> Optional[dict]:
    """Applies a `define`, `recut`, `drop`, `departed`, `inherit`, `set_option` or `count_for` message to the core;
    returns the answer, if there is one. ValueError if it makes no sense. `only_sums`: each worker updates by itself,
    whatever optimizer a store has."""
    if message["kind"] == "define":
        plan = KeyPlan.of(message)
        problem = combinations.contradiction(plan)
        if problem:
            raise ValueError("key %r: %s" % (message["name"], problem))
        if message["predecessor"] == plan.wire_key:
            core.define(plan, str(message["name"]), message["store"])
        else:
            core.define_successor(plan, message["predecessor"])
        return {"kind": "defined", "wire_key": plan.wire_key}
    if message["kind"] == "set_option":
        store, name, value = message["store"], message["name"], message["value"]
        validate(name, value)
        if name == "optimizer" and not only_sums:  # the others are in the plans of keys
            core.set_optimizer(store, value)
        return {"kind": "option_set", "store": store, "name": name}
    if message["kind"] == "count_for":
        counters = dict(core.counters(), cpu_s=time.process_time())
        return {"kind": "counted", "worker": message["worker"], "number": message["number"], "counters": counters}
    if message["kind"] == "recut":
        for key in message["keys"]:
            core.recut(KeyPlan.of(key), key["predecessor"], key["round"])
        return {"kind": "recut_done", "number": message["number"]}
    if message["kind"] == "drop":
        core.drop(message["wire_key"])
    if message["kind"] == "departed":
        core.dismiss_worker(message["rank"])
        return {"kind": "dismissed", "rank": message["rank"]}
    if message["kind"] == "inherit":
        core.inherit(message["rank"])
        return {"kind": "inherited", "rank": message["rank"]}
    return None


def drop_store(core: P3Server, message: dict) -> Optional[dict]:
    """Applies a `drop_store` message; returns the answer, or None while memory is borrowed: then call it again."""
    store = message["store"]
    return {"kind": "dropped", "store": store} if core.drop_store(store) else None


def main(settings: Settings) -> int:
    """Serves one job; the exit code of the process: 0 if every worker left in order, else 1 with the error printed."""
    try:
        return asyncio.run(_serve(settings))
    except (ConfigError, RendezvousError, P3Error) as error:
        _say(error)
        return 1


def _say(error: Exception) -> None:
    print("p3: %s" % error, file=sys.stderr, flush=True)


async def _serve(settings: Settings) -> int:
    member = await Member.join(settings)
    label = str(member.node)
    async with contextlib.AsyncExitStack() as at_end:
        at_end.push_async_callback(member.close)
        try:
            core = P3Server(
                member.node.rank,
                len(member.servers),
                len(member.workers),
                label,
                sum_order=settings.sum_order,
                threads=settings.server_threads,
                machines=member.placement.workers,
                local_aggregation=settings.local_aggregation,
                **_groups(member, settings),
                # A connection to one worker that breaks may be this server's fault: the scheduler decides who is lost.
                outlives_workers=settings.outlives_workers or settings.outlives_servers,
                heartbeat_s=settings.heartbeat_s,
                timeout_s=settings.timeout_s,
                trace_fd=fd_of(Recording.of(settings, member.node)),
                checksums=settings.checksum,
                outlives_scheduler=member.outlived,
            )
            provide_for(settings, label, len(member.workers), "workers", 0)  # how many are local, it is not told
            is_back = member.entered is not None
            if not is_back:
                await _meet_workers(member, core, settings)
            watch = await member.unless_aborted(member.open_watch())
            core.add_watch(watch.socket.detach(), "the scheduler (%s)" % settings.root_host, tls=watch.tls)
            await member.start()
            there = (await member.receive("members"))["ranks"] if is_back else None
            if there is not None:
                _expect_workers(member, core, there)
            admissions = None
            if settings.outlives_workers or is_back:
                admissions = Admissions(core, member.door, settings, label, there or ())
                at_end.push_async_callback(admissions.close)
            core.start()
            member.outlive(core)
            at_end.callback(core.stop)
            log.info("%s: started with %d workers", label, member.began_with if there is None else len(there))
            await _follow(member, core, admissions, settings, there)
            return 0
        except (ConfigError, RendezvousError, P3Error) as error:  # all hear why, by the scheduler; of an abort it knows
            _say(error)  # now: at the end it waits for a scheduler that may be frozen
            text = _labelled(label, error) if isinstance(error, P3Error) else str(error)
            member.send({"kind": "failed", "text": sendable(text)})
            return 1


def _groups(member: Member, settings: Settings) -> dict:
    groups = Groups.of(member.placement, settings.group_sizes)
    return {} if groups is None else {"groups": groups.of_workers, "group_leader": groups.places[member.node.rank]}


async def _meet_workers(member: Member, core: P3Server, settings: Settings) -> None:
    """With whom the job begins."""
    first = range(member.began_with)
    vans = await member.unless_aborted(
        accept_workers(member.door, settings.job_secret(), str(member.node), first, settings=settings)
    )
    if not settings.outlives_workers:
        member.close_door()
    for rank, van in sorted(vans.items()):
        core.add_worker(rank, van.socket.detach(), member.label_of_worker(rank), ring=van.ring, tls=van.tls)
    for rank in range(member.began_with, len(member.workers)):
        core.leave_empty(rank, "worker %d (which has joined)" % rank)


def _expect_workers(member: Member, core: P3Server, there: Sequence[int]) -> None:
    """Of a server that comes back: these connect to it once it has all keys."""
    for rank in range(len(member.workers)):
        if rank in there:
            core.expect_worker(rank, member.label_of_worker(rank))
        else:
            core.leave_empty(rank, "worker %d (which has joined)" % rank)


async def _follow(
    member: Member, core: P3Server, admissions: Optional[Admissions], settings: Settings,
    there: Optional[Sequence[int]] = None,
) -> None:  # fmt: skip
    """Control messages until `stop`. RendezvousError: the first failure, the core's own or the job's. `there`: of a
    server that is back, and is told all keys before it may `open`: the workers, in the order of coming."""
    loop = asyncio.get_running_loop()
    once_claimed = OnceClaimed(core)
    ended = loop.create_future()
    began_at = loop.time()
    label = str(member.node)
    snapshots = SnapshotWriter(core, settings, label, member.node.rank, len(member.servers))

    def on_core_event() -> None:
        loop.remove_reader(core.event_fd)
        look_at_core()

    def look_at_core() -> None:
        if ended.done():
            return
        if core.error is None:  # every worker has left; the scheduler can still fall silent before its last message
            loop.call_later(_LOOK_S, look_at_core)
        else:
            ended.set_exception(RendezvousError(str(core.error)))

    def tell(message: dict) -> None:  # from a thread of the writer
        with contextlib.suppress(RuntimeError):  # the loop has closed: the job ended meanwhile
            loop.call_soon_threadsafe(member.send, message)

    def drop(message: dict) -> None:
        with contextlib.suppress(P3Error):  # the core has failed, and tells everybody
            answer = drop_store(core, message)
            if answer is None:
                loop.call_later(DROP_AGAIN_S, drop, message)
            else:
                member.send(answer)

    def tell_how_it_is() -> None:
        with contextlib.suppress(P3Error):  # the core has failed, and tells everybody
            member.send(report.of_server(core, loop.time() - began_at))

    async def listen() -> None:
        is_open = there is None
        try:
            while True:
                message = await member.receive()
                if message["kind"] == "stop":
                    member.send({"kind": "bye"})
                    return
                if snapshots.apply(message, tell):
                    continue
                if message["kind"] == "drop_store":
                    drop(message)
                    continue
                if message["kind"] == "report":
                    tell_how_it_is()
                    continue
                if message["kind"] == "admit":
                    once_claimed.call(lambda rank=message["rank"]: member.send(admissions.admit(rank)))
                    continue
                if message["kind"] == "hand_over":
                    once_claimed.call(lambda rank=message["rank"]: member.send(hand_over(core, rank)))
                    continue
                if message["kind"] == "inherit":  # maybe what it is still to hand over
                    once_claimed.behind(lambda message=message: member.send(apply(core, message)))
                    continue
                if message["kind"] == "open":
                    core.open(there)
                    is_open = True
                    member.send({"kind": "opened"})
                    continue
                if message["kind"] == "departed" and admissions is not None:
                    admissions.forget(message["rank"])
                answer = apply(core, message, only_sums=settings.outlives_servers)
                if message["kind"] == "define" and snapshots.loads:
                    if await loop.run_in_executor(None, snapshots.load, message, tell):
                        member.send({"kind": "loaded", "wire_key": message["wire_key"]})
                if answer is not None and (is_open or message["kind"] != "define"):  # of one that is back nobody waits
                    member.send(answer)
        except (RendezvousError, ValueError) as error:
            # An abort, or the scheduler is gone; or we cannot do what it says. The workers hear it from us as well.
            text = _labelled(label, error) if isinstance(error, ValueError) else str(error)
            ended.cancel()
            core.fail(text)
            raise RendezvousError(text) from None

    loop.add_reader(core.event_fd, on_core_event)
    listening = asyncio.ensure_future(listen())
    reporting = asyncio.ensure_future(report_late(core, settings.straggler_s, member.send))
    await asyncio.wait({listening, ended}, return_when=asyncio.FIRST_COMPLETED)
    reporting.cancel()
    if listening.done():
        listening.result()
    else:
        await cancel(listening)
        ended.result()


def hand_over(core: P3Server, rank: int) -> dict:
    """What it had inherited of that one, which is back."""
    core.hand_over(rank)
    return {"kind": "handed_over", "rank": rank}


class OnceClaimed:
    """Calls what must wait until all workers have said what they have of lost servers; in the order of asking, which
    for workers that enter is the same on all servers. Threads: the event loop's alone."""

    def __init__(self, core: P3Server) -> None:
        self._core = core
        self._waiting: List[Callable[[], None]] = []

    def call(self, function: Callable[[], None]) -> None:
        self._waiting.append(function)
        if len(self._waiting) == 1:
            self._call_next()

    def behind(self, function: Callable[[], None]) -> None:
        """At once, if nothing waits."""
        if self._waiting:
            self._waiting.append(function)
        else:
            function()

    def _call_next(self) -> None:
        try:
            while self._waiting and not self._core.awaits_claims():
                self._waiting[0]()
                self._waiting.pop(0)
        except ValueError as error:
            self._core.fail(str(error))
        except P3Error:  # the core has failed, and tells everybody
            return
        if self._waiting:
            asyncio.get_running_loop().call_later(_CLAIMS_S, self._call_next)


def _labelled(label: str, error: Exception) -> str:
    return str(error) if str(error).startswith(label) else "%s: %s" % (label, error)


class Admissions:
    """The server's part when a worker enters a running job (p3/cluster/entrances.py), or connects to a server that has
    come back. Threads: the event loop's alone."""

    def __init__(
        self, core: P3Server, door: DoorStep, settings: Settings, label: str, expected: Sequence[int] = ()
    ) -> None:
        """`expected`: ranks of workers that connect to a server which has come back."""
        self._core = core
        # Ranks that may come in, as admit_workers has them.
        self._awaited: Dict[int, object] = {rank: object() for rank in expected}
        self._admitting = asyncio.ensure_future(
            admit_workers(
                door, settings.job_secret(), label, self._awaited, self._let_in, settings=settings, pace_s=PACE_S
            )
        )

    def forget(self, rank: int) -> None:
        """For who was to come as that worker, which has departed."""
        self._awaited.pop(rank, None)

    def admit(self, rank: int) -> dict:
        """What becomes of an `admit` message."""
        problem = self._core.admit_worker(rank)
        if not problem:
            self._awaited[rank] = object()
        return {"kind": "admitted", "rank": rank, "problem": sendable(problem)}

    def _let_in(self, rank: int, van: Van) -> None:
        try:
            self._core.connect_worker(rank, van.socket.detach(), ring=van.ring, tls=van.tls)
        except P3Error as error:  # the core has failed, and has said so itself; or this process has no descriptors left
            log.info("worker %d came too late: %s", rank, error)
            self._core.fail("worker %d could not be let in: %s" % (rank, error))

    async def close(self) -> None:
        await cancel(self._admitting)
