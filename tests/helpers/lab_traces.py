"""What a lab leaves on the machine, looked at from outside; and the conditions for tests that need one."""

import os
import subprocess
from pathlib import Path

import pytest

from p3.measure.lab import hosts, relay

needs_lab = pytest.mark.skipif(hosts.why_unavailable() is not None, reason=str(hosts.why_unavailable()))
NO_RELAY = hosts.why_unavailable() or relay.why_unavailable()
needs_relay = pytest.mark.skipif(NO_RELAY is not None, reason=str(NO_RELAY))

DEADLINE_S = 30


def traces(name):
    """Folders and mounts of a lab. Namespaces need no look of their own: without a mount only a process keeps one."""
    folder = hosts.RUN / name
    mounted = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [str(folder)] * folder.exists() + [path for path in mounted if path.startswith("%s/" % folder)]


def relays(name):
    """Processes that carry a lab's frames, wherever they are."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended
        if relay.__name__.encode() in words and os.fsencode(hosts.RUN / name / "lab") in words:
            found.append(int(process.name))
    return found


def output(host, *argv):
    """What a command prints on a host. The test fails if the command does."""
    return subprocess.check_output(host.command(*argv), timeout=DEADLINE_S, universal_newlines=True).strip()
