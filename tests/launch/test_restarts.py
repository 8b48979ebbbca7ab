"""Where and when lost workers start again: `p3 run --on-worker-loss wait`, while a host reboots or stays away."""

import sys

from lab_traces import needs_lab
from plugin_jobs import python
from processes import HELPERS, PYTHONPATH, ROOT, Process, clean_environment
from reached_by_ssh import ReachedBySsh
from ssh_to_here import lose

from p3.launch.placement import Host, Task, moved, place, with_room
from p3.launch.restarts import REFUND_S, Budget, Cooling
from p3.measure.lab.hosts import lab

ALPHA, BETA, GAMMA = Host("alpha", 2), Host("beta", 3), Host("gamma")


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


def test_a_host_on_which_starts_fail_is_left_alone_for_longer_each_time_until_one_does_well():
    cooling, now, pauses = Cooling(1.0), 100.0, []
    for _ in range(7):
        cooling.failed(BETA, now)
        cooling.failed(BETA, now + 0.5)  # another one that was started at the same time
        pauses.append(cooling.left_s(BETA, now))
        now += pauses[-1]
        assert cooling.left_s(BETA, now) == 0
    assert pauses == [1, 2, 4, 8, 16, 32, 32]
    cooling.did_well(BETA)
    cooling.failed(BETA, now)
    assert cooling.left_s(BETA, now) == 1 and cooling.left_s(ALPHA, now) == 0


def test_another_host_is_chosen_only_while_its_own_is_left_alone():
    cooling = Cooling(4.0)
    assert cooling.choose(BETA, [ALPHA], 0.0) == (BETA, 0)
    cooling.failed(BETA, 0.0)
    assert cooling.choose(BETA, [], 1.0) == (BETA, 3)
    assert cooling.choose(BETA, [ALPHA, GAMMA], 1.0) == (ALPHA, 0)
    cooling.failed(ALPHA, 1.0)
    assert cooling.choose(BETA, [ALPHA], 2.0) == (BETA, 2)
    assert cooling.choose(BETA, [ALPHA], 4.0) == (BETA, 0)


def test_there_is_room_where_slots_or_a_hosts_share_are_not_used_up():
    workers = [task for task in place(4, 1, [ALPHA, BETA, GAMMA]) if task.role == "worker"]
    assert [worker.host for worker in workers] == [ALPHA, BETA, GAMMA, ALPHA]
    assert with_room([ALPHA, BETA, GAMMA], workers) == [BETA, GAMMA]
    there = moved(workers[0], GAMMA, workers)
    assert (there.rank, there.host, there.env["P3_LOCAL_RANK"], there.env["P3_LOCAL_SIZE"]) == (0, GAMMA, "1", "2")
    gone = [there, workers[1], Task("worker", 2, BETA, {"P3_LOCAL_RANK": "1"}), workers[3]]
    assert moved(there, ALPHA, gone).env["P3_LOCAL_RANK"] == "0"  # which it had left; rank 3 has 1


# Jobs


STEPS = 1500  # more than go on before a host is lost

def test_a_worker_whose_host_stays_away_is_started_on_another_one_with_room(tmp_path, processes):
    """Its restart is not used up by starts that cannot reach the host."""
    (tmp_path / "hosts").write_text("alpha slots=3\nbeta slots=1\n")
    for name in ("alpha", "beta"):
        (tmp_path / (name + ".up")).touch()
    options = ("--on-worker-loss", "wait", "--worker-restarts", "1", "--restart-pause", "30")
    launcher = [sys.executable, "-m", "p3", "run", "--hostfile", str(tmp_path / "hosts"), "-n", "2", "-s", "1"]
    env = {"P3_SSH": "%s %s %s" % (sys.executable, HELPERS / "ssh_to_here.py", tmp_path)}
    env.update(PYTHONPATH=PYTHONPATH, DMLC_NODE_HOST="127.0.0.1", OMP_NUM_THREADS="1")
    command = [*launcher, *options, *python("replaced_worker.py", STEPS)]
    processes.append(Process(command, clean_environment(**env), ROOT))
    job = processes[-1]
    try:
        while "rank 1 step 5" not in job.read_line():
            assert job.popen.poll() is None, job.wait()
        lose(tmp_path, "beta")
        finished = job.wait()
        assert finished.code == 0, finished
        assert "p3 run: starting worker 1 on alpha instead of beta\n" in finished.err
        assert finished.err.count("(0 more restarts allowed)") == 1 and "rank 1 key a holds " in finished.out
        assert finished.err.count("No route to host (it had not joined the job yet)") == 1, finished.err
    finally:
        for name in ("alpha", "beta"):
            (tmp_path / (name + ".up")).touch()
            lose(tmp_path, name)


@needs_lab
def test_a_job_waits_for_a_host_that_reboots(tmp_path, processes, sshd):
    """A start that hears nothing of the host is given up, one that is refused is tried again; the pauses between them
    grow, and none of them costs a restart."""
    with lab(2) as hosts:
        far = ReachedBySsh(hosts[1], tmp_path, sshd, processes)
        far.boot()
        (tmp_path / "hosts").write_text("localhost slots=1\n%s slots=1\n" % far.name)
        options = ("--on-worker-loss", "wait", "--worker-restarts", "1", "--restart-pause", "0.1")
        command = [sys.executable, "-m", "p3", "run", "--hostfile", str(tmp_path / "hosts"), "-n", "2", "-s", "1"]
        command = hosts[0].command(*command, *options, *python("replaced_worker.py", STEPS))
        env = clean_environment(P3_SSH=far.ssh, P3_TIMEOUT_S="2", OMP_NUM_THREADS="1")
        processes.append(Process(command, env, ROOT))
        job = processes[-1]
        while "rank 1 step 5" not in job.read_line():
            assert job.popen.poll() is None, job.wait()
        far.cut_off()
        said = job.popen.stderr

        def read_until(text, times):
            while times:
                line = said.readline().decode()
                assert line, "p3 run has ended"
                times -= text in line

        read_until("SIGKILL (it had not joined the job yet)", 1)
        far.end_all()
        far.is_connected()
        read_until("Connection refused (it had not joined the job yet)", 3)
        far.boot()
        finished = job.wait()
    assert finished.code == 0 and "more restarts allowed" not in finished.err, finished
    assert all("rank %d key a holds " % rank in finished.out for rank in (0, 1)), finished
