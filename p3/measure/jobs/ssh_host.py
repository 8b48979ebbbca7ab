"""Hosts behind ssh, for the lab's experiments on real machines.

What is started there through `SshHost.supervised` lives as long as its standard input, which is the ssh connection: so
nothing stays behind when the program that started it ends, however it ends. `python -m p3.measure.jobs.ssh_host
COMMAND ...` is the other end; it reads the job's secret from the first line of its input,
as `p3 exec --secret-stdin` does.
"""

from __future__ import annotations

import os
import sys
from typing import List, Mapping, NamedTuple, Optional, Sequence

from p3.launch.execute import supervise
from p3.launch.placement import forwarded_environment, ssh_command
from p3.settings import Settings


class SshHost(NamedTuple):
    """As in a hostfile: `name` is what ssh is given, `address` where the other hosts reach it."""

    name: str
    address: str
    settings: Settings
    rate_mbit: Optional[float] = None

    def command(self, *argv: str) -> List[str]:
        """Runs `argv` there, in the same folder. It reads no input."""
        return ssh_command(self.settings, self.name, {}, os.getcwd(), argv, "-n")

    def supervised(self, argv: Sequence[str], environment: Mapping[str, str]) -> List[str]:
        env = dict(forwarded_environment(os.environ), PYTHONUNBUFFERED="1", **environment)
        words = [sys.executable, "-m", "p3.measure.jobs.ssh_host", *argv]
        return ssh_command(self.settings, self.name, env, os.getcwd(), words)


if __name__ == "__main__":
    sys.exit(supervise(sys.argv[1:]))
