"""Examines several hosts: starts an examiner on each, and asks them in turn. Plain values come out, as JSON has them:

    {"doctor": {"name", "p3", "protocol"}, "hosts": [...], "paths": [...]}

A host has its `name` and `problem`, which is None if it has answered everything; then also facts.facts(), `clock_s`
(how far its clock is ahead of this one's) and `clock_within_s`. A path goes `from` one host `to` another, by their
numbers; it has `error`, or what paths.ping() tells, `passes` (the largest packet, None if nothing could be told) and,
where it was measured, `mbit` or `rate_error`.

Who starts the examiners is of no concern to Examination: `p3 doctor --hostfile` does it over ssh.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import sys
import time
from typing import Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from p3 import __version__
from p3.cluster import channel
from p3.cluster.execute import signal_group
from p3.cluster.engines import root_address
from p3.cluster.messages import PROTOCOL_VERSION
from p3.cluster.node import listen
from p3.cluster.placement import Host, forwarded_environment, ssh_command
from p3.doctor import paths
from p3.doctor.door import STEP_TIMEOUT_S, TOKEN_BYTES
from p3.doctor.examiner import MOST_BYTES
from p3.errors import AuthenticationError, ConfigError
from p3.settings import Settings

_CLOCK_READINGS = 8
_ANSWER_TIMEOUT_S = 10.0
# To connect, to prove oneself, and to look for the largest packet that passes: 12 sizes, 3 times each.
_REACH_TIMEOUT_S = paths.CONNECT_TIMEOUT_S + 8.0 + STEP_TIMEOUT_S + 15.0
_END_TIMEOUT_S = 5.0
# Between more, rates are measured only from each to the next and back, round the ring.
_MOST_WITH_ALL_RATES = 5
_LAST_WORDS_BYTES = 1 << 14

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
    """Of `count` hosts, whose examiners connect to `listener`, in whatever way they are started."""

    def __init__(self, listener: socket.socket, secret: bytes, names: Sequence[str]) -> None:
        self._listener, self._secret, self._names = listener, secret, names
        loop = asyncio.get_running_loop()
        self._joined: List[asyncio.Future] = [loop.create_future() for _ in names]
        self._problems: Dict[int, str] = {}
        self.refused: List[str] = []  # who came, and why it was sent away
        self._accepting = loop.create_task(self._accept())
        self._coming: List[asyncio.Task] = []

    async def close(self) -> None:
        await channel.stop_accepting(self._accepting, self._listener)
        for task in self._coming:
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
            if self._joined[number].done():
                told.update(self._joined[number].result().facts, **(clock.get(number) or {}))
            hosts.append(told)
        return {
            "doctor": {"name": "this host", "p3": __version__, "protocol": PROTOCOL_VERSION},
            "hosts": hosts,
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

    async def _accept(self) -> None:
        while True:
            sock, address = await asyncio.get_running_loop().sock_accept(self._listener)
            self._coming.append(asyncio.get_running_loop().create_task(self._let_in(sock, address[0])))

    async def _let_in(self, sock: socket.socket, address: str) -> None:
        try:
            sock.setblocking(False)
            await channel.prove_to_connector(sock, self._secret, "scheduler")
            reader, writer = await asyncio.open_connection(sock=sock, limit=MOST_BYTES)
            facts = json.loads(await asyncio.wait_for(reader.readline(), _ANSWER_TIMEOUT_S))
            host = facts.pop("host")
            if not 0 <= host < len(self._joined) or self._joined[host].done():
                raise AuthenticationError("it says that it is host %r" % host)
            self._joined[host].set_result(_Examined(facts, reader, writer))
        except (AuthenticationError, OSError, ValueError, asyncio.TimeoutError) as error:
            self.refused.append("%s came and was sent away: %s" % (address, error))
            sock.close()


def measured_pairs(hosts: Sequence[int]) -> Iterator[Tuple[int, int]]:
    """Between which rates are measured: (from, to)."""
    if len(hosts) <= _MOST_WITH_ALL_RATES:
        yield from ((here, there) for here in hosts for there in hosts if here != there)
        return
    for here, there in zip(hosts, [*hosts[1:], hosts[0]]):
        yield here, there
        yield there, here


async def examine(settings: Settings, hosts: Sequence[Host], timeout_s: float, seconds: float) -> dict:
    """Starts an examiner on each host, as `p3 run --hostfile` starts a process. `timeout_s`: until it has come.
    ConfigError if the doctor itself cannot listen."""
    secret = secrets.token_hex(32)
    address = root_address(settings, hosts)
    try:
        listener = listen(address, settings.root_port or 0, or_anywhere=True)
    except OSError as error:
        where = "%s, DMLC_PS_ROOT_PORT=%s" % (address, settings.root_port)
        raise ConfigError("p3 doctor: cannot listen at %s: %s" % (where, error.strerror)) from None
    place = {"DMLC_PS_ROOT_URI": address, "DMLC_PS_ROOT_PORT": str(listener.getsockname()[1])}
    examination = Examination(listener, secret.encode(), [host.name for host in hosts])
    started: List[asyncio.subprocess.Process] = []
    try:
        for number, host in enumerate(hosts):
            started.append(await _start(settings, host, {**place, "P3_RANK": str(number)}, secret))
        waits = (_come(examination, number, process, timeout_s) for number, process in enumerate(started))
        await asyncio.gather(*waits)
        return await examination.run(seconds)
    finally:
        await examination.close()
        listener.close()
        await asyncio.gather(*(_end(process) for process in started))


async def _start(settings: Settings, host: Host, env: Dict[str, str], secret: str) -> asyncio.subprocess.Process:
    words = [sys.executable, "-m", "p3.doctor.examiner", "--secret-stdin"]
    env = {**forwarded_environment(os.environ), "PYTHONUNBUFFERED": "1", **env}
    own = {name: value for name, value in os.environ.items() if name not in ("P3_SECRET", "P3_SECRET_FILE")}
    command = words if host.is_local else ssh_command(settings, host.name, env, os.getcwd(), words)
    try:
        process = await asyncio.create_subprocess_exec(
            *command, env={**own, **env} if host.is_local else own, start_new_session=True, limit=_LAST_WORDS_BYTES,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
    except OSError as error:
        raise ConfigError("p3 doctor: cannot start %r: %s (P3_SSH)" % (command[0], error.strerror)) from None
    process.stdin.write(secret.encode() + b"\n")
    return process


async def _come(examination: Examination, host: int, process, timeout_s: float) -> None:
    """Until the host has joined, or never will."""
    said = asyncio.ensure_future(_said(process.stderr))  # goes on reading when the host has joined
    joined = asyncio.ensure_future(examination.joined(host))
    await asyncio.wait({said, joined}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    if joined.done():
        return
    joined.cancel()
    if said.done():  # its output has ended, and so has it
        text = said.result() or "ended without a word"
    else:
        text = "did not answer within %g s" % timeout_s
    if examination.refused:
        text += " (%s)" % "; ".join(examination.refused)
    examination.give_up(host, text)


async def _said(errors: asyncio.StreamReader) -> str:
    """The last line that it writes until it ends."""
    last = b""
    while data := await errors.read(1 << 12):
        last = (last + data)[-_LAST_WORDS_BYTES:]
    lines = last.decode("utf-8", "replace").strip().splitlines()
    return lines[-1].strip() if lines else ""


async def _end(process: asyncio.subprocess.Process) -> None:
    process.stdin.close()  # over ssh, too, it ends with its input
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(process.wait(), _END_TIMEOUT_S)
    signal_group(process.pid, signal.SIGKILL)
    await process.wait()
