"""Stands for ssh when `p3 run` starts a job on the hosts of a lab: python -m p3.measure.chaos.lab_ssh FOLDER HOST LINE.

FOLDER is the lab's. HOST is the address of one of its hosts, which then runs LINE if its link is up; or LAB: every
process of the job gets a host of its own, which its role and rank in LINE tell, so one link belongs to one process. As
over ssh, nothing of the launcher's own environment reaches the other host but the mark by
which the run's processes are found.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from pathlib import Path
from typing import Dict

from p3.measure.chaos.matrix import SERVERS, Victim
from p3.measure.lab import hosts, network

LAB = "lab"
SCHEDULER_HOST = 0
_PORT, _ANSWER_S = 22, 3.0


def host_of(process: Victim) -> int:
    """The number of its host in the lab; the scheduler is on the first."""
    first = {"scheduler": SCHEDULER_HOST, "server": 1, "worker": 1 + SERVERS}
    return first[process.role] + process.rank


def folder_of(host: hosts.Host) -> Path:
    """Of its lab."""
    return hosts.RUN / host.lab / "lab"


def environment(launcher: hosts.Host) -> Dict[str, str]:
    """Of a `p3 run` on that host of a lab, so that it reaches the others."""
    ssh = f"{sys.executable} -m p3.measure.chaos.lab_ssh {folder_of(launcher)}"
    return {"DMLC_NODE_HOST": launcher.address, "P3_SSH": ssh}


def _own_host(line: str) -> int:
    role = re.search(r"\bDMLC_ROLE=(worker|server)\b", line).group(1)
    rank = int(re.search(r"\bP3_RANK=(\d+)\b", line).group(1))
    return host_of(Victim(role, rank))


def _reached(folder: Path, address: str) -> int:
    """Its number. Ends as ssh does if nothing comes back from there."""
    try:
        socket.create_connection((address, _PORT), _ANSWER_S).close()
    except ConnectionRefusedError:
        pass  # nobody listens, but the host has said so
    except OSError as error:
        print(f"ssh: connect to host {address} port {_PORT}: {error}", file=sys.stderr)
        sys.exit(255)
    return next(host.node for host in hosts.attach(folder.parent.name) if host.address == address)


def main() -> None:
    folder, host, line = Path(sys.argv[1]), *sys.argv[2:]
    number = _own_host(line) if host == LAB else _reached(folder, host)
    argv = network.enter(folder / str(number), ["sh", "-c", line])
    env = {name: value for name, value in os.environ.items() if not name.startswith(("DMLC_", "P3_"))}
    os.execvpe(argv[0], argv, env)


if __name__ == "__main__":
    main()
