"""`p3 exec`: this process becomes the node that its environment describes.

A scheduler or server runs right here; a worker's command replaces the process, with P3's plugin registered for every
Python started below. What any launcher starts, `p3 run` included.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import subprocess
import sys
import threading
from typing import Dict, List, Mapping, NamedTuple, Optional

from p3 import loading
from p3.errors import ConfigError
from p3.launch import dying_with
from p3.settings import Settings

# Not `-m p3`, which looks for p3 in the working directory first: that may be a clone of P3 that was never built.
_MAIN = "import sys; sys.path[:1] == [''] and sys.path.pop(0); from p3.cli import main; sys.exit(main())"
_TERMINATE_GRACE_S = 5.0
SAME_SIGNAL_S = 2.0  # within which a signal may come twice: from a launcher, and from whom it has told as well
ALIVE = b"\0"  # from `p3 run` to what it has started on another host, every now and then
_SHIELDED_FROM = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

# Each layer on its own, so that it starts when its weights have landed; read once, when MXNet is loaded.
_WORKER_DEFAULTS = {"MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN": "1"}


class Launched(NamedTuple):
    """What a `p3 exec` is told by whoever of P3 starts it on its own host, as options of the command line."""

    launcher_pid: Optional[int] = None  # the process dies with that one
    listen_fd: Optional[int] = None  # the scheduler's listening socket
    status_fd: Optional[int] = None  # where the scheduler reports what becomes of the job
    journal_fd: Optional[int] = None  # what a scheduler leaves to the one that takes its place
    shielded: Optional[int] = None  # 1: signals to all processes of the job pass it by; who has started it ends it

    @staticmethod
    def option(name: str) -> str:
        return "--" + name.replace("_", "-")

    def options(self) -> List[str]:
        given = {name: value for name, value in self._asdict().items() if value is not None}
        return ["%s=%d" % (self.option(name), value) for name, value in given.items()]


def p3_exec(*arguments: str) -> List[str]:
    """What stands behind a Python's name to make it `p3 exec`, with the P3 that is installed for that Python."""
    return ["-c", _MAIN, "exec", *arguments]


def execute(settings: Settings, command: List[str], launched: Launched = Launched()) -> int:
    """Returns the exit code of a server or scheduler; does not return for a worker. ConfigError if it cannot be."""
    settings.require("role")
    if launched.launcher_pid is not None:
        die_with(launched.launcher_pid)
    if launched.shielded:
        for number in _SHIELDED_FROM:
            signal.signal(number, signal.SIG_IGN)
    if settings.role == "scheduler":
        with loading.for_good(), loading.without("ssl"):  # which asyncio takes a long time to load: TLS is the core's
            from p3.cluster import scheduler

        return scheduler.main(settings, launched.listen_fd, launched.status_fd, launched.journal_fd)
    if settings.role == "server":
        with loading.for_good(), loading.without("ssl"):
            from p3.server import process

        return process.main(settings)
    settings.require("root_host", "root_port", "num_workers", "num_servers")
    settings.job_secret()
    if not command:
        raise ConfigError("worker: p3 exec needs the command to run, for example: p3 exec python train.py")
    try:
        os.execvpe(command[0], command, worker_environment(os.environ))
    except OSError as error:
        raise ConfigError("worker: " + dying_with.cannot_run(command[0], error)) from None


def worker_environment(env: Mapping[str, str]) -> Dict[str, str]:
    """`env` as the worker's command gets it. Where the number of this host's workers is known (P3_LOCAL_SIZE), its
    cores are shared out among them: threads beyond that would starve the network's, and change the order of sums."""
    made = dict(_WORKER_DEFAULTS, **env)
    workers = env.get("P3_LOCAL_SIZE", "")
    if workers.isdigit() and int(workers) > 0:
        made.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // int(workers))))
    autoload = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "_autoload")
    made["PYTHONPATH"] = os.pathsep.join([autoload] + [path for path in [env.get("PYTHONPATH")] if path])
    return made


def supervise(command: List[str], silence_s: Optional[float] = None) -> int:
    """On a remote host: reads the secret from its input, runs a command with it, and ends that with the input.

    The input is the ssh connection to the launcher, or a pipe from a Ray actor; so nothing survives here when that or
    its host goes away, and the secret is on no command line. Each byte behind the secret's line is a signal's number,
    for the command's group, or ALIVE. With `silence_s` the input also counts as ended when nothing has come for that
    long: a network that is cut ends no connection. sshd has not read the profile that puts a virtual environment in
    PATH: so that `python` is the Python that runs P3, its folder comes first.
    """
    pipe = open(0, "rb", buffering=0, closefd=False)  # unbuffered: a buffer's lock would be held at our end
    secret = os.fsdecode(pipe.readline().strip())
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    child = subprocess.Popen(
        command,
        env=dict(os.environ, P3_SECRET=secret, PATH=path),
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=functools.partial(die_with, os.getpid()),  # there is no other thread yet that could hold a lock
    )

    def end_child(*_ignored) -> None:
        signal_group(child.pid, signal.SIGTERM)
        timer = threading.Timer(_TERMINATE_GRACE_S, signal_group, (child.pid, signal.SIGKILL))
        timer.daemon = True
        timer.start()

    def watch_input() -> None:
        while select.select([pipe], [], [], silence_s)[0]:
            numbers = pipe.read(1 << 10)
            if not numbers:
                break
            for number in numbers:
                signal_group(child.pid, number)  # ALIVE is none
        end_child()

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, end_child)
    threading.Thread(target=watch_input, daemon=True).start()
    code = child.wait()
    signal_group(child.pid, signal.SIGKILL)  # what the command left behind
    return code if code >= 0 else 128 - code


def die_with(launcher_pid: int) -> None:
    """SIGKILL for this process when the launcher dies. ConfigError: it has died."""
    if not dying_with.die_with(launcher_pid):
        raise ConfigError("p3 exec: " + dying_with.IS_ALONE)


def signal_group(pid: int, number: int) -> None:
    """To all processes of a group, if there are any left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def how_ended(code: int) -> str:
    """In words; `code`: as subprocess has it, -N for signal N."""
    return "exit code %d" % code if code >= 0 else "signal " + signal_name(-code)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
