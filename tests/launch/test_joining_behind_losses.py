"""Processes that join a job which has lost servers: they go to the heirs as all others, to the bit."""

import os
import re
import signal
import sys
import uuid

import numpy as np
from plugin_jobs import SCRIPTS
from processes import Process

from p3.measure.chaos import strike
from p3.measure.chaos.matrix import Victim

sys.path.insert(0, str(SCRIPTS))
import joining_behind as script

STEPS = 20


class Job:
    def __init__(self, folder, processes):
        self.folder, self.mark, self.said = folder, uuid.uuid4().hex, ""
        argv = [sys.executable, "-m", "p3", "run", "-n", "3", "-s", "3", "--rejoin", "--on-worker-loss", "continue"]
        argv += ["--on-server-loss", "continue", sys.executable, str(SCRIPTS / "joining_behind.py"), str(STEPS)]
        variables = {**strike.environment(self.mark), "OMP_NUM_THREADS": "1"}
        self.run = Process([*argv, str(folder)], variables, folder)
        processes.append(self.run)

    def hear(self, text, times=1):
        for _ in range(times):
            self.said += self.run.read_until(text)

    def kill(self, role, rank, how=signal.SIGKILL):
        os.kill(strike.find(Victim(role, rank), self.mark), how)

    def lose_server(self, rank, workers):
        """Until all of these know."""
        self.kill("server", rank)
        self.hear("server %d is lost; server" % rank, workers)

    def let_go(self, step):
        (self.folder / ("go-%s" % step)).touch()

    def end(self, absent=None, steps=()):
        """`absent`: a worker that did not take part in these steps, in which all others did."""
        ended = self.run.wait(100)
        said = self.said + ended.out
        assert ended.code == 0, ended
        for step in range(STEPS):
            took_part = 7 - (1 << absent) if step in steps else 7
            assert set(re.findall(r"worker \d step %d: (.*)" % step, said)) == {"[%d]" % took_part}, (step, ended)
        wanted = -sum(script.gradient_of(rank, step) for rank in range(3) for step in range(STEPS)
                      if (rank, step) not in [(absent, one) for one in steps])  # fmt: skip
        for rank in range(3):
            np.testing.assert_array_equal(np.load(self.folder / ("%d.npy" % rank)), wanted)
        return ended


def workers_started(ended):
    """Again; servers are, too."""
    return len(re.findall(r"worker \d ended with .*another one is started", ended.err))


def test_others_join_behind_one_loss_after_the_other(tmp_path, processes):
    job = Job(tmp_path, processes)
    job.let_go(0)
    job.let_go("on")
    for step, server, worker in ((5, 1, 2), (10, 0, 0)):  # the second one is of servers that have inherited
        job.hear("waits for go-%d" % step, 3)
        job.lose_server(server, 3)
        job.kill("worker", worker)
        job.hear("waits to join the job")
        job.let_go(step)
    job.hear("waits for go-15", 3)
    job.let_go(15)
    job.end()


def test_one_that_waits_to_join_as_a_server_is_lost_joins_behind_that(tmp_path, processes):
    job = Job(tmp_path, processes)
    job.let_go(0)
    job.hear("waits for go-5", 3)
    job.kill("worker", 1)
    job.hear("waits to join the job")
    job.lose_server(0, 2)
    for step in ("on", 5, 10, 15):
        job.let_go(step)
    ended = job.end()
    assert workers_started(ended) == 1, ended


def test_one_on_trial_departs_with_a_server_and_the_next_one_joins(tmp_path, processes):
    job = Job(tmp_path, processes)
    job.let_go("0")
    job.hear("waits for go-5", 3)
    job.kill("worker", 1)
    job.hear("waits to join the job")
    job.let_go(5)
    job.hear("waits for go-on")
    job.kill("server", 1)
    job.hear("The others go on without it")  # it may itself have noticed first
    job.let_go("on")
    job.hear("waits to join the job")
    for step in (10, 15):
        job.let_go(step)
    ended = job.end(1, range(5, 10))
    assert workers_started(ended) == 2, ended


def test_the_next_scheduler_knows_the_heirs(tmp_path, processes):
    job = Job(tmp_path, processes)
    job.let_go(0)
    job.hear("waits for go-5", 3)
    job.lose_server(2, 3)
    job.kill("scheduler", 0)
    job.hear("all nodes have come back")
    job.kill("worker", 2)
    job.hear("waits to join the job")
    for step in ("on", 5, 10, 15):
        job.let_go(step)
    job.end()
