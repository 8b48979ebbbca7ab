"""Nodes of a job that have a control plane alone.

    python -m p3.measure.micro.processes.control_nodes ROLE FIRST COUNT MODEL

What `p3 bench control` starts: COUNT nodes of that role in one process, of ranks from FIRST on. Each joins, keeps a
watch connection with heartbeats, announces the keys of the model or defines them, and waits. A line to standard output
each: {"started": s}, when all of them have been told to start; {"agreed": s}, when all know all keys; {"failed": s,
"text": ...}, when all have heard that the job has failed; by a clock that all processes of the host share.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
import time
from typing import List

from p3.cluster.connections import descriptors
from p3.cluster.connections.frames import FIELDS, HEADER, HEARTBEAT
from p3.cluster.member import Member
from p3.errors import RendezvousError
from p3.measure.replay import models
from p3.settings import Settings

_HEARTBEAT = HEADER.pack(*(HEARTBEAT if name == "kind" else 0 for name in FIELDS))
_AT_ONCE = 64  # that join: more would be taken for strangers, and tried again


def main(role: str, first: int, count: int, model: str) -> None:
    settings = Settings.from_env({**os.environ, "DMLC_ROLE": role})
    descriptors.provide(6 * count, "these nodes", "%d nodes" % count)
    asyncio.run(_all(settings, first, count, models.load(model, 1.0)))


async def _all(settings: Settings, first: int, count: int, model: models.Model) -> None:
    gate, phases = asyncio.Semaphore(_AT_ONCE), Phases(count)
    each = [dataclasses.replace(settings, rank=rank) for rank in range(first, first + count)]
    nodes = [Node(its, gate, phases, model) for its in each]
    await asyncio.gather(*(node.live() for node in nodes))


class Phases:
    """Tells when the last one of so many nodes has come to each."""

    def __init__(self, count: int) -> None:
        self._left = dict.fromkeys(("started", "agreed", "failed"), count)

    def reach(self, phase: str, **more) -> None:
        self._left[phase] -= 1
        if self._left[phase] == 0:
            print(json.dumps({phase: time.monotonic(), **more}), flush=True)


class Node:
    def __init__(self, settings: Settings, gate: asyncio.Semaphore, phases: Phases, model: models.Model) -> None:
        self._settings, self._gate, self._phases, self._model = settings, gate, phases, model

    async def live(self) -> None:
        member = Member(self._settings)
        async with self._gate:
            await member._connect()
        await member._be_welcomed()
        async with self._gate:
            watch = await member.open_watch()
        beating = asyncio.ensure_future(self._beat(watch.socket))
        try:
            await member.start()
            self._phases.reach("started")
            await (self._work(member) if self._settings.role == "worker" else self._serve(member))
        except RendezvousError as error:
            self._phases.reach("failed", text=str(error))
        finally:
            beating.cancel()
            watch.close()
            await member.close()

    async def _beat(self, sock) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await loop.sock_sendall(sock, _HEARTBEAT)
            echoed = 0
            while echoed < HEADER.size:
                echoed += len(await loop.sock_recv(sock, HEADER.size - echoed))
            await asyncio.sleep(self._settings.heartbeat_s)

    async def _work(self, member: Member) -> None:
        expected = self._announce(member)
        while expected:
            expected -= (await member.receive())["kind"] == "agreed"
        self._phases.reach("agreed")
        await member.receive()  # that the job has failed: nothing else comes

    def _announce(self, member: Member) -> int:
        tensors = list(self._model.tensors)
        for tensor in tensors:
            member.send({
                "kind": "announce", "store": 0, "name": tensor.name, "shape": list(tensor.shape), "dtype": "float32",
                "defaults": [], "sparse": False, "staleness": 0, "gathered": False, "norm": False, "options": {},
            })  # fmt: skip
        return len(tensors)

    async def _serve(self, member: Member) -> None:
        left = len(list(self._model.tensors))
        while True:
            message = await member.receive()
            if message["kind"] == "define":
                member.send({"kind": "defined", "wire_key": message["wire_key"]})
                left -= 1
                if left == 0:
                    self._phases.reach("agreed")


def arguments(argv: List[str]) -> None:
    role, first, count, model = argv
    main(role, int(first), int(count), model)


if __name__ == "__main__":
    arguments(sys.argv[1:])
