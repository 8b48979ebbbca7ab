"""`p3 run`: starts a job's processes, shows their output, and ends all of them when one fails.

The launcher binds the scheduler's port itself and lets the scheduler inherit the socket, so the port cannot be taken
in between. The scheduler reports what becomes of the job through a pipe. Every process leads a group of its own, which
is ended as a whole; local processes also die with the launcher (see execute.py), remote ones with their ssh or their
Ray actor. Where and how they are started is an engine's (engines.py).
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import itertools
import json
import logging
import os
import re
import secrets
import signal
import sys
import time
from typing import Callable, List, Optional, Sequence, Set

from p3.cluster import elastic, encryption
from p3.cluster.engines import Engine, Hosts, Process, start_here
from p3.cluster.execute import signal_name
from p3.cluster.node import listen_as_root
from p3.cluster.output import Output, Source
from p3.cluster.placement import Host, Task
from p3.settings import Settings

log = logging.getLogger("p3.run")

NEVER_JOINED = (
    "all workers ended without ever opening a P3 store, so each trained alone. Create the store with "
    "kv = mx.kv.create('p3_sync') and give the object, not the string, to gluon.Trainer(..., kvstore=kv)."
)

_LAST_WORDS_S = 5.0  # after a failure, for the others to end with an error of their own
_TERMINATE_S = 5.0  # from SIGTERM to SIGKILL
_DRAIN_S = 1.0  # for output that a process's own children may still hold open
_TIMED_OUT = 124  # exit code, as timeout(1) has it


class Running:
    """A started process."""

    def __init__(self, task: Task, process: Process, output: Output) -> None:
        self.task, self.process = task, process
        self.errors: Source = output.source(task.name)
        self.sources = (output.source(task.name), self.errors)
        self._told = False
        pipes = zip((process.stdout, process.stderr), self.sources)
        self._readers = [asyncio.ensure_future(_pump(*ends)) for ends in pipes]

    async def ended(self) -> Running:
        await self.process.wait()
        _, late = await asyncio.wait(self._readers, timeout=_DRAIN_S)
        for reader in late:
            reader.cancel()
        if not self._told:
            self._told = True
            log.info("%s ended with %s", self.task.name, self.process.how())
        return self

    def obituary(self) -> str:
        last = "; its last line: %s" % self.errors.last_line if self.errors.last_line else ""
        where = "" if self.task.host.is_local else " on %s" % self.task.host.name
        return "%s%s ended with %s%s" % (self.task.name, where, self.process.how(), last)


class Launcher:
    def __init__(
        self, settings: Settings, engine: Engine, num_workers: int, num_servers: int, worker_restarts: int = 0,
        began_before: bool = False,
    ) -> None:  # fmt: skip
        self._settings = settings
        self._engine = engine
        self._num_workers, self._num_servers = num_workers, num_servers
        self._job = {"DMLC_NUM_WORKER": str(num_workers), "DMLC_NUM_SERVER": str(num_servers)}  # for all processes
        self._command: Sequence[str] = ()
        self._status: Optional[asyncio.Task] = None  # reads what the scheduler says of the job
        self._secret = secrets.token_hex(32)
        self._output = Output()
        self._running: List[Running] = []
        self._restarts_left = dict.fromkeys(range(num_workers), worker_restarts)
        self._joining: Set[int] = set()  # ranks whose process was started anew, and is not in its place yet
        self._job_started = False
        self._job_failure: Optional[str] = None  # in the scheduler's words
        self._began_before = began_before
        self.may_restart = False  # the job began, now or before, and then failed by itself

    async def run(self, command: Sequence[str], timeout_s: Optional[float], deadline: Optional[float]) -> int:
        """Runs the job to its end; the exit code of `p3 run`. `deadline`: when the time-out of all starts is over."""
        interrupted = asyncio.get_running_loop().create_future()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it for SIGHUP
                asyncio.get_running_loop().add_signal_handler(number, self._interrupt, interrupted, number)
        job = asyncio.ensure_future(self._run(command))
        left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            await asyncio.wait({job, interrupted}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if not job.done():
                job.cancel()
                await asyncio.wait({job})
        finally:
            await self._end_all()
            await self._engine.release()
            if self._status is not None:
                await asyncio.wait({self._status}, timeout=_DRAIN_S)
                self._status.cancel()
        if not job.cancelled():
            return self._conclude(job.result())
        if interrupted.done():
            _say("interrupted by %s; all processes are ended" % signal_name(interrupted.result()))
            return 128 + interrupted.result()
        _say("the job had not ended after --timeout %g s; all processes are ended" % timeout_s)
        return _TIMED_OUT

    # Starting

    async def _run(self, command: Sequence[str]) -> Optional[Running]:
        """To the job's end: the process that failed, if one did."""
        tasks = await self._engine.place(self._num_workers, self._num_servers)
        self._command = command
        listener = listen_as_root(self._engine.root, self._settings.root_port)
        status_read, status_write = os.pipe()
        self._job.update(DMLC_PS_ROOT_URI=self._engine.root, DMLC_PS_ROOT_PORT=str(listener.getsockname()[1]))
        scheduler = Task("scheduler", 0, Host("localhost"), {"DMLC_ROLE": "scheduler"})
        descriptors = {"listen_fd": listener.fileno(), "status_fd": status_write}
        try:
            self._add(scheduler, await start_here(scheduler, self._job, self._secret, [], **descriptors))
        finally:
            listener.close()
            os.close(status_write)
            self._status = asyncio.ensure_future(self._read_status(status_read))
        for task in tasks:
            await self._start(task)
        return await self._wait_for_the_end()

    async def _start(self, task: Task) -> None:
        command = self._command if task.role == "worker" else []
        self._add(task, await self._engine.start(task, self._job, self._secret, command))

    def _add(self, task: Task, process: Process) -> None:
        self._running.append(Running(task, process, self._output))

    async def _read_status(self, descriptor: int) -> None:
        """What the scheduler says of the job: one JSON object a line."""
        reader = asyncio.StreamReader()
        pipe = os.fdopen(descriptor, "rb", 0)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        try:
            while line := await reader.readline():
                self._take_note(json.loads(line))
        finally:
            transport.close()

    def _take_note(self, status: dict) -> None:
        state = status["state"]
        self._job_started = self._job_started or state == "running"
        if state == "lost" and status["rank"] not in self._joining:  # else the loss is its predecessor's
            self._end_lost(status["rank"])
        elif state == "taken":
            self._joining.discard(status["rank"])
        elif state == "failed" and self._job_failure is None:
            self._job_failure = status["text"]

    # Ending

    async def _wait_for_the_end(self) -> Optional[Running]:
        """Returns the process that failed, the likeliest cause if there are several; None if none did."""
        ending = {asyncio.ensure_future(running.ended()) for running in self._running}
        workers_left = self._num_workers
        timeout_s: Optional[float] = None
        while ending:
            done, ending = await asyncio.wait(ending, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in done if self._may_restart(task.result())]:
                done.remove(task)
                ending.add(asyncio.ensure_future((await self._restart(task.result())).ended()))
            if not done and timeout_s is None:
                continue
            failed = [task.result() for task in done if task.result().process.returncode != 0]
            if failed:
                # The scheduler tells the others, which then end with errors of their own.
                if ending and (self._job_started or self._job_failure is not None):
                    await asyncio.wait(ending, timeout=_LAST_WORDS_S)
                return min((r for r in self._running if r.process.returncode), key=self._unlikelihood)
            if not done:  # servers and scheduler outlive the workers
                return None
            workers_left -= sum(task.result().task.role == "worker" for task in done)
            if workers_left == 0:
                if not self._job_started:
                    return None
                timeout_s = self._settings.timeout_s + _LAST_WORDS_S
        return None

    # A lost worker

    def _end_lost(self, rank: int) -> None:
        """The job goes on without this process, which may be frozen or cut off."""
        for running in self._running:
            if (running.task.role, running.task.rank) == ("worker", rank) and running.process.returncode is None:
                running.process.signal(signal.SIGKILL)

    def _may_restart(self, ended: Running) -> bool:
        return (
            ended.task.role == "worker"
            and ended.process.returncode != 0
            and self._job_started
            and self._job_failure is None
            and self._restarts_left[ended.task.rank] > 0
        )

    async def _restart(self, ended: Running) -> Running:
        self._restarts_left[ended.task.rank] -= 1
        self._joining.add(ended.task.rank)
        self._running.remove(ended)
        ended.process.signal(signal.SIGKILL)  # what it left behind in its group
        left = self._restarts_left[ended.task.rank]
        _say("%s; it is started again (%d more restarts allowed)" % (ended.obituary(), left))
        await self._start(ended.task)
        return self._running[-1]

    async def _end_all(self) -> None:
        alive = [running for running in self._running if running.process.returncode is None]
        workers = [running for running in alive if running.task.role == "worker"]
        others = [running for running in alive if running.task.role != "worker"]
        # Workers first, and what the others say of that is not shown: that each lost the others is our doing.
        for running in others:
            for source in running.sources:
                source.mute()
        for group in (workers, others):
            _signal(group, signal.SIGTERM)
            _signal(group, signal.SIGCONT)  # one that is stopped can end, too
            await _ended(group)
            _signal(group, signal.SIGKILL)
        _signal(self._running, signal.SIGKILL)  # also what a process left behind in its group
        await _ended(alive)

    def _interrupt(self, interrupted: asyncio.Future, number: int) -> None:
        if not interrupted.done():
            interrupted.set_result(number)
        else:  # asked twice: no more grace
            _signal(self._running, signal.SIGKILL)

    def _conclude(self, failed: Optional[Running]) -> int:
        if failed is None and self._job_failure is None:
            if not self._job_started:
                _say(NEVER_JOINED)
            return 0
        if failed is not None and not self._echoes(failed):
            _say(failed.obituary())
        if self._job_failure is not None:
            _say("the job failed: " + self._job_failure)
        self.may_restart = self._job_started or self._began_before
        code = failed.process.returncode if failed is not None else 1
        return code if code >= 0 else 128 - code

    def _unlikelihood(self, failed: Running) -> tuple:
        """Sorts the likeliest cause first: 1 is the code of an exception, mostly of one that happened elsewhere."""
        order = ("worker", "server", "scheduler").index(failed.task.role)
        return (self._echoes(failed), failed.process.returncode == 1, order)

    def _echoes(self, failed: Running) -> bool:
        """Whether it ended of the job's failure, or reported it as its own, and so has nothing to add to it."""
        if self._job_failure is None or failed.process.returncode != 1:
            return False
        last = re.sub(r"^(\w+\.)+(?=\w*:)", "", failed.errors.last_line)  # the module of an exception's type
        return failed.task.role != "worker" or self._job_failure in last or (last != "" and last in self._job_failure)


