"""Jobs of Slurm's own: slurmctld and four slurmd on this machine, as Debian has them."""

import os
import signal
import sys

import launched_jobs as jobs
import pytest
import slurm
from plugin_jobs import SCRIPTS
from processes import ROOT, Process

from p3.snapshots import files

pytestmark = pytest.mark.skipif(
    bool(slurm.missing()), reason="no %s here; sudo tools/needs all installs Slurm" % " ".join(slurm.missing())
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slurm")
    started = slurm.Slurm(folder, 4, jobs.environment(folder))
    yield started
    started.end()
    jobs.wait_until(lambda: not jobs.living(folder), 20)
    assert not [path for path in os.listdir("/dev/shm") if "slurm" in path]


def srun(cluster, processes, folder, *options, arguments=(), command=None):
    env = jobs.environment(folder, SLURM_CONF=cluster.env["SLURM_CONF"])
    processes.append(Process(["srun", *options, *(command or jobs.command(folder, *arguments))], env, folder))
    return processes[-1]


def batch(cluster, folder, line):
    """A batch job of two nodes with a task each."""
    (folder / "job.sh").write_text("#!/bin/sh\nexec %s\n" % line)
    return cluster.submit(folder / "job.sh", "--nodes=2", "--ntasks-per-node=1", **jobs.environment(folder))


def nothing_is_left(folder):
    jobs.wait_until(lambda: not jobs.living(folder), 20)
    assert not (folder / ".p3").exists() or os.listdir(folder / ".p3") == []


@pytest.mark.parametrize("nodes, tasks", [(2, 3), (4, 4)])
def test_srun_starts_a_job_with_a_server_on_each_node(cluster, processes, tmp_path, nodes, tasks):
    job = srun(cluster, processes, tmp_path, "-N%d" % nodes, "-n%d" % tasks, "--cpus-per-task=2", arguments=(4,))
    ended = job.wait(60)
    assert ended.code == 0, ended
    number, digests, _ = jobs.digests(ended.out)
    assert (number, len(digests)) == (tasks, 1) and ended.out.count("with %d servers" % nodes) == tasks, ended.out
    told = jobs.workers(tmp_path, tasks)
    sizes = ["2", "2", "1"] if tasks == 3 else ["1"] * 4
    assert [one["P3_LOCAL_SIZE"] for one in told] == sizes
    assert [one["OMP_NUM_THREADS"] for one in told] == ["1"] * tasks  # ours; Slurm's 2 are for who has not said
    nothing_is_left(tmp_path)


@pytest.mark.parametrize("rank, role", [(1, "worker"), (0, "server"), (2, "")], ids=["worker", "server", "p3exec"])
def test_a_killed_task_ends_the_job(cluster, processes, tmp_path, rank, role):
    job = srun(cluster, processes, tmp_path, "-N4", "-n4", arguments=(0,))
    supervisor = jobs.workers(tmp_path, 4, job)[rank]["parent"]
    os.kill(jobs.node_of(supervisor, role) if role else supervisor, signal.SIGKILL)
    ended = job.wait(60)
    assert ended.code == (1 if role == "server" else 128 + signal.SIGKILL), ended
    if role:
        assert "ended with signal SIGKILL" in ended.err
    nothing_is_left(tmp_path)


def test_a_cancelled_job_ends_and_leaves_nothing(cluster, tmp_path):
    job = batch(cluster, tmp_path, "srun " + jobs.shell(jobs.command(tmp_path, 0)))
    jobs.workers(tmp_path, 2)
    cluster.run("scancel", job)
    cluster.wait(job, "CANCELLED")
    nothing_is_left(tmp_path)


def example():
    """The example, for nodes of four cores."""
    text = (ROOT / "examples" / "slurm" / "train.sbatch").read_text()
    assert "--cpus-per-task=8" in text
    return text.replace("--cpus-per-task=8", "--cpus-per-task=3")


def test_a_job_of_the_example_is_requeued_and_resumes_from_its_snapshot(cluster, tmp_path):
    text = example()
    text = text.replace("P3_SNAPSHOT_EVERY=100", "P3_SNAPSHOT_EVERY=2")

    def submit(*arguments):
        (tmp_path / "train.sbatch").write_text(
            text.replace("p3 exec python train.py", jobs.shell(jobs.command(tmp_path, *arguments)))
        )
        return cluster.submit(tmp_path / "train.sbatch", "--chdir=%s" % tmp_path, **jobs.environment(tmp_path))

    whole = submit(7)
    cluster.wait(whole, "COMPLETED")
    assert [one["SLURM_CPUS_PER_TASK"] for one in jobs.workers(tmp_path, 4)] == ["3"] * 4
    number, undisturbed, began = jobs.digests(cluster.output(whole))
    assert (number, len(undisturbed), began) == (4, 1, {0}), cluster.output(whole)
    job = submit(7, 5)
    cluster.wait(job, "COMPLETED", timeout_s=80)
    assert jobs.digests(cluster.output(job)) == (4, undisturbed, {4}), cluster.output(job)
    nothing_is_left(tmp_path)


def test_a_job_of_the_example_whose_time_is_over_takes_a_snapshot_and_goes_on_from_it(cluster, tmp_path):
    text = example()
    command = [sys.executable, "-m", "p3", "exec", sys.executable, str(SCRIPTS / "on_demand.py"), "numpy", "0"]
    # What is requeued finds that file, and trains a few steps more.
    command = "sh -c 'exec %s $(cat steps 2>/dev/null || echo 0)'" % jobs.shell(command[:-1])
    (tmp_path / "train.sbatch").write_text(
        text.replace("p3 exec python train.py", command).replace("P3_SNAPSHOT_EVERY=100", "P3_SNAPSHOT_EVERY=1000000")
    )
    job = cluster.submit(tmp_path / "train.sbatch", "--chdir=%s" % tmp_path, **jobs.environment(tmp_path))
    jobs.wait_until(lambda: cluster.output(job).count("trains with") == 4)
    cluster.run("scancel", "--signal=USR1", "--batch", job)  # as --signal has Slurm do it
    folder = cluster.folder / ("snapshots-" + job)  # where it was submitted
    jobs.wait_until(lambda: files.rounds(str(folder)))
    (saved,) = files.rounds(str(folder))
    (tmp_path / "steps").write_text(str(saved + 3))
    cluster.wait(job, "COMPLETED", timeout_s=80)
    output = cluster.output(job)
    assert output.count("the job ends, as SIGTERM asked; its snapshot of round %d is complete" % saved) == 4, output
    assert output.count("from %d to %d: " % (saved, saved + 3)) == 4, output
    nothing_is_left(tmp_path)


def test_the_doctor_asks_each_node_once(cluster, processes, tmp_path):
    ended = srun(cluster, processes, tmp_path, "-N3", "-n4", command=jobs.doctor(tmp_path)).wait(60)
    assert jobs.examined(tmp_path, ended) == [0, 2, 3]
    nothing_is_left(tmp_path)


def test_a_cancelled_doctor_leaves_nothing(cluster, tmp_path):
    job = batch(cluster, tmp_path, "srun " + jobs.shell(jobs.doctor(tmp_path, "60")))
    jobs.wait_until(lambda: (tmp_path / ".p3").exists() and os.listdir(tmp_path / ".p3"))
    cluster.run("scancel", job)
    cluster.wait(job, "CANCELLED")
    nothing_is_left(tmp_path)


def test_a_batch_script_without_srun_is_told_so(cluster, tmp_path):
    job = batch(cluster, tmp_path, jobs.shell(jobs.command(tmp_path, 1)))
    cluster.wait(job, "FAILED")
    assert "this is Slurm's batch script itself; write srun p3 exec" in cluster.output(job)
