"""Stands for ssh towards the hosts of a lab, which have no sshd: python -m p3.measure.lab.ssh [-n] HOST LINE.

    P3_SSH="python -m p3.measure.lab.ssh" p3 lab exec 0 -- p3 run --hostfile hosts ...

HOST is its name in the lab, LAB-NODE. As over ssh, of the caller's environment nothing of P3 reaches the other host but
what is in LINE.
"""

from __future__ import annotations

import os
import sys

from p3.measure.lab import hosts


def main() -> None:
    *_, name, line = sys.argv[1:]
    try:
        host = next((host for host in hosts.attach(name.rpartition("-")[0]) if host.name == name), None)
    except hosts.LabError as error:
        sys.exit(str(error))
    if host is None:
        sys.exit("there is no host %s in its lab" % name)
    argv = host.command("sh", "-c", line)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("DMLC_", "P3_"))}
    os.execvpe(argv[0], argv, env)


if __name__ == "__main__":
    main()