def _say(text: str) -> None:
    sys.stdout.flush()
    print("p3 run: " + text, file=sys.stderr, flush=True)


def _signal(group: Sequence[Running], number: int) -> None:
    for running in group:
        running.process.signal(number)


async def _ended(group: Sequence[Running]) -> None:
    if group:
        await asyncio.wait({asyncio.ensure_future(r.ended()) for r in group}, timeout=_TERMINATE_S)


async def _pump(reader: asyncio.StreamReader, source: Source) -> None:
    try:
        while data := await reader.read(1 << 16):
            source.feed(data)
    finally:
        source.end()


def run(
    settings: Settings,
    make_engine: Callable[[], Engine],
    num_workers: int,
    num_servers: int,
    command: Sequence[str],
    timeout_s: Optional[float],
    restarts: int = 0,
    worker_restarts: int = 0,
    bounds: Optional[elastic.Bounds] = None,
    read_hosts: Optional[Callable[[], Sequence[Host]]] = None,
) -> int:
    """See Launcher. A job that fails is started again, at most `restarts` times, within `timeout_s` for all of them.
    Each start has an engine of its own.

    Not one that was interrupted, and not one that failed before all its processes were connected: what is wrong there,
    like a mistake in the command, a new start would not mend. With `bounds` it comes back on those of `read_hosts` that
    answer, with as many workers as they have slots for; such a start is tried again wherever it fails, as hosts come
    and go. ConfigError if the job cannot be started as asked.
    """
    importlib.import_module("p3._core")  # one error here, and not one of each process, where it is not built
    encryption.require(settings)
    # Whoever started us may have left it non-blocking; then what does not fit into the pipe would be lost.
    os.set_blocking(sys.stdout.fileno(), True)

    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    for attempt in itertools.count(1):
        # With a secret and a port of its own.
        began_before = bounds is not None and attempt > 1
        launcher = Launcher(settings, make_engine(), num_workers, num_servers, worker_restarts, began_before)
        code = asyncio.run(launcher.run(command, timeout_s, deadline))
        if not launcher.may_restart or attempt > restarts:
            return code
        numbers = ""
        if bounds is not None:
            found = elastic.find(settings, read_hosts, bounds, deadline)
            for name, problem in found.silent.items():
                _say("host %s does not answer: %s" % (name, problem))
            if not found.workers:
                slots = sum(host.slots for host in found.hosts)
                text = "the job is not started again: slots on hosts that answer: %d; --min-workers: %d"
                _say(text % (slots, bounds.least))
                return code
            if found.workers != num_workers:
                numbers = " with %d instead of %d workers" % (found.workers, num_workers)
            make_engine, num_workers = functools.partial(Hosts, settings, found.hosts), found.workers
        text = "the job is started again%s (restart %d of %d), as it failed with exit code %d"
        _say(text % (numbers, attempt, restarts, code))
