"""Jobs of tests/jobs/joining_behind.py, which lose workers and servers and are joined by others, with what must come of
their training."""

import os
import re
import signal
import sys
import uuid

import numpy as np
from joined_jobs import P3
from plugin_jobs import SCRIPTS
from processes import Process

from p3.measure.chaos import strike
from p3.measure.chaos.matrix import Victim

sys.path.insert(0, str(SCRIPTS))
import joining_behind as script

STEPS = 20


class Job:
    def __init__(self, folder, processes, *options, losses=("worker", "server"), command=None, **env):
        self.env = {"OMP_NUM_THREADS": "1", **env}
        self.folder, self.processes, self.mark, self.said = folder, processes, uuid.uuid4().hex, ""
        self.command = command or [sys.executable, str(SCRIPTS / "joining_behind.py"), str(STEPS), str(folder)]
        self.run = self.begin(losses, options)
        self.guests = []

    def begin(self, losses, options):
        """Of three workers and three servers."""
        options = [*options, *(word for role in losses for word in ("--on-%s-loss" % role, "continue"))]
        return self.p3("run", "-n", "3", "-s", "3", *options, *self.command)

    def p3(self, *arguments):
        return self.start([*P3, *arguments])

    def start(self, command):
        variables = {**strike.environment(self.mark), **self.env}
        self.processes.append(Process(command, variables, self.folder))
        return self.processes[-1]

    def join(self, *options):
        """A server with --server, else a worker."""
        command = [] if "--server" in options else self.command
        self.guests.append(self.ask_in(*options, *command))
        self.hear("waits to come back" if "--server" in options else "waits to join the job")
        return self.guests[-1]

    def ask_in(self, *arguments):
        return self.p3("join", "--pid", str(self.run.popen.pid), *arguments)

    def hear(self, text, times=1):
        for _ in range(times):
            self.said += self.run.read_until(text)

    def kill(self, role, rank, how=signal.SIGKILL):
        os.kill(strike.find(Victim(role, rank), self.mark), how)

    def lose_server(self, rank, workers):
        """Until all of these know."""
        self.kill("server", rank)
        self.hear("server %d is lost; server" % rank, workers)

    def lose_guest(self, guest, rank, workers):
        """A server, as lose_server()."""
        guest.signal(signal.SIGKILL)
        self.guests.remove(guest)
        self.hear("server %d is lost; server" % rank, workers)

    def let_go(self, step):
        (self.folder / ("go-%s" % step)).touch()

    def end(self, absent=None, steps=()):
        """`absent`: a worker that did not take part in these steps, in which all others did."""
        ended = self.run.wait(100)
        came = [guest.wait(60) for guest in self.guests]
        said = self.said + ended.out + "".join(one.out for one in came)
        assert ended.code == 0 and all(one.code == 0 for one in came), (ended, came)
        for step in range(STEPS):
            took_part = 7 - (1 << absent) if step in steps else 7
            assert set(re.findall(r"worker \d step %d: (.*)" % step, said)) == {"[%d]" % took_part}, (step, ended)
        wanted = -sum(script.gradient_of(rank, step) for rank in range(3) for step in range(STEPS)
                      if (rank, step) not in [(absent, one) for one in steps])  # fmt: skip
        for rank in range(3):
            np.testing.assert_array_equal(np.load(self.folder / ("%d.npy" % rank)), wanted)
        return ended
