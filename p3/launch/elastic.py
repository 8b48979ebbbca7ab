"""With how many workers, and on which hosts, a job starts again: `p3 run --min-workers A --max-workers B`.

A host that is down now may be back at the next start, so each time all of them are asked over ssh whether they answer.
One that answers, but on which the last start failed, is left out for a while if the others suffice.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence

from p3.launch.execute import signal_group
from p3.launch.placement import Host, ssh_command
from p3.launch.restarts import Cooling
from p3.settings import Settings

log = logging.getLogger("p3.run")

_PAUSE_S = 1.0  # until hosts that did not answer are asked again, while there are too few


class Bounds(NamedTuple):
    """Of the number of workers, and how many the job has had at its first start."""

    least: int
    first: int
    most: int


class Found(NamedTuple):
    """Where a job can start, and why not elsewhere."""

    hosts: List[Host]  # those that are used, each with as many slots as it may have workers
    workers: int  # 0: they are too few
    silent: Dict[str, str]  # the other hosts: what ssh said, or why else


def choose(hosts: Sequence[Host], silent: Dict[str, str], bounds: Bounds) -> Found:
    """As many workers as the hosts that answer have slots for; one without slots takes its share of the first start."""
    share = -(-bounds.first // len(hosts))
    there = [Host(host.name, host.slots or share) for host in hosts if host.name not in silent]
    workers = min(bounds.most, sum(host.slots for host in there))
    return Found(there, workers if workers >= bounds.least else 0, silent)


def find(
    settings: Settings,
    read_hosts: Callable[[], Sequence[Host]],
    bounds: Bounds,
    deadline: Optional[float],
    cooling: Cooling,
) -> Found:
    """Asks until there are enough, at most P3_RENDEZVOUS_TIMEOUT_S, or until `deadline` of time.monotonic().

    `read_hosts` may give others each time. Blocks.
    """
    end = time.monotonic() + settings.rendezvous_timeout_s
    end = end if deadline is None else min(end, deadline)
    while True:
        hosts = read_hosts()
        silent, now = asyncio.run(_ask(settings, hosts)), time.monotonic()
        left_s = {host.name: cooling.left_s(host, now) for host in hosts}
        failed = {name: "a start there failed; retry in %.0f s" % left for name, left in left_s.items() if left > 0}
        found = choose(hosts, {**failed, **silent}, bounds)
        if failed and not found.workers:
            found = choose(hosts, silent, bounds)
        if found.workers or time.monotonic() >= end:
            return found
        log.info("too few hosts answer for %d workers; asking them again", bounds.least)
        time.sleep(_PAUSE_S)


async def _ask(settings: Settings, hosts: Sequence[Host]) -> Dict[str, str]:
    """The hosts that do not answer, and what is known of why."""
    remote = [host for host in hosts if not host.is_local]
    problems = await asyncio.gather(*(_problem_with(settings, host) for host in remote))
    return {host.name: problem for host, problem in zip(remote, problems) if problem is not None}


async def _problem_with(settings: Settings, host: Host) -> Optional[str]:
    arguments = ssh_command(settings, host.name, {}, "/", ["true"])
    nothing, pipe = asyncio.subprocess.DEVNULL, asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(
            *arguments, stdin=nothing, stdout=nothing, stderr=pipe, start_new_session=True
        )
    except OSError as error:
        return "%s: %s" % (arguments[0], error.strerror)
    try:
        _, said = await asyncio.wait_for(process.communicate(), settings.timeout_s)
    except asyncio.TimeoutError:
        return "no answer in %g s" % settings.timeout_s
    finally:
        if process.returncode is None:
            signal_group(process.pid, signal.SIGKILL)
            await process.wait()
    if process.returncode == 0:
        return None
    last = said.decode(errors="replace").strip().splitlines()[-1:]
    return last[0] if last else "exit code %d" % process.returncode
