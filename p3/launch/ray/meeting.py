"""Where the workers of a Ray Train job agree on what Ray Train does not tell them: an actor, in Ray's event loop.

Nothing but the standard library is imported here, so that the actor starts at once.
"""

from __future__ import annotations

import asyncio
from typing import Dict, Tuple


class Meeting:
    """Of a known number of workers. Nobody gets an answer before all are there; the caller has the deadline."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._joined: Dict[int, Tuple[int, bytes]] = {}
        self._said: Dict[int, bytes] = {}
        self._all_are_here, self._rank_0_has_spoken = asyncio.Event(), asyncio.Event()

    async def join(self, rank: int, node: int, public: bytes) -> Dict[int, Tuple[int, bytes]]:
        """Of each rank, its node and the public key of its KeyPair (seal.py)."""
        self._joined[rank] = node, public
        if len(self._joined) == self._size:
            self._all_are_here.set()
        await self._all_are_here.wait()
        return self._joined

    async def say(self, texts: Dict[int, bytes]) -> None:
        """By rank 0, once: a sealed text for each other rank."""
        self._said = texts
        self._rank_0_has_spoken.set()

    async def hear(self, rank: int) -> bytes:
        await self._rank_0_has_spoken.wait()
        return self._said[rank]
