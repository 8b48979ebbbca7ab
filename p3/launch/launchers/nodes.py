"""The scheduler and the servers that workers bring along, each a child of the worker's process or of its supervisor.

The kernel ends them with whoever has started them, however that ends. Signals that a launcher sends to all processes
of a job do not reach them: the workers may need them to come to an end.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Dict, List, Mapping, NamedTuple, Optional

from p3.launch.execute import Launched, p3_exec
from p3.launch.launchers.meeting import Met
from p3.launch.launchers.place import Place
from p3.launch.placement import module_path
from p3.launch.schedulers import Schedulers


class Node(NamedTuple):
    role: str
    process: subprocess.Popen


def start(place: Place, met: Met, env: Mapping[str, str], schedulers: Optional[Schedulers] = None) -> List[Node]:
    """Those that this worker's place asks for: rank 0 brings the scheduler, the first worker of a machine a server.

    `schedulers`: of rank 0. `env`: of this process.
    """
    started = []
    if schedulers is not None:
        started.append(start_scheduler(met, env, schedulers))
    if place.local_rank == 0:
        rank = {"P3_RANK": place.machine} if place.machine.isdigit() else {}  # else the scheduler assigns one
        started.append(_start("server", {**_common(met, env), **rank}))
    return started


def start_scheduler(met: Met, env: Mapping[str, str], schedulers: Schedulers) -> Node:
    """The first one, or one that takes the place of one that has died."""
    return _start("scheduler", _common(met, env), **schedulers.next())


def _common(met: Met, env: Mapping[str, str]) -> Dict[str, str]:
    return {name: value for name, value in {**env, **met.variables}.items() if name != "P3_RANK"}  # the worker's


def _start(role: str, env: Mapping[str, str], **descriptors: Optional[int]) -> Node:
    launched = Launched(launcher_pid=os.getpid(), shielded=1, **descriptors)
    env = {**env, **module_path(env), "DMLC_ROLE": role}
    passed = tuple(descriptor for descriptor in descriptors.values() if descriptor is not None)
    command = [sys.executable, *p3_exec(*launched.options())]
    return Node(role, subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, pass_fds=passed))
