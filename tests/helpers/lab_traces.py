"""What a lab leaves on the machine, looked at from outside; and the condition for tests that need one."""

import subprocess
from pathlib import Path

import pytest

from p3.measure.lab import hosts

needs_lab = pytest.mark.skipif(hosts.why_unavailable() is not None, reason=str(hosts.why_unavailable()))

DEADLINE_S = 30


def traces(name):
    """Folders and mounts of a lab. Namespaces need no look of their own: without a mount only a process keeps one."""
    folder = hosts.RUN / name
    mounted = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [str(folder)] * folder.exists() + [path for path in mounted if path.startswith("%s/" % folder)]


def output(host, *argv):
    """What a command prints on a host. The test fails if the command does."""
    return subprocess.check_output(host.command(*argv), timeout=DEADLINE_S, universal_newlines=True).strip()
