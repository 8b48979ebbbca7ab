"""A host of a lab with an sshd of its own, which can be cut off and go down, and come back."""

import os
import signal
import time

from processes import Process, clean_environment

from p3.measure.lab import network
from p3.measure.lab.hosts import RUN

PORT = "2222"


class ReachedBySsh:
    def __init__(self, host, folder, ssh, processes):
        """`folder`, `ssh`: of the fixture `sshd`, whose keys and options it takes."""
        self._host, self._folder, self._processes = host, folder, processes
        self._lab = RUN / host.lab / "lab"
        words = [word for word in ssh.split() if not word.startswith("-oHostName=")]
        words[words.index("-p") + 1] = PORT
        self.name, self.ssh = host.name, " ".join(words)

    def boot(self):
        """Its network is there, and sshd listens when this returns."""
        network.mend(self._lab, self._host.node)
        command = ["/usr/sbin/sshd", "-D", "-e", "-f", str(self._folder / "config"), "-p", PORT]
        self._processes.append(Process(self._host.command(*command), clean_environment(), self._folder))
        while b"Server listening" not in self._processes[-1].popen.stderr.readline():
            assert self._processes[-1].popen.poll() is None

    def cut_off(self):
        """Nobody is told."""
        network.cut(self._lab, self._host.node)

    def is_connected(self):
        """Has its cable, but no sshd yet."""
        network.mend(self._lab, self._host.node)

    def processes(self):
        return [pid for pid, node in network.processes(self._lab).items() if node == str(self._host.node)]

    def end_all(self):
        deadline = time.monotonic() + 20
        while self.processes():
            assert time.monotonic() < deadline, "processes survive SIGKILL"
            for pid in self.processes():
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
