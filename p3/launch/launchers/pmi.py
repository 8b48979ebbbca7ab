"""PMI-1, the wire by which Hydra, MPICH's launcher, answers the processes that it has started.

Lines of `name=value` over a socket that each process inherits, PMI_FD. P3 asks for two things and leaves: the name of
the job's key space, which is the job's own, and the mapping of ranks to machines. A script that uses MPI itself cannot
introduce itself to Hydra a second time.
"""

from __future__ import annotations

import functools
import os
import re
import socket
from typing import Dict, List, Mapping, NamedTuple, Optional, Tuple

from p3.errors import ConfigError

_TIMEOUT_S = 10.0


class Answer(NamedTuple):
    job: Optional[str] = None
    machines: Optional[str] = None
    machine: Optional[str] = None


def ask(env: Mapping[str, str]) -> Answer:
    """What Hydra says of this process; nothing, if there is no Hydra to ask. ConfigError if it cannot be understood."""
    descriptor = env.get("PMI_FD", "")
    return _ask(int(descriptor), int(env["PMI_RANK"]), int(env["PMI_SIZE"])) if descriptor.isdigit() else Answer()


@functools.lru_cache(maxsize=None)  # it answers once
def _ask(descriptor: int, rank: int, size: int) -> Answer:
    try:
        with socket.socket(fileno=os.dup(descriptor)) as hydra:
            hydra.settimeout(_TIMEOUT_S)
            lines = hydra.makefile("r", encoding="ascii", newline="\n")

            def say(command: str, **values: str) -> Dict[str, str]:
                words = ["cmd=" + command, *("%s=%s" % item for item in values.items())]
                hydra.sendall((" ".join(words) + "\n").encode())
                return dict(word.partition("=")[::2] for word in lines.readline().split())

            say("init", pmi_version="1", pmi_subversion="1")
            space = say("get_my_kvsname")["kvsname"]
            mapping = say("get", kvsname=space, key="PMI_process_mapping").get("value", "")
            say("finalize")
    except (OSError, KeyError, ValueError) as error:
        text = "Hydra's answer at PMI_FD=%d is not of PMI-1: %r"
        raise ConfigError(text % (descriptor, error)) from None
    machines = machines_of(mapping, size)
    numbers = sorted(set(machines))
    if rank >= len(machines):
        return Answer(space)
    return Answer(space, str(len(numbers)), str(numbers.index(machines[rank])))


def machines_of(mapping: str, size: int) -> List[int]:
    """The machine of each rank, by (vector,(FIRST,MACHINES,RANKS_ON_EACH),...), which is begun anew until all have
    one; empty if it cannot be understood."""
    blocks: List[Tuple[int, ...]] = [tuple(map(int, block)) for block in re.findall(r"\((\d+),(\d+),(\d+)\)", mapping)]
    once = [first + offset for first, count, each in blocks for offset in range(count) for _ in range(each)]
    return (once * (size // len(once) + 1))[:size] if once else []
