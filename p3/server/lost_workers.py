"""The server's part in replacing a lost worker: tells what it has of it, completes its last step, and lets another
process in. What the scheduler does with that is in p3/cluster/losses.py."""

from __future__ import annotations

import asyncio
import logging
from typing import Dict, Optional

from p3._core import P3Error, P3Server
from p3.cluster.strangers import PACE_S
from p3.cluster.vans import DoorStep, Van, admit_workers
from p3.settings import Settings

log = logging.getLogger("p3.server")


class LostWorkers:
    """Keeps the door open while the job runs. Threads: the event loop's alone."""

    def __init__(self, core: P3Server, door: DoorStep, settings: Settings, label: str) -> None:
        self._core = core
        self._door = door
        self._awaited: Dict[int, object] = {}  # ranks that may come in, as admit_workers has them
        self._admitting = asyncio.ensure_future(
            admit_workers(
                door, settings.job_secret(), label, self._awaited, self._let_in, settings=settings, pace_s=PACE_S
            )
        )

    def apply(self, message: dict) -> Optional[dict]:
        """Applies a `lost` or `fill` message, and returns the answer; None for any other message.
        ValueError if it makes no sense."""
        rank = message.get("rank")
        if message["kind"] == "lost":
            self._awaited.pop(rank, None)
            problem, pushed = self._core.lose_worker(rank)
            keys, rounds = list(pushed.keys()), list(pushed.values())
            return {"kind": "lost_at", "rank": rank, "problem": problem, "keys": keys, "rounds": rounds}
        if message["kind"] == "fill":
            self._core.fill(rank, dict(zip(message["keys"], message["rounds"])), message["skips"])
            if message["last"]:
                self._awaited[rank] = object()
                return {"kind": "filled", "rank": rank}
        return None

    def _let_in(self, rank: int, van: Van) -> None:
        try:
            self._core.replace_worker(rank, van.socket.detach(), ring=van.ring, tls=van.tls)
        except P3Error as error:  # the core has failed, and has said so itself; or this process has no descriptors left
            log.info("worker %d came too late: %s", rank, error)
            self._core.fail("worker %d could not be let in: %s" % (rank, error))

    async def close(self) -> None:
        self._admitting.cancel()
        await asyncio.gather(self._admitting, return_exceptions=True)
        self._door.close()
