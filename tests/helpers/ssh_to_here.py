"""Stands for ssh: ssh_to_here.py FOLDER HOST LINE runs the line on this machine, if FOLDER has a file "HOST.up".

Processes of a host have HOST_OF_TEST=FOLDER/HOST in their environment, so that a test can end all of them at once.
"""

import os
import signal
import sys
from pathlib import Path


def main():
    folder, host, line = sys.argv[1:]
    if not Path(folder, host + ".up").exists():
        sys.exit("ssh: connect to host %s port 22: No route to host" % host)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("DMLC_", "P3_"))}
    os.execve("/bin/sh", ["sh", "-c", line], dict(env, HOST_OF_TEST="%s/%s" % (folder, host)))


def processes_of(folder, host):
    found = []
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open("/proc/%s/environ" % process, "rb") as file:
                if os.fsencode("HOST_OF_TEST=%s/%s" % (folder, host)) in file.read().split(b"\0"):
                    found.append(int(process))
        except OSError:
            pass  # it has ended, or is another user's
    return found


def lose(folder, host):
    """The host is gone, with all its processes; the caller may be one of them."""
    Path(folder, host + ".up").unlink()
    for process in sorted(processes_of(folder, host), key=lambda process: process == os.getpid()):
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            pass


if __name__ == "__main__":
    main()
