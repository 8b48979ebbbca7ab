"""The scheduler and the servers that workers bring along, each a child of the worker's process or of its supervisor.

The kernel ends them with whoever has started them, however that ends. Signals that a launcher sends to all processes
of a job do not reach them: the workers may need them to come to an end.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import List, Mapping, NamedTuple, Optional

from p3.launch.execute import Launched, p3_exec
from p3.launch.launchers.meeting import Met
from p3.launch.launchers.place import Place
from p3.launch.placement import source_path


class Node(NamedTuple):
    role: str
    process: subprocess.Popen


def start(place: Place, met: Met, env: Mapping[str, str], status_fd: Optional[int] = None) -> List[Node]:
    """Those that this worker's place asks for: rank 0 brings the scheduler, the first worker of a machine a server.

    Takes over the listener. `status_fd`: where the scheduler reports, see scheduler.py. `env`: of this process.
    """
    started = []
    common = {**env, **met.variables}
    common.pop("P3_RANK", None)  # the worker's
    if met.listener is not None:
        listen_fd = met.listener.detach()
        try:
            started.append(_start("scheduler", common, listen_fd=listen_fd, status_fd=status_fd))
        finally:
            os.close(listen_fd)
    if place.local_rank == 0:
        rank = {"P3_RANK": place.machine} if place.machine.isdigit() else {}  # else the scheduler assigns one
        started.append(_start("server", {**common, **rank}))
    return started


def _start(role: str, env: Mapping[str, str], **descriptors: Optional[int]) -> Node:
    launched = Launched(launcher_pid=os.getpid(), shielded=1, **descriptors)
    path = source_path()
    env = dict(env, DMLC_ROLE=role)
    if path is not None:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [env.get("PYTHONPATH"), path]))
    passed = tuple(descriptor for descriptor in descriptors.values() if descriptor is not None)
    command = [sys.executable, *p3_exec(*launched.options())]
    return Node(role, subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, pass_fds=passed))
