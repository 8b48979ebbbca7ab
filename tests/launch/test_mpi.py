"""Jobs of Open MPI's mpirun and of MPICH's mpiexec, on two hosts that both are this machine."""

import os
import signal

import launched_jobs as jobs
import mpi_launchers
import pytest
from processes import Process

SIZE = 4


@pytest.fixture(params=mpi_launchers.KINDS)
def start(request, processes, tmp_path):
    """start(steps...) -> Process of the launcher: four workers on two hosts, two on each."""
    launcher = mpi_launchers.launcher(request.param, tmp_path, ["one", "two"], 2)

    def start(*arguments, command=None, **variables):
        command = [*launcher, *(command or jobs.command(tmp_path, *arguments))]
        env = {**jobs.environment(tmp_path, **variables), **mpi_launchers.ENVIRONMENT}
        processes.append(Process(command, env, tmp_path))
        return processes[-1]

    return start


def nothing_is_left(folder):
    jobs.wait_until(lambda: not jobs.living(folder), 20)
    assert os.listdir(folder / ".p3") == []


def test_mpirun_starts_a_job_with_a_server_on_each_host(start, tmp_path):
    ended = start(4).wait(60)
    assert ended.code == 0, ended
    number, digests, _ = jobs.digests(ended.out)
    assert (number, len(digests)) == (SIZE, 1) and ended.out.count("with 2 servers") == SIZE, ended.out
    told = jobs.workers(tmp_path, SIZE)
    assert [(one["P3_LOCAL_RANK"], one["P3_LOCAL_SIZE"]) for one in told] == [("0", "2"), ("1", "2")] * 2
    nothing_is_left(tmp_path)


@pytest.mark.parametrize("rank, role", [(1, "worker"), (0, "server"), (2, "")], ids=["worker", "server", ""])
def test_a_killed_process_ends_the_job(start, tmp_path, rank, role):
    launcher = start(0)
    supervisor = jobs.workers(tmp_path, SIZE, launcher)[rank]["parent"]
    os.kill(jobs.node_of(supervisor, role) if role else supervisor, signal.SIGKILL)
    ended = launcher.wait(60)
    assert ended.code != 0, ended
    if role == "worker":
        assert "p3 exec: worker 1 (" in ended.err and "ended with signal SIGKILL" in ended.err
    nothing_is_left(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_cancelled_job_ends_and_leaves_nothing(start, tmp_path, number):
    launcher = start(0)
    jobs.workers(tmp_path, SIZE, launcher)
    launcher.signal(number)
    ended = launcher.wait(60)
    # Hydra's proxy may take codes for 0 once it has passed on a signal, if outputs close before it has waited.
    assert ended.code != 0 or "hydra" in os.path.realpath(launcher.popen.args[0]), ended
    assert "began at" not in ended.out, ended  # the last line of a worker that comes to its end
    nothing_is_left(tmp_path)


def test_the_doctor_asks_each_host_once(start, tmp_path):
    assert jobs.examined(tmp_path, start(command=jobs.doctor(tmp_path)).wait(60)) == [0, 2]
    nothing_is_left(tmp_path)


def test_a_job_that_is_started_again_resumes_from_its_snapshot(start, tmp_path):
    snapshots = {"P3_SNAPSHOT_DIR": str(tmp_path / "snapshots"), "P3_SNAPSHOT_EVERY": "2"}
    _, undisturbed, _ = jobs.digests(start(7).wait(60).out)
    assert start(7, 5, **snapshots).wait(60).code != 0
    again = start(7, 5, **snapshots).wait(60)
    assert jobs.digests(again.out) == (SIZE, undisturbed, {4}), again
    nothing_is_left(tmp_path)
