"""`p3 run`: a job, and its new starts after failures; launcher.py has one of them."""

from __future__ import annotations

import asyncio
import functools
import importlib
import sys
import time
from typing import Callable, Optional, Sequence

from p3.cluster.connections import encryption
from p3.launch import elastic
from p3.launch.engines import Engine, Hosts
from p3.launch.launcher import Launcher
from p3.launch.placement import Host
from p3.launch.restarts import Budget, Cooling
from p3.settings import Settings

_HOSTS_PAUSE = 60  # in pauses: for how long a host is left out at least, if the job did not begin there


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
    grace_s: float = 0,
    pause_s: float = 1.0,
    rejoins: bool = False,
) -> int:
    """See Launcher. A job that fails is started again, at most `restarts` times, within `timeout_s` for all of them.
    Each start has an engine of its own. `pause_s`: the shortest wait for another try, which doubles; see restarts.py.

    Not one that was interrupted, and not one whose first start failed before all its processes were connected: what is
    wrong there, like a mistake in the command, a new start would not mend. Later starts are tried again wherever they
    fail, as hosts and processes may die at any time. With `bounds` it comes back on those of `read_hosts` that answer,
    with as many workers as they have slots for. ConfigError if the job cannot be started as asked.
    """
    importlib.import_module("p3._core")  # one error here, and not one of each process, where it is not built
    encryption.require(settings)
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    budget, cooling = Budget(restarts), Cooling(_HOSTS_PAUSE * pause_s)
    began_before = False
    while True:
        # With a port of its own, and a secret, unless the user has set them.
        launcher = Launcher(
            settings, make_engine(), num_workers, num_servers, worker_restarts, began_before, grace_s, pause_s, rejoins
        )
        code = asyncio.run(launcher.run(command, timeout_s, deadline))
        now = time.monotonic()
        if not launcher.may_restart or not budget.spend(now - launcher.began_at if launcher.began_at else 0):
            return code
        for host in launcher.failed_on:
            cooling.failed(host, now)
        began_before = True
        pause_now_s = budget.pause_s(pause_s)
        time.sleep(pause_now_s if deadline is None else max(0.0, min(pause_now_s, deadline - now)))
        numbers = ""
        if bounds is not None:
            found = elastic.find(settings, read_hosts, bounds, deadline, cooling)
            for name, problem in found.silent.items():
                _say("leaving out host %s: %s" % (name, problem))
            if not found.workers:
                slots = sum(host.slots for host in found.hosts)
                text = "not restarting the job: slots on the hosts that answer: %d; --min-workers: %d"
                _say(text % (slots, bounds.least))
                return code
            if found.workers != num_workers:
                numbers = " with %d instead of %d workers" % (found.workers, num_workers)
            make_engine, num_workers = functools.partial(Hosts, settings, found.hosts), found.workers
        text = "the job failed with exit code %d; restarting it%s (restart %d of %d)"
        _say(text % (code, numbers, restarts - budget.left, restarts))


def _say(text: str) -> None:
    sys.stdout.flush()
    print("p3 run: " + text, file=sys.stderr, flush=True)
