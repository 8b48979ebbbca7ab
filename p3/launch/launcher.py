"""One start of a job: starts its processes, shows their output, and ends all of them when one fails.

The launcher binds the scheduler's port itself and lets the scheduler inherit the socket, so the port cannot be taken
in between. The scheduler reports what becomes of the job through a pipe; one that dies while the job runs is started
again, and the job goes on (schedulers.py). Every process leads a group of its own, which
is ended as a whole; local processes also die with the launcher (see execute.py), remote ones with their ssh or their
Ray actor. Where and how they are started is an engine's (engines.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import re
import secrets
import signal
import time
from typing import Awaitable, Dict, List, Optional, Sequence, Set

from p3.cluster.connections import descriptors
from p3.cluster.node import listen_as_root
from p3.errors import ConfigError
from p3.launch.engines import Engine, Process, start_here
from p3.launch.execute import SAME_SIGNAL_S, signal_name
from p3.launch.output import Output
from p3.launch.placement import Host, Place, Task
from p3.launch.restarts import Budget
from p3.launch.running import DRAIN_S, Running, all_ended, signal_all
from p3.launch.schedulers import Schedulers
from p3.launch.status import Status
from p3.launch.telling import Telling
from p3.settings import Settings

log = logging.getLogger("p3.run")

NEVER_JOINED = (
    "all workers ended without ever joining the job, so each trained alone. With PyTorch, wrap the optimizer: "
    "p3.torch.DistributedOptimizer(optimizer, model). With MXNet, create the store, kv = mx.kv.create('p3_sync'), and "
    "give the object, not the string, to gluon.Trainer(..., kvstore=kv)."
)

_SCHEDULER = Task("scheduler", 0, Host("localhost"), {"DMLC_ROLE": "scheduler"})
_LAST_WORDS_S = 5.0  # after a failure, for the others to end with an error of their own
_PATIENCE_S = 864000  # of a process that joins: `p3 run` ends it with the job
_TIMED_OUT = 124  # exit code, as timeout(1) has it


def _secret_of(settings: Settings) -> str:
    """The user's, or a new one. ConfigError if that cannot serve."""
    if settings.secret is None and settings.secret_file is None:
        return secrets.token_hex(32)
    secret = os.fsdecode(settings.job_secret())
    if secret.strip() != secret or "\n" in secret:
        raise ConfigError("p3 run: the secret has a line break in it, or white space around it, and other hosts get it "
                          "as a line: set another P3_SECRET or P3_SECRET_FILE")  # fmt: skip
    return secret


