"""Processes that join a job which has lost servers: as workers, which go to the heirs as all others, and in the places
of the lost servers; to the bit."""

import re
import signal
import sys

from joining_behind_jobs import Job

from p3.cluster.node import listen
from p3.measure.chaos import strike


def test_others_join_behind_one_loss_after_the_other(tmp_path, processes):
    job = Job(tmp_path, processes)
    job.let_go(0)
    job.let_go("on")
    # By `left` of those with whom the job began. The second server has inherited.
    for step, server, worker, left in ((5, 1, 2, 3), (10, 0, 0, 2)):
        job.hear("waits for go-%d" % step, left)
        job.lose_server(server, left)
        job.kill("worker", worker)
        job.join()
        job.let_go(step)
    job.hear("waits for go-15")
    job.let_go(15)
    job.end()


def test_one_that_waits_to_join_as_a_server_is_lost_joins_behind_that(tmp_path, processes):
    job = Job(tmp_path, processes)
    job.let_go(0)
    job.hear("waits for go-5", 3)
    job.kill("worker", 1)
    job.join()
    job.lose_server(0, 2)
    for step in ("on", 5, 10, 15):
        job.let_go(step)
    job.end()


def test_one_on_trial_departs_with_a_server_and_the_next_one_joins(tmp_path, processes):
    job = Job(tmp_path, processes)
    job.let_go("0")
    job.hear("waits for go-5", 3)
    job.kill("worker", 1)
    job.hear("The others go on without it")
    first = job.join()
    job.let_go(5)
    first.read_until("waits for go-on")
    job.kill("server", 1)
    job.hear("The others go on without it")  # it may itself have noticed first
    job.let_go("on")
    assert first.wait(60).code == 1
    job.guests.remove(first)
    job.join()
    for step in (10, 15):
        job.let_go(step)
    job.end(1, range(5, 10))


def test_the_next_scheduler_knows_the_heirs(tmp_path, processes):
    job = Job(tmp_path, processes)
    job.let_go(0)
    job.hear("waits for go-5", 3)
    job.lose_server(2, 3)
    job.kill("scheduler", 0)
    job.hear("all nodes have come back")
    job.kill("worker", 2)
    job.join()
    for step in ("on", 5, 10, 15):
        job.let_go(step)
    job.end()


def test_p3_run_starts_another_process_for_each_loss_of_a_server(tmp_path, processes):
    job = Job(tmp_path, processes, "--rejoin", losses=["server"])
    job.let_go(0)
    for step, server in ((5, 1), (10, 1), (15, 0)):
        job.hear("waits for go-%d" % step, 3)
        job.kill("server", server)
        job.hear("waits to come back")
        job.let_go(step)
        job.hear("server %d (127.0.0.1) is back" % server)
    wanted = r"p3 run: server (\d) ended .*; the job goes on without it, and another one is started (.*), to join at "
    wanted += r"the workers' next members\(round\) \((\d) more restarts? allowed\)"
    said = re.findall(wanted, job.end().err)
    assert said == [("1", "now", "2"), ("1", "in 1 s", "1"), ("0", "now", "2")]


def test_one_that_waits_comes_to_the_next_scheduler_with_the_port_that_it_has(tmp_path, processes):
    listeners = [listen("127.0.0.1") for _ in range(3)]
    ports = ",".join(str(one.getsockname()[1]) for one in listeners)
    for one in listeners:
        one.close()
    job = Job(tmp_path, processes, "--rejoin", P3_SERVER_PORTS=ports)
    for name in (0, "on"):
        job.let_go(name)
    job.hear("waits for go-5", 3)
    job.kill("server", 1)
    job.hear("waits to come back")
    job.kill("scheduler", 0)
    job.hear("waits to come back")
    job.let_go(5)
    job.hear("server 1 (127.0.0.1) is back")
    for step in (10, 15):
        job.let_go(step)
    assert job.end().err.count("p3 run: server 1") == 1


def test_one_that_freezes_before_it_is_back_is_ended_and_another_one_started(tmp_path, processes):
    job = Job(tmp_path, processes, "--rejoin", losses=["server"], P3_TIMEOUT_S="4")
    job.let_go(0)
    job.hear("waits for go-5", 3)
    job.lose_server(1, 3)
    job.hear("waits to come back")
    job.kill("server", 1, signal.SIGSTOP)
    job.let_go(5)
    job.hear("It has not come back")
    job.hear("waits to come back")
    job.let_go(10)
    job.hear("server 1 (127.0.0.1) is back")
    job.let_go(15)
    assert job.end().err.count("p3 run: server 1") == 2


