"""Runs one worker's command under another launcher, and the nodes that its place asks for; ends all of them together.

A worker that fails, a node that does, and a neighbour on this machine that does (lifeline.py) are failures of the job;
but where the job goes on without lost workers, one that is killed is none, and its nodes stay; and where it goes on
without lost servers, the end of one is none: what has failed the job, the scheduler tells the worker.
The scheduler tells the other machines; they then have a few seconds to end with an error of their own. Signals from the
launcher go to the command, whose end says what they meant. If this process is killed, the kernel ends its children.
Threads: none. Children, signals, the scheduler's reports and lifelines wake one loop.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from typing import List, Optional

from p3.cluster.connections import encryption
from p3.errors import ConfigError
from p3.launch.dying_with import cannot_run
from p3.launch.execute import die_with, how_ended, worker_environment
from p3.launch.launchers import meeting, nodes
from p3.launch.launchers.lifeline import Lifeline
from p3.launch.launchers.place import Adapter, Place
from p3.launch.schedulers import Schedulers
from p3.settings import Settings

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
_LAST_WORDS_S = 5.0  # after a failure, for each to end with an error of its own
_TERMINATE_S = 5.0  # from SIGTERM to SIGKILL
_LOOK_S = 0.2  # for a lifeline that does not hold yet


def run(settings: Settings, adapter: Adapter, folder: str, command: List[str]) -> int:
    """The exit code of `p3 exec`: the command's; 1 if it is the job that has failed. `folder`: where processes meet.
    Errors as place() and meet() have them, before anything is started."""
    if not command:
        raise ConfigError("p3 exec needs the command that the workers run, for example: p3 exec python train.py")
    encryption.require(settings)
    with meeting.arrange(settings, adapter.place(os.environ), folder, os.environ) as (channel, place, address):
        met = meeting.meet(settings, place, channel, address)
        supervisor = _Supervisor(place, channel, settings)
        return supervisor.run(met, adapter.threads_of(os.environ), command)


class _Supervisor:
    def __init__(self, place: Place, channel: meeting.Channel, settings: Settings) -> None:
        self._place, self._channel = place, channel
        self._outlives_workers, self._outlives_servers = settings.outlives_workers, settings.outlives_servers
        self._label = "worker %d (%s)" % (place.rank, socket.gethostname())
        self._worker: Optional[subprocess.Popen] = None
        self._nodes: List[nodes.Node] = []
        self._schedulers: Optional[Schedulers] = None  # of rank 0
        self._status: Optional[io.FileIO] = None  # the pipe where they report
        self._reported = b""  # half a line of that
        self._lifeline: Lifeline
        self._failure: Optional[str] = None
        self._code = 0  # of the worker, if it was the first to fail
        self._signalled = 0  # the last one that ended us while there was no worker to pass it on to
        self._patience_with_stopped_s = settings.timeout_s  # by then the scheduler has lost a server that is
        self._stopped_since = float("inf")  # that server, as far as it was looked at
        self._acts_at = float("inf")  # when those that have not ended by themselves are ended
        self._rounds = 0  # of ending them

    def run(self, met: meeting.Met, threads: Optional[str], command: List[str]) -> int:
        with contextlib.ExitStack() as at_end:
            wakes = _wake_up(at_end)
            self._lifeline = Lifeline(self._place, "%(DMLC_PS_ROOT_URI)s:%(DMLC_PS_ROOT_PORT)s" % met.variables)
            if met.listener is not None:
                status_read, status_write = os.pipe()
                os.set_blocking(status_read, False)
                self._status = at_end.enter_context(os.fdopen(status_read, "rb", 0))
                self._schedulers = Schedulers(met.listener, status_write)
                at_end.callback(self._schedulers.close)
            at_end.callback(self._kill)
            self._start_scheduler = functools.partial(nodes.start_scheduler, met, dict(os.environ), self._schedulers)
            self._nodes = nodes.start(self._place, met, os.environ, self._schedulers)
            try:
                self._worker = self._start_worker(met, threads, command)
            except OSError as error:
                self._fail("%s: %s" % (self._label, cannot_run(command[0], error)), 1)
            self._watch(wakes)
        if self._failure is None:
            self._lifeline.close(good=True)
            return 0
        return self._code or (128 + self._signalled if self._signalled else 1)

    def _start_worker(self, met: meeting.Met, threads: Optional[str], command: List[str]) -> subprocess.Popen:
        place = self._place
        env = {**os.environ, **met.variables, "DMLC_ROLE": "worker", "P3_RANK": str(place.rank)}
        env["P3_LOCAL_RANK"] = str(place.local_rank)
        if place.local_size is not None:
            env["P3_LOCAL_SIZE"] = str(place.local_size)
        if threads:
            env.setdefault("OMP_NUM_THREADS", threads)
        beginning = functools.partial(_begin, os.getpid(), "P3_SNAPSHOT_DIR" in env)  # no other thread holds a lock
        return subprocess.Popen(command, env=worker_environment(env), preexec_fn=beginning)

    # The loop

    def _watch(self, wakes: socket.socket) -> None:
        reports = [] if self._status is None else [self._status]
        while self._goes_on():
            with selectors.DefaultSelector() as selector:
                for source in [wakes, *reports, *self._lifeline.sockets]:
                    selector.register(source, selectors.EVENT_READ)
                selector.select(self._patience_s())
            with contextlib.suppress(BlockingIOError):
                for number in wakes.recv(1 << 10):
                    self._on_signal(number)
            self._read_reports()
            self._look_for_the_dead()  # before the neighbours, who may have failed for want of our worker
            if not self._lifeline.step():
                self._fail(None)
            if time.monotonic() >= self._acts_at:
                self._end_the_living()

    def _read_reports(self) -> None:
        """All that the scheduler has said by now."""
        while self._status is not None:
            data = self._status.read(1 << 16)
            if not data:  # nothing yet
                return
            *lines, self._reported = (self._reported + data).split(b"\n")
            for state in [json.loads(line)["state"] for line in lines]:
                self._schedulers.take_note(state)
                if state == "running":
                    self._channel.withdraw()  # all have read it

    def _goes_on(self) -> bool:
        self._look_for_the_dead()
        if self._is_watched_for_leftovers():
            self._end_leftovers()
        lives = self._worker_lives() or any(node.process.returncode is None for node in self._nodes)
        untold = self._failure is not None and self._lifeline.waits and time.monotonic() < self._acts_at
        return lives or untold

    def _is_watched_for_leftovers(self) -> bool:
        """The worker is done, and a server may be one that the job has lost, and that will not end by itself."""
        waits_for_server = any(role == "server" and process.returncode is None for role, process in self._nodes)
        return self._outlives_servers and self._failure is None and not self._worker_lives() and waits_for_server

    def _end_leftovers(self) -> None:
        """A server that is frozen for so long, or outlives the scheduler, which ends behind the last that it has."""
        now = time.monotonic()
        number = [role for role, _ in self._nodes].index("server")
        process = self._nodes[number].process
        schedulers = [one.process for one in self._nodes if one.role == "scheduler"]
        is_left = schedulers and all(scheduler.returncode is not None for scheduler in schedulers)
        if not is_left and not _is_stopped(process.pid):
            self._stopped_since = float("inf")
            return
        self._stopped_since = min(self._stopped_since, now)
        if now - self._stopped_since >= self._patience_with_stopped_s:
            _say("ending the server of %s, which did not end by itself; the job went on without it" % self._label)
            process.kill()
            process.wait()
            del self._nodes[number]

    def _worker_lives(self) -> bool:
        return self._worker is not None and self._worker.returncode is None

    def _send(self, number: int) -> None:
        """To the worker. Popen.send_signal() asks the kernel first whether it lives, and may find an end that then
        nobody judges."""
        os.kill(self._worker.pid, number)  # which is its own until it is waited for

    def _patience_s(self) -> Optional[float]:
        waits = [self._acts_at - time.monotonic()] if self._failure is not None else []
        waits += [_LOOK_S] if self._lifeline.waits or self._is_watched_for_leftovers() else []
        return max(0.0, min(waits)) if waits else None

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGCHLD:
            return
        if self._worker_lives():
            self._send(number)
        elif number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # it waits for the others, no longer
            self._signalled = number
            self._fail(None)
            self._acts_at = time.monotonic()

    def _look_for_the_dead(self) -> None:
        """The only one that asks the kernel, so that nobody's end is seen and not judged."""
        if self._worker_lives() and self._worker.poll():
            died = "%s ended with %s" % (self._label, how_ended(self._worker.returncode))
            # Of one that goes on the scheduler judges whether the others can.
            if self._outlives_workers and self._worker.returncode < 0 and self._failure is None:
                _say("%s; the job goes on without it" % died)
            else:
                self._fail(died, self._worker.returncode)
        for number, (role, process) in reversed(list(enumerate(self._nodes))):
            if process.poll() and role == "scheduler" and self._is_outlived():
                died = "the scheduler of %s ended with %s; starting another one, while the job goes on"
                _say(died % (self._label, how_ended(process.returncode)))
                self._nodes[number] = self._start_scheduler()
            elif process.poll() and role == "server" and self._outlives_servers:
                # Or the scheduler fails the job, as the worker hears.
                died = "the server of %s ended with %s; the job goes on without it"
                if process.returncode < 0 and self._failure is None:  # else it has printed itself what became of it
                    _say(died % (self._label, how_ended(process.returncode)))
                del self._nodes[number]
            elif process.poll():
                # With an exit code, it has printed an error itself.
                died = "the %s of %s ended with %s" % (role, self._label, how_ended(process.returncode))
                self._fail(died if process.returncode < 0 else None)

    def _is_outlived(self) -> bool:
        self._read_reports()  # of which its end is perhaps the consequence
        return self._failure is None and self._schedulers.may_start_again

    # A failure

    def _fail(self, text: Optional[str], code: int = 0) -> None:
        """The first one counts. `text`: what to say; None: it was said elsewhere."""
        if self._failure is None:
            self._failure = text or ""
            self._code = code if code >= 0 else 128 - code
            self._acts_at = time.monotonic() + _LAST_WORDS_S
            self._lifeline.close(good=False)  # the neighbours' last words begin now, too
            if text:
                _say(text)

    def _end_the_living(self) -> None:
        """Called until none lives: first the worker is asked to, then it has to, then the server, then the scheduler,
        which tells the other machines of the server."""
        self._rounds += 1
        if self._worker_lives():
            if self._rounds == 1:
                _say("stopping %s: the job failed" % self._label)
            self._send(signal.SIGTERM if self._rounds == 1 else signal.SIGKILL)
            self._send(signal.SIGCONT)  # one that is stopped can end, too
            self._acts_at = time.monotonic() + _TERMINATE_S
            return
        living = [node.process for node in reversed(self._nodes) if node.process.returncode is None]  # the server first
        if living:
            living[0].kill()
        self._acts_at = time.monotonic() + _TERMINATE_S

    def _kill(self) -> None:
        for process in [node.process for node in self._nodes] + [self._worker]:
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()


def _wake_up(at_end: contextlib.ExitStack) -> socket.socket:
    """A socket where the number of each signal arrives as a byte; they do nothing else until the end."""
    wakes, wake = socket.socketpair()
    for end in (wakes, wake):
        end.setblocking(False)
        at_end.enter_context(end)
    for number in (*_FORWARDED, signal.SIGCHLD):
        if signal.getsignal(number) is not signal.SIG_IGN or number == signal.SIGCHLD:  # as nohup has it for SIGHUP
            at_end.callback(signal.signal, number, signal.signal(number, lambda *_: None))
    at_end.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False))
    return wakes


def _is_stopped(pid: int) -> bool:
    """Whether the process does nothing until a signal has it go on."""
    with contextlib.suppress(OSError), open("/proc/%d/stat" % pid, "rb") as file:
        return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    return False


def _begin(parent: int, takes_snapshots: bool) -> None:
    """In the worker's process, before its command."""
    die_with(parent)
    if takes_snapshots:  # which SIGUSR1 asks for, once the script has joined; until then it must not kill
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _say(text: str) -> None:
    print("p3 exec: " + text, file=sys.stderr, flush=True)
