"""Examines several hosts, whose examiners have come to it in whatever way: asks them in turn. Plain values come out, as
JSON has them:

    {"doctor": {"name", "p3", "protocol"}, "hosts": [...], "uninvited": [names], "paths": [...]}

A host has its `name` and a `problem`, with a `remedy`; `problem` is None if it has answered everything. If it has come,
there are also facts.facts(), `clock_s` (how far its clock is ahead of this one's) and `clock_within_s`. A path goes
`from` one host `to` another, by their numbers; it has `error`, or what paths.ping() tells, `passes` (the largest
packet, None if nothing could be told) and, where it was measured, `mbit` or `rate_error`.

hosts.py starts the examiners over ssh or on Ray; in launched.py they were started by another launcher.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import socket
import time
from typing import Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from p3 import __version__
from p3.cluster.connections import channel
from p3.cluster.connections.strangers import Gate
from p3.cluster.messages import PROTOCOL_VERSION
from p3.doctor import paths
from p3.doctor.door import STEP_TIMEOUT_S, TOKEN_BYTES
from p3.doctor.examiner import MOST_BYTES
from p3.errors import AuthenticationError

log = logging.getLogger("p3")

_CLOCK_READINGS = 8
_ANSWER_TIMEOUT_S = 10.0
# To connect, to prove oneself, and to look for the largest packet that passes: 12 sizes, 3 times each.
_REACH_TIMEOUT_S = paths.CONNECT_TIMEOUT_S + 8.0 + STEP_TIMEOUT_S + 15.0
# Between more, rates are measured only from each to the next and back, round the ring.
_MOST_WITH_ALL_RATES = 5

_WORDS = {"clock": "tell the time", "open": "answer others", "reach": "reach another host", "rate": "measure a rate"}


class _Silent(Exception):
    """A host did not answer."""


class _Examined(NamedTuple):
    facts: dict
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def ask(self, timeout_s: float, do: str, **more) -> dict:
        self.writer.write(json.dumps({"do": do, **more}).encode() + b"\n")
        try:
            line = await asyncio.wait_for(self.reader.readline(), timeout_s)
            return json.loads(line)
        except asyncio.TimeoutError:
            raise _Silent("did not answer within %g s when asked to %s" % (timeout_s, _WORDS[do])) from None
        except (OSError, ValueError):  # ended in the middle of a line, or before one
            raise _Silent("ended when asked to %s" % _WORDS[do]) from None


class Examination:
    """Of hosts whose examiners connect to `listener`. All methods belong to the event loop."""

    def __init__(self, listener: socket.socket, secret: bytes, names: Sequence[str], remedy: str = "") -> None:
        """`names`: of the hosts, until they say another. `remedy`: what to do about one that does not answer, with its
        name in place of %s."""
        self._listener, self._secret, self._names, self._remedy = listener, secret, list(names), remedy
        loop = asyncio.get_running_loop()
        self._joined: List[asyncio.Future] = [loop.create_future() for _ in names]
        self._problems: Dict[int, str] = {}
        self.refused: List[str] = []  # who came, and why it was sent away
        self._uninvited: List[str] = []  # who knew the secret, and had no place
        self._gate = Gate("p3 doctor", log)
        self._accepting = loop.create_task(self._gate.serve(listener, self._let_in))

    async def close(self) -> None:
        await channel.stop_accepting(self._accepting, self._listener)
        for task in list(self._gate.tasks):
            await channel.cancel(task)
        for joined in self._joined:
            if joined.done() and not joined.cancelled():
                joined.result().writer.transport.abort()

    async def joined(self, host: int) -> None:
        """When it has come; cancel it to give up."""
        await asyncio.shield(self._joined[host])

    def give_up(self, host: int, problem: str) -> None:
        self._problems.setdefault(host, problem)

    async def run(self, seconds: float) -> dict:
        """Asks those that have come. `seconds`: of each measurement of a rate."""
        token = secrets.token_hex(TOKEN_BYTES)
        come = self._present()
        clock = dict(zip(come, await asyncio.gather(*(self._asked(host, self._clock(host)) for host in come))))
        opened = (self._asked(host, self._ask(host, "open", token=token)) for host in self._present())
        await asyncio.gather(*opened)
        # All at once; a host itself takes one after the other.
        reached = await asyncio.gather(*(self._reach_others(host, token) for host in self._present()))
        found = {path: result for of_host in reached for path, result in of_host.items()}
        for here, there in measured_pairs(self._present()):
            if "round_trip_s" in found.get((here, there), {}) and {here, there} <= set(self._present()):
                found[here, there].update(await self._rate(here, there, seconds, found[here, there]["round_trip_s"]))
        hosts = []
        for number, name in enumerate(self._names):
            told = {"name": name, "problem": self._problems.get(number)}
            if told["problem"] is not None:
                told["remedy"] = self._remedy.replace("%s", name)
            if self._joined[number].done():
                told.update(self._joined[number].result().facts, **(clock.get(number) or {}))
            hosts.append(told)
        return {
            "doctor": {"name": "this host", "p3": __version__, "protocol": PROTOCOL_VERSION},
            "hosts": hosts,
            "uninvited": self._uninvited,
            "paths": [{"from": here, "to": there, **found[here, there]} for here, there in found],
        }

    def _present(self) -> List[int]:
        return [host for host, joined in enumerate(self._joined) if joined.done() and host not in self._problems]

    async def _asked(self, host: int, question) -> Optional[dict]:
        try:
            return await question
        except _Silent as error:
            self.give_up(host, str(error))
            return None

    async def _clock(self, host: int) -> dict:
        """From the fastest answer, as in NTP: the host read its clock at some moment between question and answer."""
        best = None
        for _ in range(_CLOCK_READINGS):
            before = time.time()
            answer = await self._ask(host, "clock")
            after = time.time()
            if best is None or after - before < 2 * best["clock_within_s"]:
                middle = (before + after) / 2
                best = {"clock_s": answer["wall_s"] - middle, "clock_within_s": (after - before) / 2}
        return best

    async def _reach_others(self, host: int, token: str) -> Dict[Tuple[int, int], dict]:
        found = {}
        for other in self._present():
            if other != host and host in self._present():
                answer = await self._asked(host, self._ask_about(host, other, _REACH_TIMEOUT_S, "reach", token=token))
                if answer is not None:
                    found[host, other] = answer
        return found

    async def _rate(self, host: int, other: int, seconds: float, trip_s: float) -> dict:
        timeout_s = paths.CONNECT_TIMEOUT_S + seconds + 4 * STEP_TIMEOUT_S
        question = self._ask_about(host, other, timeout_s, "rate", seconds=seconds, trip_s=trip_s)
        answer = await self._asked(host, question)
        if answer is None:
            return {}
        return {"rate_error": answer["error"]} if "error" in answer else {"mbit": answer["mbit"]}

    async def _ask(self, host: int, do: str, **more) -> dict:
        return await self._joined[host].result().ask(_ANSWER_TIMEOUT_S, do, **more)

    async def _ask_about(self, host: int, other: int, timeout_s: float, do: str, **more) -> dict:
        of = self._joined[other].result().facts
        more.update(address=of["address"], port=of["port"], udp=of["udp"])
        return await self._joined[host].result().ask(timeout_s, do, **more)

    async def _let_in(self, sock: socket.socket, source: str) -> None:
        close = sock.close
        try:
            await channel.prove_to_connector(sock, self._secret, "scheduler")
            self._gate.proved()
            reader, writer = await asyncio.open_connection(sock=sock, limit=MOST_BYTES)
            close = writer.transport.abort
            facts = json.loads(await reader.readline())
            self._give_place(facts, reader, writer, source)
        except (AuthenticationError, OSError, ValueError) as error:
            self.refused.append("%s came and was sent away: %s" % (source, error))
            close()
        except BaseException:
            close()
            raise

    def _give_place(self, facts: dict, reader, writer, source: str) -> None:
        """That which it says, or the next one that is free. AuthenticationError if there is none."""
        wanted, name = facts.pop("host"), facts.pop("name", None)
        free = [number for number, joined in enumerate(self._joined) if not joined.done()]
        host = free[0] if wanted is None and free else wanted
        if host not in free:
            self._uninvited.append(name or source)
            raise AuthenticationError("it says that it is host %r" % wanted)
        self._names[host] = name or self._names[host]
        self._joined[host].set_result(_Examined(facts, reader, writer))


def measured_pairs(hosts: Sequence[int]) -> Iterator[Tuple[int, int]]:
    """Between which rates are measured: (from, to)."""
    if len(hosts) <= _MOST_WITH_ALL_RATES:
        yield from ((here, there) for here in hosts for there in hosts if here != there)
        return
    for here, there in zip(hosts, [*hosts[1:], hosts[0]]):
        yield here, there
        yield there, here
