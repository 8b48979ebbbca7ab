"""Jobs that srun, mpirun, mpiexec or torchrun has started: they lose a worker, a server or a node, and train on, and
others join in their places; to the bit."""

import os
import signal

import launched_jobs as jobs
import mpi_launchers
import pytest
import slurm
import torchruns
from joining_behind_jobs import P3, Job
from processes import SECRET

from p3.measure.chaos import strike
from p3.measure.chaos.matrix import Victim


class Launched(Job):
    """Three `p3 exec` on three hosts, each with a worker and a server."""

    def __init__(self, launcher, folder, processes, **env):
        self.launcher = launcher
        super().__init__(folder, processes, **jobs.environment(folder, **launcher.environment, **env))

    def begin(self, losses, options):
        self.env.update({"P3_ON_%s_LOSS" % role.upper(): "continue" for role in losses})
        return self.start([*jobs.ALL_IN_ONE, *self.launcher.command, *P3, "exec", *self.command])

    def supervisor(self, rank):
        """The `p3 exec` of that worker."""
        return jobs.parent(strike.find(Victim("worker", rank), self.mark))

    def ask_in(self, *arguments):
        joins = [*P3, "join", "--pid", str(self.supervisor(0)), *arguments]
        return self.start([*jobs.ALL_IN_ONE, *self.launcher.for_one(self), *joins])

    def lose_beside(self, rank, workers):
        """The server beside that worker; which rank it has, the launcher may leave to the scheduler."""
        os.kill(jobs.node_of(self.supervisor(rank), "server"), signal.SIGKILL)
        self.hear("is lost; server", workers)

    def until_step_5(self):
        self.let_go(0)
        self.let_go("on")
        self.hear("waits for go-5", 3)

    def end_with_others(self):
        """In the places of a worker, which has departed, and of a server."""
        self.hear("The others go on without it")
        self.join()
        self.join("--server")
        self.let_go(5)
        self.hear("is back")
        for step in (10, 15):
            self.let_go(step)
        ended = self.end()
        jobs.wait_until(lambda: not strike.marked(self.mark), 20)
        return ended


class Srun:
    def __init__(self, folder):
        if slurm.missing():
            pytest.skip("no %s here; sudo tools/needs all installs Slurm" % " ".join(slurm.missing()))
        self.folder = folder / "slurm"
        self.folder.mkdir()
        # By the time-out it knows that a node is lost.
        self.slurm = slurm.Slurm(self.folder, 4, jobs.environment(self.folder), "SlurmdTimeout=10")
        self.environment = {"SLURM_CONF": self.slurm.env["SLURM_CONF"]}
        self.command = ["srun", "--nodes=3", "--ntasks=3", "--no-kill"]

    def for_one(self, job):
        """As a further step of the same allocation, on its first node."""
        variables = strike.marked(job.mark)[job.supervisor(0)]
        return ["srun", "--jobid=" + variables["SLURM_JOB_ID"], "--overlap", "--nodes=1", "--ntasks=1",
                "--nodelist=" + variables["SLURMD_NODENAME"]]  # fmt: skip

    def end(self):
        self.slurm.end()


class Mpi:
    environment = mpi_launchers.ENVIRONMENT

    def __init__(self, kind, folder):
        self.kind, self.folder = kind, folder
        self.command = mpi_launchers.launcher(kind, folder, ["one", "two", "three"], 1)

    def for_one(self, _job):
        return mpi_launchers.launcher(self.kind, self.folder, ["one"], 1)

    def end(self):
        pass


class Torchrun:
    """Three agents with a worker each, which for P3 are three hosts."""

    environment = {"P3_SECRET": SECRET}

    def __init__(self, _folder):
        self.command = torchruns.agents(3, "--no-python")

    def for_one(self, _job):
        return []  # on any host that can reach the job

    def end(self):
        pass


@pytest.fixture
def launcher(request, tmp_path):
    kind, *which = request.param.split()
    made = {"srun": Srun, "mpi": Mpi, "torchrun": Torchrun}[kind](*which, tmp_path)
    yield made
    made.end()


OF_TORCH = pytest.param("torchrun", marks=pytest.mark.torch)


@pytest.mark.parametrize("launcher", ["srun", "mpi openmpi", "mpi mpich", OF_TORCH], indirect=True)
def test_a_worker_and_a_server_are_lost_and_others_join(launcher, tmp_path, processes):
    job = Launched(launcher, tmp_path, processes)
    job.until_step_5()
    job.lose_beside(1, 3)
    job.kill("worker", 2)
    job.end_with_others()


@pytest.mark.parametrize("launcher", ["srun"], indirect=True)
def test_a_node_is_lost_and_another_one_takes_its_place(launcher, tmp_path, processes):
    """Slurm's daemons on it, too: srun waits until Slurm says that it is lost."""
    job = Launched(launcher, tmp_path, processes)
    job.until_step_5()
    launcher.slurm.lose(strike.marked(job.mark)[job.supervisor(2)]["SLURMD_NODENAME"], job.supervisor(2))
    assert "Node failure on" in job.end_with_others().out
