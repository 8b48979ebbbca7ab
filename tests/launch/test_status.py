"""What the scheduler says to the launcher, and whom the launcher blames by it."""

import asyncio
import json
import os
import time
from types import SimpleNamespace

import pytest

from p3.launch import launcher
from p3.launch.launcher import Launcher
from p3.launch.placement import Host, Task
from p3.launch.restarts import REFUND_S
from p3.launch.status import Status
from p3.settings import Settings

SAID = [{"state": "running"}, {"state": "saved", "round": 1}, {"state": "failed", "text": "worker 0: \u00fc"}]
BYTES = b"".join(json.dumps(one).encode() + b"\n" for one in SAID)


@pytest.mark.parametrize("size", [1, 7, 64, len(BYTES)])
def test_lines_are_taken_whole_however_they_come(size):
    async def read():
        taken = []
        reading, writing = os.pipe()
        status = Status(reading, taken.append)
        for begin in range(0, len(BYTES), size):
            os.write(writing, BYTES[begin : begin + size])
            status.read()
            assert taken == SAID[: BYTES[: begin + size].count(b"\n")]
        os.close(writing)
        await asyncio.wait_for(status.over(), 30)
        return taken

    assert asyncio.run(read()) == SAID


class Ended:
    """A worker that ends with that line, perhaps behind an event; `before` is called then."""

    def __init__(self, rank, last_line, before, behind=None):
        self.task = Task("worker", rank, Host("localhost"), {})
        self.process = SimpleNamespace(returncode=1, has_begun=True)
        self.errors = SimpleNamespace(last_line=last_line)
        self._before, self._behind = before, behind

    async def ended(self):
        if self._behind is not None:
            await self._behind.wait()
        self._before()
        return self


@pytest.mark.parametrize("when", ["with the first", "with the last"])
def test_who_only_repeats_the_jobs_failure_is_not_blamed_whenever_that_is_heard_of(when, monkeypatch):
    monkeypatch.setattr(launcher, "_LAST_WORDS_S", 30)
    start, said = Launcher(Settings(), None, 2, 0), []

    def fail(then):
        if when == then:
            said.append({"state": "failed", "text": "worker 1: it is out of memory"})

    async def blamed():
        first_is_seen = asyncio.Event()

        class Said:
            """A Status of which the launcher hears by read() alone."""

            def read(self):
                first_is_seen.set()
                while said:
                    start._take_note(said.pop(0))

        echoing = Ended(0, "P3Error: worker 1: it is out of memory", lambda: fail("with the first"))
        failing = Ended(1, "MemoryError: no room", lambda: fail("with the last"), first_is_seen)
        start._running, start._status = [echoing, failing], Said()
        start.began_at, start._in_place_since = 0.0, dict.fromkeys(start._budgets, 0.0)
        return await asyncio.wait_for(start._wait_for_the_end(), 60)

    assert asyncio.run(blamed()).task.rank == 1


def test_restarts_are_limited_of_what_does_well_for_long_and_then_never_comes_back():
    launcher = Launcher(Settings(on_server_loss="continue"), None, 1, 2, worker_restarts=2, rejoins=True)
    launcher._in_place_since = {("server", 1): time.monotonic() - 5 * REFUND_S}
    assert [launcher._pay_for(("server", 1)) for _ in range(3)] == [True, True, False]
    launcher._take_note({"state": "server_returned", "server": 1, "is_guest": False})
    launcher._in_place_since["server", 1] -= REFUND_S
    assert [launcher._pay_for(("server", 1)) for _ in range(2)] == [True, False]
    assert not launcher._pay_for(("worker", 0))  # the job does not outlive one