class Launcher:
    def __init__(
        self, settings: Settings, engine: Engine, num_workers: int, num_servers: int, worker_restarts: int = 0,
        began_before: bool = False, grace_s: float = 0, pause_s: float = 1.0, rejoins: bool = False,
    ) -> None:  # fmt: skip
        """`worker_restarts`: of each worker and server that is lost, if the job outlives that and it `rejoins`."""
        self._settings = settings
        self._engine = engine
        self._num_workers, self._num_servers = num_workers, num_servers
        # For all processes; signals are this one's.
        self._job = {"DMLC_NUM_WORKER": str(num_workers), "DMLC_NUM_SERVER": str(num_servers), "P3_SIGNALS": "0"}
        self._command: Sequence[str] = ()
        self._status: Optional[Status] = None
        self._noted: Optional[asyncio.Future] = None  # of who waits for the scheduler to report anything
        self._schedulers: Optional[Schedulers] = None
        self._telling: Optional[Telling] = None  # of the job while it runs
        self._secret = _secret_of(settings)
        self._output = Output()
        self._running: List[Running] = []
        self._speaking: List[Running] = []  # what may still say something, also of those that others have replaced
        # Of what is started anew.
        self._budgets: Dict[Place, Budget] = {}
        for role, number, is_outlived in (
            ("worker", num_workers, settings.outlives_workers), ("server", num_servers, settings.outlives_servers)
        ):  # fmt: skip
            restarts = worker_restarts if is_outlived else 0
            self._budgets.update({(role, rank): Budget(restarts) for rank in range(number)})
        self._pause_s = pause_s
        self._left: Set[int] = set()  # that have said goodbye: the job has no place for them any more
        self._departed: Set[Place] = set()  # of what was lost, and the job goes on without it
        self._given_up: Set[Place] = set()  # of these, for which no other is started any more
        self._expelled: Set[Place] = set()  # of what has joined, is to depart, and has a while to say why
        self._guests: Set[Place] = set()  # of these, which a process has that somebody else has started
        self._rejoins = rejoins  # others are started for these, and join the job
        self._over: Optional[asyncio.Event] = None  # nobody can join any more: the scheduler has ended, or the job ends
        self._in_place_since: Dict[Place, float] = {}
        self._waiting: Set[asyncio.Task] = set()  # each to start one when its pause is over
        self.began_at: Optional[float] = None  # all were connected
        self._job_failure: Optional[str] = None  # in the scheduler's words
        self._ends_all = False  # all that still run, whatever the job's end was
        self._began_before = began_before
        self._grace_s = grace_s  # that SIGTERM leaves a job to take a snapshot
        self._signalled_at: Dict[int, float] = {}  # by which signals we were asked to end, and when first
        self._asked_to_end = False  # by SIGTERM, with a snapshot
        self._saved: Optional[int] = None  # the round of the job's last snapshot
        self._demanded: Optional[int] = None  # the signal that asks the scheduler for one which is not taken yet
        self.may_restart = False  # the job began, now or before, and then failed by itself
        self.failed_on: Set[Host] = set()  # hosts that let no start of this job begin

    async def run(self, command: Sequence[str], timeout_s: Optional[float], deadline: Optional[float]) -> int:
        """Runs the job to its end; the exit code of `p3 run`. `deadline`: when the time-out of all starts is over."""
        interrupted = asyncio.get_running_loop().create_future()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it for SIGHUP
                asyncio.get_running_loop().add_signal_handler(number, self._interrupt, interrupted, number)
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self._demand_snapshot, signal.SIGUSR1)
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, self._tell_once)
        self._over = asyncio.Event()
        job = asyncio.ensure_future(self._run(command))
        left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            await asyncio.wait({job, interrupted}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if not job.done():
                job.cancel()
                await asyncio.wait({job})
        finally:
            if self._telling is not None:
                self._telling.end()
            await self._end_all()
            await self._engine.release()
            if self._schedulers is not None:
                self._schedulers.close()
            if self._status is not None:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._status.over(), DRAIN_S)
                self._status.close()
        goes_on = interrupted if job.done() and not job.cancelled() else None
        try:
            read_out = asyncio.gather(*(running.read_out() for running in self._speaking))
            await _until_written(read_out, goes_on, deadline)
            code = self._conclude(job, interrupted, timeout_s)
            await _until_written(self._output.written(), goes_on, deadline)
        finally:
            self._output.close()
        return code

    def _conclude(self, job: asyncio.Future, interrupted: asyncio.Future, timeout_s: Optional[float]) -> int:
        """Says how it ended; the exit code."""
        if self._asked_to_end and (job.cancelled() or self._ended_as_asked(job.result())):
            saved = "its last snapshot is of round %d" % self._saved if self._saved else "no snapshot was taken"
            self._say("interrupted by SIGTERM; all processes have been stopped, and %s" % saved)
            return 128 + signal.SIGTERM
        if not job.cancelled():
            code = self._judge(job.result())
            self.may_restart &= not self._asked_to_end and not interrupted.done()
            return code
        if interrupted.done():
            self._say("interrupted by %s; all processes have been stopped" % signal_name(interrupted.result()))
            return 128 + interrupted.result()
        self._say("the job was still running after --timeout %g s; all processes have been stopped" % timeout_s)
        return _TIMED_OUT

    def _say(self, text: str) -> None:
        self._output.say("p3 run: " + text)

    @property
    def _has_begun(self) -> bool:
        return self.began_at is not None

    # Starting

    async def _run(self, command: Sequence[str]) -> Optional[Running]:
        """To the job's end: the process that failed, if one did."""
        tasks = await self._engine.place(self._num_workers, self._num_servers)
        self._command = command
        count = descriptors.PER_PROCESS * (len(tasks) + 1)
        descriptors.provide(count, "p3 run", "%d processes" % (len(tasks) + 1))
        listener = listen_as_root(self._engine.root, self._settings.root_port)
        port = listener.getsockname()[1]
        status_read, status_write = os.pipe()
        self._schedulers = Schedulers(listener, status_write)
        self._status = Status(status_read, self._take_note)
        self._job.update(DMLC_PS_ROOT_URI=self._engine.root, DMLC_PS_ROOT_PORT=str(port))
        await self._start_scheduler()
        watched = dataclasses.replace(
            self._settings, root_host=self._engine.root, root_port=port, secret=self._secret, secret_file=None
        )
        self._telling = Telling(watched, self._say)
        for task in tasks:
            await self._start(task)
        return await self._wait_for_the_end()

    async def _start_scheduler(self) -> Running:
        inherited = self._schedulers.next()
        return self._add(_SCHEDULER, await start_here(_SCHEDULER, self._job, self._secret, [], **inherited))

    async def _start(self, task: Task) -> Running:
        command = self._command if task.role == "worker" else []
        return self._add(task, await self._engine.start(task, self._job, self._secret, command))

    def _add(self, task: Task, process: Process) -> Running:
        running = Running(task, process, self._output)
        self._running.append(running)
        self._speaking = [*(one for one in self._speaking if not one.is_read_out), running]
        return running

    def _take_note(self, status: dict) -> None:
        state = status["state"]
        place = ("server", status["server"]) if "server" in status else ("worker", status.get("rank"))
        if self._schedulers is not None:
            self._schedulers.take_note(state)
        if state == "resumed":
            self._pass_on_demand()
        if state == "running":
            self.began_at = time.monotonic()
            self._in_place_since = dict.fromkeys(self._budgets, self.began_at)
            self._telling.begin()
        elif state in ("departed", "server_departed") and place not in self._departed:
            self._departed.add(place)
            # Of a guest's place our own process, if there is one, waits to join; and who was expelled ends by itself.
            if place not in self._guests | self._expelled:
                self._end_lost(place)
            self._guests.discard(place)
            self._expelled.discard(place)
        elif state in ("expelled", "server_expelled") and not status["is_guest"]:  # told why, unless it is frozen
            self._expelled.add(place)
            for running in self._alive(place):
                asyncio.get_running_loop().call_later(_LAST_WORDS_S, _end_if_alive, running)
        elif state in ("entered", "server_returned"):
            self._departed.discard(place)
            self._expelled.discard(place)
            (self._guests.add if status["is_guest"] else self._guests.discard)(place)
            self._in_place_since[place] = time.monotonic()
        elif state == "left":
            self._left.add(status["rank"])
        elif state == "saved":
            self._saved = status["round"]
            self._demanded = None if self._demanded == signal.SIGUSR1 else self._demanded
        elif state == "over":
            self._let_none_join()
        elif state == "failed" and not self._ends_all:  # else it lost those that we have ended
            self._job_failure = status["text"]
        if self._noted is not None:
            self._noted.set_result(None)
            self._noted = None

    # Ending

    async def _wait_for_the_end(self) -> Optional[Running]:
        """Returns the process that failed, the likeliest cause if there are several; None if none did."""
        ending = {asyncio.ensure_future(running.ended()) for running in self._running}
        workers_left = self._num_workers
        timeout_s: Optional[float] = None
        while ending:
            done, ending = await asyncio.wait(ending, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            self._status.read()
            outlived = {task for task in done if self._may_outlive(task.result())}
            done -= outlived
            for ended in [task.result() for task in outlived]:
                self._running.remove(ended)
                ending.add(asyncio.ensure_future(self._go_on_behind(ended)))
            if any(task.result().task is _SCHEDULER for task in done):
                self._schedulers.close()  # who comes now is refused at once
                self._let_none_join()
            if not done and (timeout_s is None or outlived):
                continue
            failed = [task.result() for task in done if self._has_failed(task.result())]
            if failed:
                if not self._has_begun:
                    at_fault = failed + [running for running in self._running if not running.process.has_begun]
                    self.failed_on = {running.task.host for running in at_fault if not running.task.host.is_local}
                # The scheduler tells the others, which then end with errors of their own.
                self._start_no_more()
                if ending and (self._has_begun or self._job_failure is not None):
                    await asyncio.wait(ending, timeout=_LAST_WORDS_S)
                    self._status.read()
                return min((r for r in self._running if self._has_failed(r)), key=self._unlikelihood)
            guests = {rank for role, rank in self._guests if role == "worker"}
            if not done and guests - self._left:  # they end the job, or depart
                continue
            if not done:  # servers and scheduler outlive the workers
                return None
            for ended in [task.result() for task in done if self._is_departed(task.result().task)]:
                self._running.remove(ended)  # another process may have its place later
                if not (self._rejoins and self._over.is_set()):  # it waited to join, and was ended with the job
                    self._say("%s; the job goes on without it" % ended.obituary())
            workers_left -= sum(task.result().task.role == "worker" for task in done)
            if workers_left == 0:
                if not self._has_begun:
                    return None
                timeout_s = self._settings.timeout_s + _LAST_WORDS_S
        return None

    def _has_failed(self, ended: Running) -> bool:
        return bool(ended.process.returncode) and not self._is_departed(ended.task)

    def _is_departed(self, task: Task) -> bool:
        """Whether the job goes on without our process in that place."""
        return task.place in self._departed | self._guests

    def _outlives(self, role: str) -> bool:
        """The job, one of these."""
        return self._settings.outlives_servers if role == "server" else self._settings.outlives_workers

    async def _go_on_behind(self, ended: Running) -> Running:
        """Until the end of what takes its place, or of `ended` itself, if nothing does."""
        if ended.task is _SCHEDULER:
            return await self._restart_scheduler(ended)
        ended = await self._hear_of(ended)
        return await self._rejoin(ended) if self._rejoins and self._is_departed(ended.task) else ended

    async def _restart_scheduler(self, ended: Running) -> Running:
        """Until the end of the one that takes its place."""
        self._say("the scheduler ended with %s; starting another one, while the job goes on" % ended.process.how())
        self._waiting.add(asyncio.current_task())
        try:
            started = await self._start_scheduler()
        finally:
            self._waiting.discard(asyncio.current_task())
        return await started.ended()

    # A lost worker, or server

    def _end_lost(self, place: Place) -> None:
        """The job goes on without this process, which may be frozen or cut off."""
        for running in self._alive(place):
            running.process.signal(signal.SIGKILL)

    def _alive(self, place: Place) -> List[Running]:
        """Processes of that worker, or server."""
        those = (running for running in self._running if running.task.place == place)
        return [running for running in those if running.process.returncode is None]

    def _let_none_join(self) -> None:
        """The job ends, and who waits to join with it. What such a server says of that is not shown; a worker that was
        expelled may still say why."""
        self._over.set()
        for place in self._departed | self._guests:
            for running in self._alive(place):
                for source in running.sources if place[0] == "server" else ():
                    source.mute()
            self._end_lost(place)

    async def _hear_of(self, ended: Running) -> Running:
        """Until the scheduler has said what becomes of the job, which has lost that process."""
        self._running.append(ended)
        ended.process.signal(signal.SIGKILL)  # what it left behind in its group
        deadline = time.monotonic() + self._settings.timeout_s + _LAST_WORDS_S
        while self._job_failure is None and not self._is_departed(ended.task) and time.monotonic() < deadline:
            self._noted = self._noted or asyncio.get_running_loop().create_future()
            await asyncio.wait({self._noted}, timeout=deadline - time.monotonic())
        return ended

    async def _rejoin(self, ended: Running) -> Running:
        """Until the end of a process that has joined the job in the place of one that has departed; or of the last one
        that could not, when no more are to be started, or the job is over."""
        task = ended.task
        joining = task._replace(env={**task.env, "P3_JOIN": "%d" % _PATIENCE_S})
        while (
            task.place in self._departed
            and not self._over.is_set()
            and self._job_failure is None
            and self._pay_for(task.place)
        ):
            budget = self._budgets[task.place]
            pause_s = budget.pause_s(self._pause_s)
            when = "in %g s" % pause_s if pause_s else "now"
            more = "%d more restart%s" % (budget.left, "" if budget.left == 1 else "s")
            self._say("%s; the job goes on without it, and another one is started %s, to join at the workers' next "
                      "members(round) (%s allowed)" % (ended.obituary(), when, more))  # fmt: skip
            self._waiting.add(asyncio.current_task())
            try:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._over.wait(), pause_s)
                if self._over.is_set() or task.place in self._guests:
                    break
                started = await self._start(joining)
            except ConfigError as error:
                self._say("%s" % error)
                continue
            finally:
                self._waiting.discard(asyncio.current_task())
            asyncio.get_running_loop().call_later(self._settings.timeout_s, _end_if_not_begun, started)
            self._running.remove(ended)
            if self._over.is_set():  # meanwhile
                started.process.signal(signal.SIGKILL)
            ended = await started.ended()
            if ended.process.returncode == 0:
                break
            ended.process.signal(signal.SIGKILL)  # what it left behind in its group
            self._status.read()
        if task.place in self._departed:
            self._given_up.add(task.place)
        return ended

    def _may_outlive(self, ended: Running) -> bool:
        """Whether the job may go on behind it."""
        if ended.process.returncode == 0 or not self._has_begun or self._job_failure is not None:
            return False
        if ended.task is _SCHEDULER:
            return self._schedulers.may_start_again
        role, rank = place = ended.task.place
        has_left = rank in self._left if role == "worker" else self._over.is_set()
        if not self._outlives(role) or has_left:
            return False
        # It may have departed before it ended, as one that was frozen.
        starts_another = self._rejoins and place in self._departed and place not in self._given_up
        return starts_another or not self._is_departed(ended.task)

    def _pay_for(self, place: Place) -> bool:
        """Whether what was lost may come back. Only its time in its place counts: once, and not that of processes that
        could not join."""
        now = time.monotonic()
        return self._budgets[place].spend(now - self._in_place_since.pop(place, now))

    def _start_no_more(self) -> None:
        if self._over is not None:
            self._over.set()
        for waiting in self._waiting:
            waiting.cancel()

    async def _end_all(self) -> None:
        self._start_no_more()
        if self._status is not None:
            self._status.read()
        self._ends_all = True
        alive = [running for running in self._running if running.process.returncode is None]
        workers = [running for running in alive if running.task.role == "worker"]
        others = [running for running in alive if running.task.role != "worker"]
        # Workers first, and what the others say of that is not shown: that each lost the others is our doing.
        for running in others:
            for source in running.sources:
                source.mute()
        for group in (workers, others):
            signal_all(group, signal.SIGTERM)
            signal_all(group, signal.SIGCONT)  # one that is stopped can end, too
            await all_ended(group)
            signal_all(group, signal.SIGKILL)
        signal_all(self._running, signal.SIGKILL)  # also what a process left behind in its group
        await all_ended(alive)

    def _tell_once(self) -> None:
        """SIGUSR2."""
        if self._telling is not None:
            self._telling.tell_once()

    def _demand_snapshot(self, number: int) -> bool:
        """Has the scheduler ask the job for one: SIGUSR1, to go on, or SIGUSR2, to end. False if it cannot take any."""
        takes_them = self._has_begun and self._settings.snapshot_dir is not None
        if takes_them:
            self._demanded = max(number, self._demanded or number)  # SIGUSR2 is the greater one
            self._pass_on_demand()
        return takes_them

    def _pass_on_demand(self) -> None:
        """To a scheduler that serves; one that takes its place gets it again, which makes no difference to one that
        knows of it."""
        if self._demanded is not None and self._schedulers.serves:
            for running in self._running:
                if running.task is _SCHEDULER and running.process.returncode is None:
                    running.process.signal(self._demanded)

    def _interrupt(self, interrupted: asyncio.Future, number: int) -> None:
        now, before = time.monotonic(), self._signalled_at.get(number)
        self._signalled_at.setdefault(number, now)
        if before is not None and now < before + SAME_SIGNAL_S:
            log.info("%s again: ignored, as a launcher may send the same signal twice", signal_name(number))
            return
        is_first = not interrupted.done() and not self._asked_to_end
        if is_first and number == signal.SIGTERM and self._grace_s > 0:
            self._asked_to_end = self._demand_snapshot(signal.SIGUSR2)
            if self._asked_to_end:
                self._say("SIGTERM: the job ends when it has taken a snapshot, within %g s" % self._grace_s)
                loop = asyncio.get_running_loop()
                loop.call_later(self._grace_s, lambda: interrupted.done() or interrupted.set_result(number))
                return
        if not interrupted.done():
            interrupted.set_result(number)
        else:  # asked twice: no more grace
            signal_all(self._running, signal.SIGKILL)

    @staticmethod
    def _ended_as_asked(failed: Optional[Running]) -> bool:
        return failed is not None and failed.process.returncode == 128 + signal.SIGTERM

    def _judge(self, failed: Optional[Running]) -> int:
        if failed is None and self._job_failure is None:
            if not self._has_begun:
                self._say(NEVER_JOINED)
            return 0
        if failed is not None and not self._echoes(failed):
            self._say(failed.obituary())
        if self._job_failure is not None:
            self._say("the job failed: " + self._job_failure)
        self.may_restart = self._has_begun or self._began_before
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


async def _until_written(done: Awaitable, interrupted: Optional[asyncio.Future], deadline: Optional[float]) -> None:
    """Waits for what needs somebody to read our output: until the deadline, or an interrupt; if there was one already,
    a little."""
    task = asyncio.ensure_future(done)
    if interrupted is not None:
        left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        await asyncio.wait({task, interrupted}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.wait({task}, timeout=DRAIN_S)
    task.cancel()


def _end_if_alive(running: Running) -> None:
    if running.process.returncode is None:
        running.process.signal(signal.SIGKILL)


def _end_if_not_begun(running: Running) -> None:
    """Its login has not gone through, and might not for minutes."""
    if running.process.returncode is None and not running.process.has_begun:
        running.process.signal(signal.SIGKILL)
