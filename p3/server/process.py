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
from typing import Optional

from p3._core import P3Error, P3Server
from p3.cluster.member import Member
from p3.cluster.messages import sendable
from p3.cluster.node import Node
from p3.cluster.stragglers import report_late
from p3.cluster.vans import accept_workers
from p3.errors import ConfigError, RendezvousError
from p3.key_plan import KeyPlan
from p3.server.options import validate
from p3.server.lost_workers import LostWorkers
from p3.server.snapshot_writer import SnapshotWriter
from p3.settings import Settings
from p3.trace.recording import Recording, fd_of

log = logging.getLogger("p3.server")

_LOOK_S = 0.5


def apply(core: P3Server, message: dict) -> Optional[dict]:
    """Applies a `define`, `drop`, `set_option` or `count_for` message to the core; returns the answer, if there is one.
    ValueError if it makes no sense."""
    if message["kind"] == "define":
        plan = KeyPlan.of(message)
        if message["predecessor"] == plan.wire_key:
            core.define(plan, str(message["name"]), message["store"])
        else:
            core.define_successor(plan, message["predecessor"])
        return {"kind": "defined", "wire_key": plan.wire_key}
    if message["kind"] == "set_option":
        store, name, value = message["store"], message["name"], message["value"]
        validate(name, value)
        if name == "optimizer":
            core.set_optimizer(store, value)
        elif name == "compression":
            core.set_compression(store, value)
        else:
            core.set_reduction(store, value["type"])
        return {"kind": "option_set", "store": store, "name": name}
    if message["kind"] == "drop":
        core.drop(message["wire_key"])
        return None
    if message["kind"] == "count_for":
        counters = dict(core.counters(), cpu_s=time.process_time())
        return {"kind": "counted", "worker": message["worker"], "number": message["number"], "counters": counters}
    return None


def main(settings: Settings) -> int:
    """Serves one job; the exit code of the process: 0 if every worker left in order, else 1 with the error printed."""
    try:
        asyncio.run(_serve(settings))
    except (ConfigError, RendezvousError, P3Error) as error:
        print("p3: %s" % error, file=sys.stderr)
        return 1
    return 0


async def _serve(settings: Settings) -> None:
    door: list = []
    try:
        member = await Member.join(settings, door)
    except BaseException:
        for opened in door:
            opened.close()
        raise
    try:
        label = str(member.node)
        core = P3Server(
            member.node.rank,
            len(member.servers),
            len(member.workers),
            label,
            sum_order=settings.sum_order,
            threads=settings.server_threads,
            machines=[worker["machine"] for worker in member.workers],
            local_aggregation=settings.local_aggregation,
            outlives_workers=settings.replaces_workers,
            heartbeat_s=settings.heartbeat_s,
            timeout_s=settings.timeout_s,
            trace_fd=fd_of(Recording.of(settings, member.node)),
            checksums=settings.checksum,
        )
        vans = await member.unless_aborted(
            accept_workers(
                door[0],
                settings.job_secret(),
                label,
                range(len(member.workers)),
                settings=settings,
                stays_open=settings.replaces_workers,
            )
        )
        for rank, van in sorted(vans.items()):
            worker = Node("worker", rank, member.workers[rank]["host"])
            core.add_worker(rank, van.socket.detach(), str(worker), ring=van.ring, tls=van.tls)
        watch = await member.open_watch()
        core.add_watch(watch.socket.detach(), "the scheduler (%s)" % settings.root_host, tls=watch.tls)
        await member.start()
        core.start()
        log.info("%s: started with %d workers", label, len(member.workers))
        lost_workers = LostWorkers(core, door[0], settings, label) if settings.replaces_workers else None
        try:
            snapshots = SnapshotWriter(core, settings, label, member.node.rank)
            await _follow(member, core, snapshots, lost_workers, label, settings.straggler_s)
        finally:
            core.stop()
            if lost_workers is not None:
                await lost_workers.close()
    except (RendezvousError, P3Error) as error:  # the scheduler, and so everyone, hears why; of an abort it knows
        text = str(error)
        if isinstance(error, P3Error) and not text.startswith(label):
            text = "%s: %s" % (label, text)
        member.send({"kind": "failed", "text": sendable(text)})
        raise
    finally:
        await member.close()


async def _follow(
    member: Member,
    core: P3Server,
    snapshots: SnapshotWriter,
    lost_workers: Optional[LostWorkers],
    label: str,
    straggler_s: float,
) -> None:
    """Control messages until `stop`. Raises the first failure, the core's own or the job's."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    def on_core_event() -> None:
        asyncio.get_running_loop().remove_reader(core.event_fd)
        look_at_core()

    def look_at_core() -> None:
        error = core.error
        if ended.done():
            return
        if error is None:  # every worker has left; the scheduler can still fall silent before its last message
            asyncio.get_running_loop().call_later(_LOOK_S, look_at_core)
            return
        member.send({"kind": "failed", "text": str(error)})
        ended.set_exception(error)

    def on_written(part: dict) -> None:  # in the writer's thread
        with contextlib.suppress(RuntimeError):  # the loop has closed: the job ended meanwhile
            loop.call_soon_threadsafe(member.send, part)

    async def listen() -> None:
        try:
            while True:
                message = await member.receive()
                if message["kind"] == "stop":
                    member.send({"kind": "bye"})
                    return
                if message["kind"] == "write_snapshot":
                    snapshots.write(message["round"], on_written)
                    continue
                answer = lost_workers.apply(message) if lost_workers is not None else None
                if answer is None:
                    answer = apply(core, message)
                if answer is not None:
                    member.send(answer)
        except RendezvousError as error:  # an abort, or the scheduler is gone: the workers hear it from us as well
            ended.cancel()
            core.fail(str(error))
            raise
        except ValueError as error:
            text = str(error) if str(error).startswith(label) else "%s: %s" % (label, error)
            ended.cancel()
            member.send({"kind": "failed", "text": text})
            core.fail(text)
            raise RendezvousError(text) from None

    asyncio.get_running_loop().add_reader(core.event_fd, on_core_event)
    listening = asyncio.ensure_future(listen())
    reporting = asyncio.ensure_future(report_late(core, straggler_s, member.send))
    await asyncio.wait({listening, ended}, return_when=asyncio.FIRST_COMPLETED)
    reporting.cancel()
    if listening.done():
        listening.result()
    else:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        ended.result()