def test_workers_and_servers_come_back_at_one_mark(tmp_path, processes):
    job = Job(tmp_path, processes, "--rejoin")
    job.let_go(0)
    job.let_go("on")
    job.hear("waits for go-5", 3)
    job.lose_server(2, 3)
    job.kill("worker", 0)
    job.hear("waits to join the job")
    job.let_go(5)
    job.hear("server 2 (127.0.0.1) is back")
    for step in (10, 15):
        job.let_go(step)
    assert job.end().err.count("another one is started now") == 2


def test_a_server_joins_by_hand_and_p3_run_goes_on_behind_its_loss(tmp_path, processes):
    job = Job(tmp_path, processes, losses=["server"])
    job.let_go(0)
    job.hear("waits for go-5", 3)
    job.lose_server(1, 3)
    other = job.p3("join", "--pid", str(job.run.popen.pid), "--server", "--rank", "7").wait(30)
    assert other.code == 1 and "which has servers 0 to 2" in other.err, other
    impatient = job.p3("join", "--pid", str(job.run.popen.pid), "--server", "--wait", "1").wait(30)
    assert impatient.code == 1 and "waited 1 s (P3_JOIN, --wait) to join the job" in impatient.err, impatient
    assert "the workers did not call members(round) yet" in impatient.err, impatient
    job.hear("waits to come back")
    guest = job.join("--server")
    env = strike.marked(job.mark)[guest.popen.pid]
    assert (env["DMLC_ROLE"], env["P3_JOIN"], env["P3_ON_SERVER_LOSS"]) == ("server", "3600", "continue"), env
    assert env["P3_ON_WORKER_LOSS"] == "fail", env
    job.let_go(5)
    job.hear("server 1 (127.0.0.1) is back")
    job.hear("waits for go-10", 3)
    job.lose_guest(guest, 1, 3)
    job.join("--server", "--rank", "1")
    for step in (10, 15):
        job.let_go(step)
    assert job.end().err.count("p3 run: server") == 1


def test_somebody_elses_server_may_take_the_place_for_which_that_of_p3_run_waits(tmp_path, processes):
    job = Job(tmp_path, processes, "--rejoin", losses=["server"])
    job.let_go(0)
    job.hear("waits for go-5", 3)
    guest = job.join("--server", "--rank", "1")
    job.lose_server(1, 3)
    job.hear("waits to come back")
    job.let_go(5)
    job.hear("server 1 (127.0.0.1) is back")
    job.hear("waits for go-10", 3)
    job.lose_guest(guest, 1, 3)
    job.let_go(10)
    job.hear("server 1 (127.0.0.1) is back")
    last = job.join("--server")
    job.let_go(15)
    job.guests.remove(last)
    assert job.end().err.count("p3 run: server") == 1
    assert last.wait(30).code == 1


SUMS = """
import os
import numpy as np, p3

with p3.Session.open() as session:
    key, landing = session.declare("w", (1000,), "float32"), np.zeros(1000, np.float32)
    session.init(key, landing.copy() if session.is_first else None, landing).wait(60)
    print("worker %d trains" % session.rank, flush=True)
    while landing[0] == 0:  # the same number of rounds on all
        session.pushpull(key, np.full(1000, os.path.exists("go-end"), np.float32), landing).wait(60)
"""


def test_a_server_that_is_never_let_in_waits_and_ends_with_the_job(tmp_path, processes):
    command = [sys.executable, "-c", SUMS]
    job = Job(tmp_path, processes, "--rejoin", losses=["server"], command=command)
    job.hear("trains", 3)
    job.kill("server", 1)
    job.hear("waits to come back")
    job.let_go("end")
    ended = job.run.wait(60)
    assert ended.code == 0 and ended.err.count("p3 run: server 1") == 1, ended
    assert "[server 1] p3:" not in job.said + ended.out, ended


def test_a_server_is_let_into_no_job_that_ends_with_a_lost_one(tmp_path, processes):
    job = Job(tmp_path, processes, losses=[], command=[sys.executable, "-c", SUMS])
    job.hear("trains", 3)
    came = job.p3("join", "--pid", str(job.run.popen.pid), "--server").wait(30)
    assert came.code == 1 and "does not go on without lost servers" in came.err, came
    job.let_go("end")
    assert job.run.wait(60).code == 0
