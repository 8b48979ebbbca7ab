"""`p3 doctor` of hosts that it starts examiners on, by what `p3 run` starts a job's processes with."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import sys
from typing import Dict

from p3.cluster.node import listen_as_root
from p3.doctor.examination import Examination
from p3.errors import ConfigError
from p3.launch.engines import Engine, Process
from p3.settings import Settings

_END_TIMEOUT_S = 5.0
_LAST_WORDS_BYTES = 1 << 14
# By sys.executable as everywhere: P3 is at the same path on all hosts.
_EXAMINER = (sys.executable, "-m", "p3.doctor.examiner")


async def examine(
    settings: Settings, engine: Engine, count: int, timeout_s: float, seconds: float, remedy: str
) -> dict:
    """What examination.py tells of the hosts on which `engine` places `count` workers. `timeout_s`: until an examiner
    has come. ConfigError if the doctor cannot listen, or the engine has no room."""
    listener = listen_as_root(engine.root, settings.root_port)
    secret = secrets.token_hex(32)
    job = {
        "DMLC_PS_ROOT_URI": engine.root, "DMLC_PS_ROOT_PORT": str(listener.getsockname()[1]),
        "DMLC_NUM_WORKER": str(count), "DMLC_NUM_SERVER": str(count),
    }  # fmt: skip
    async with contextlib.AsyncExitStack() as at_end:
        at_end.callback(listener.close)
        at_end.push_async_callback(engine.release)
        tasks = await engine.place(count, 0)
        examination = Examination(listener, secret.encode(), [task.host.name for task in tasks], remedy)
        started: Dict[int, Process] = {}
        at_end.push_async_callback(_end, started)
        at_end.push_async_callback(examination.close)
        for number, task in enumerate(tasks):
            try:
                started[number] = await engine.start(task, job, secret, _EXAMINER)
            except ConfigError as error:
                examination.give_up(number, str(error))
        waits = (_come(examination, number, process, timeout_s) for number, process in started.items())
        await asyncio.gather(*waits)
        return await examination.run(seconds)


async def _come(examination: Examination, host: int, process: Process, timeout_s: float) -> None:
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
        process.signal(signal.SIGTERM)  # it will not end by itself when the doctor does
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


async def _end(started: Dict[int, Process]) -> None:
    """They end by themselves when the examination is closed."""
    waits = {asyncio.ensure_future(process.wait()) for process in started.values()}
    if waits:
        await asyncio.wait(waits, timeout=_END_TIMEOUT_S)
    for process in started.values():
        process.signal(signal.SIGKILL)
    if waits:
        _, left = await asyncio.wait(waits, timeout=_END_TIMEOUT_S)
        for wait in left:  # on a node that is cut off, perhaps
            wait.cancel()
