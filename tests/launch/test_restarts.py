"""When what was lost starts again: `p3 run --rejoin`, while a host reboots or stays away."""

import sys

from joined_jobs import P3, command, require_right, start
from lab_traces import needs_lab
from processes import HELPERS, PYTHONPATH, ROOT, Process, clean_environment
from reached_by_ssh import ReachedBySsh
from ssh_to_here import lose

from p3.launch.placement import Host
from p3.launch.restarts import REFUND_S, Budget, Cooling
from p3.measure.lab.hosts import lab

ALPHA, BETA = Host("alpha", 2), Host("beta", 3)


# What is decided


def test_restarts_are_limited_and_given_back_to_what_does_well():
    budget = Budget(2)
    assert [budget.spend(1.0) for _ in range(3)] == [True, True, False]
    assert budget.spend(REFUND_S * 0.9) is False
    assert budget.spend(REFUND_S) is True and budget.left == 0
    assert budget.spend(REFUND_S * 50) is True and budget.left == 1  # never more than at first
    assert not Budget(0).spend(REFUND_S * 50)


def test_the_first_restart_comes_at_once_and_pauses_double_up_to_a_limit():
    budget, pauses = Budget(9), []
    while budget.spend(0.0):
        pauses.append(budget.pause_s(0.5))
    assert pauses == [0, 0.5, 1, 2, 4, 8, 16, 16, 16]


def test_a_host_on_which_starts_fail_is_left_alone_for_longer_each_time():
    cooling, now, pauses = Cooling(1.0), 100.0, []
    for _ in range(7):
        cooling.failed(BETA, now)
        cooling.failed(BETA, now + 0.5)  # another one that was started at the same time
        pauses.append(cooling.left_s(BETA, now))
        now += pauses[-1]
        assert cooling.left_s(BETA, now) == 0
    assert pauses == [1, 2, 4, 8, 16, 32, 32]
    assert cooling.left_s(ALPHA, now) == 0


# Jobs


# Worker 1 of each start of the job: whether it joins, and with which code it ends then.
BY_STARTS = """
    import os, pathlib
    from p3.worker.session import Session

    is_second = os.environ["P3_RANK"] == "1"
    started = pathlib.Path("started-" + os.environ["P3_RANK"])
    started.write_text(started.read_text() + "." if started.exists() else ".")
    joins, code = [(True, 3), (False, 4), (False, 5), (True, 0)][len(started.read_text()) - 1]
    if is_second and not joins:
        os._exit(code)
    with Session.open() as session:
        if is_second and code:
            os._exit(code)
        session.barrier()
    print("done", flush=True)
"""


def test_a_job_that_has_begun_starts_again_also_if_the_next_start_fails_before_it_begins(run_job):
    finished = run_job(BY_STARTS, options=("--restarts", "3", "--restart-pause", "0.1"))
    assert finished.code == 0, finished
    for restart, code in ((1, 3), (2, 4), (3, 5)):
        assert "exit code %d; restarting it (restart %d of 3)" % (code, restart) in finished.err
    assert finished.out.count("] done\n") == 2


def test_starts_that_cannot_reach_the_host_are_counted_and_the_job_ends_without_the_worker(tmp_path, processes):
    for name in ("alpha", "beta"):
        (tmp_path / (name + ".up")).touch()
    (tmp_path / "hosts").write_text("alpha slots=1\nbeta slots=1\n")
    ssh = "%s %s %s" % (sys.executable, HELPERS / "ssh_to_here.py", tmp_path)
    options = ("-s", "1", "--hostfile", str(tmp_path / "hosts"), "--rejoin", "--worker-restarts", "2")
    env = {"PYTHONPATH": PYTHONPATH, "DMLC_NODE_HOST": "127.0.0.1", "OMP_NUM_THREADS": "1", "P3_SSH": ssh}
    job = start(tmp_path, processes, 2, [], [5], *options, **env)
    try:
        said = job.read_until("worker 0 waits for go-5", "worker 1 waits for go-5")
        lose(tmp_path, "beta")
        errors = read_errors_until(job, "another one is started now", "(0 more restarts allowed)")
        assert errors.count("ssh: connect to host beta port 22: No route to host") == 1, errors
        (tmp_path / "go-5").touch()
        ended = job.wait()
        assert ended.code == 0, ended
        require_right(tmp_path, said + ended.out, lambda step: [0] if step >= 5 else [0, 1], 2)
    finally:
        for name in ("alpha", "beta"):
            (tmp_path / (name + ".up")).touch()
            lose(tmp_path, name)


@needs_lab
def test_a_worker_joins_again_from_a_host_that_has_rebooted(tmp_path, processes, sshd):
    """A start that hears nothing of the host is given up, one that is refused is tried again after a pause."""
    with lab(2) as hosts:
        far = ReachedBySsh(hosts[1], tmp_path, sshd, processes)
        far.boot()
        (tmp_path / "hosts").write_text("localhost slots=1\n%s slots=1\n" % far.name)
        job = ("-n", "2", "-s", "1", "--hostfile", str(tmp_path / "hosts"), "--on-worker-loss", "continue")
        options = (*job, "--rejoin", "--worker-restarts", "20", "--restart-pause", "0.1")
        env = clean_environment(P3_SSH=far.ssh, P3_TIMEOUT_S="2", OMP_NUM_THREADS="1", P3S_GATES="5")
        arguments = hosts[0].command(*P3, "run", *options, *command(tmp_path))
        processes.append(Process(arguments, env, ROOT))
        job = processes[-1]
        said = job.read_until("worker 0 waits for go-5", "worker 1 step 4:")  # of go-5 the other host does not know
        far.cut_off()
        read_errors_until(job, "signal SIGKILL; the job goes on without it, and", times=2)  # the worker, and a start
        far.end_all()
        far.is_connected()
        read_errors_until(job, "Connection refused; the job goes on without it, and", times=2)
        far.boot()
        said += job.read_until("waits to join the job")
        (tmp_path / "go-5").touch()
        ended = job.wait()
    assert ended.code == 0, ended
    require_right(tmp_path, said + ended.out, lambda step: [0, 1], 2)


def read_errors_until(job, *texts, times=1):
    """Until each has come so often in what it says on its standard error."""
    said = ""
    while any(said.count(text) < times for text in texts):
        line = job.popen.stderr.readline().decode()
        assert line, ("p3 run has ended", said)
        said += line
    return said
